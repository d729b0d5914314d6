"""Images of characters with their Unicode names, from the fonts that matplotlib carries."""

import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from fontTools.ttLib import TTFont
from PIL import Image, ImageDraw, ImageFont

STYLES = ("", "-Bold", "-Oblique", "-BoldOblique", "-Italic", "-BoldItalic")
FAMILIES = ("DejaVuSans", "DejaVuSerif", "DejaVuSansMono", "STIXGeneral")
STIX = ("STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta")
FONTS = (*(family + style for family in FAMILIES for style in STYLES), *STIX)


class Glyph(NamedTuple):
    """A character as one font draws it."""

    image: np.ndarray  # (size, size), float32 from 0 (paper) to 1 (ink)
    name: str  # such as "latin small letter a with acute"
    font: str  # such as "DejaVuSans-Bold"


def read_glyphs(size: int, *, first_words: Sequence[str], fonts: Sequence[str] = FONTS):
    """Draws the letters and digits whose Unicode names start with one of `first_words`.

    Of characters that look the same, such as the Latin and the Greek A, only the first is drawn.
    Returns a list of `Glyph`, in the order of characters, then fonts.
    """
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    files = {font: folder / f"{font}.ttf" for font in fonts if (folder / f"{font}.ttf").exists()}
    covered = {font: {*(TTFont(file).getBestCmap() or ())} for font, file in files.items()}
    glyphs, seen = [], set()
    # At this size, the tallest letters with two accents fill the image.
    drawn_with = {
        font: ImageFont.truetype(str(file), size * 2 // 3) for font, file in files.items()
    }
    for code in sorted(set().union(*covered.values())):
        name = unicodedata.name(chr(code), "").lower()
        if name.split()[:1] and name.split()[0] in first_words:
            if unicodedata.category(chr(code))[0] not in "LN":
                continue
            drawn = [
                Glyph(_draw(chr(code), drawn_with[font], size), name, font)
                for font in files
                if code in covered[font]
            ]
            look = drawn[0].font, drawn[0].image.tobytes()
            glyphs += drawn if look not in seen else []
            seen.add(look)
    return glyphs


def _draw(character: str, font: ImageFont.FreeTypeFont, size: int) -> np.ndarray:
    image = Image.new("L", (size, size))
    left, top, right, bottom = font.getbbox(character)
    corner = ((size - left - right) / 2, (size - top - bottom) / 2)
    ImageDraw.Draw(image).text(corner, character, fill=255, font=font)
    return np.asarray(image, np.float32) / 255
