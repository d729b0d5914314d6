"""Settings that claim far more than the files hold, refused before memory is taken for it."""

from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from .stored import Stored

COUNTS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer", "encoder_layers")
COUNTS += ("decoder_layers", "vision_layers")
# A tensor may be used more than once, and be left out where it is zero.
MOST_TIMES, SPARE_ELEMENTS = 4, 2**16


def check_layers(settings: Mapping[str, Any], tensors: int, path: Path) -> None:
    """Each layer has tensors, so that there are no more layers than these."""
    for name, value in settings.items():
        if isinstance(value, dict):
            check_layers(value, tensors, path)
        elif name in COUNTS and isinstance(value, int) and value > tensors:
            raise ValueError(
                f"{path} has settings and tensors of different models: `{name}` is {value}, and "
                f"there are {tensors} tensors."
            )


def check_elements(arrays: Iterable[Any], stored: Mapping[str, Stored], path: Path) -> None:
    """The arrays of a model are what the files hold, in about the same number."""
    sizes = [prod(x.shape) for x in arrays]
    held = sum(prod(x.shape) for x in stored.values())
    if 0 in sizes or sum(sizes) > MOST_TIMES * held + SPARE_ELEMENTS:
        raise ValueError(
            f"{path} has settings and tensors of different models: that of the settings has "
            f"{sum(sizes)} parameters{', and arrays without any' * (0 in sizes)}; the files hold "
            f"{held}."
        )
