"""Texts without what follows their end."""

from collections.abc import Iterable


def cut_at(text: str, ends: Iterable[str]) -> str:
    """Returns the part of a text before the first of some strings."""
    for end in ends:
        if end:
            text = text.split(end)[0]
    return text
