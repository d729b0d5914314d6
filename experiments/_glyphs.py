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
    covered, drawn_with = {}, {}  # the characters of each font, and what draws them
    for font in fonts:
        file = folder / f"{font}.ttf"
        if file.exists():
            covered[font] = {*(TTFont(file).getBestCmap() or ())}
            # At this size, the tallest letters with two accents fill the image.
            drawn_with[font] = ImageFont.truetype(str(file), size * 2 // 3)
    glyphs, looks = [], set()
    for code in sorted(set().union(*covered.values())):
        character = chr(code)
        name = unicodedata.name(character, "").lower()
        is_letter_or_digit = unicodedata.category(character)[0] in "LN"
        if not is_letter_or_digit or name.partition(" ")[0] not in first_words:
            continue
        drawn = []
        for font, characters in covered.items():
            if code in characters:
                drawn.append(Glyph(_draw(character, drawn_with[font], size), name, font))
        look = drawn[0].font, drawn[0].image.tobytes()
        if look not in looks:
            glyphs += drawn
        looks.add(look)
    return glyphs


def _draw(character: str, font: ImageFont.FreeTypeFont, size: int) -> np.ndarray:
    image = Image.new("L", (size, size))
    left, top, right, bottom = font.getbbox(character)
    corner = ((size - left - right) / 2, (size - top - bottom) / 2)
    ImageDraw.Draw(image).text(corner, character, fill=255, font=font)
    return np.asarray(image, np.float32) / 255
