"""Checks of the fields of configurations."""

import dataclasses
import math
import types
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np

from ..core._errors import short_repr

# Fields that may be left out and must be positive, or not negative, unless they are None.
_POSITIVE = frozenset(
    """
    window context head_size experts pooler_size rope_base local_rope_base score_scale score_cap
    logit_cap layer_scale embed_scale residual_scale score_factor logit_divisor factor low high
    original limit route_scale outputs
    """.split()  # noqa: SIM905
)
_NOT_NEGATIVE = frozenset(("norm_eps", "router_loss_weight", "query_growth", "shift"))
_WORDS = {int: "an integer", float: "a number", bool: "True or False", str: "text"}
_WORDS |= {types.NoneType: "None"}


def check_fields(config) -> None:
    """Raises if the value of a field is not of its declared type (a bool is not a number), is NaN
    or infinite, or is out of range."""
    for field in dataclasses.fields(config):
        name, value = field.name, getattr(config, field.name)
        if not _is_of_type(value, field.type):
            message = (
                f"`{name}` must be {_in_words(field.type)}, but is {short_repr(value)}"
                f"{where(config)}."
            )
            if isinstance(value, str):  # an unknown name, which has the right type
                raise ValueError(message)
            raise TypeError(message)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"`{name}` must be a finite number, but is {value}{where(config)}.")
        if value is not None and name in _POSITIVE and not value > 0:
            raise ValueError(f"`{name}` must be positive, but is {value}{where(config)}.")
        if value is not None and name in _NOT_NEGATIVE and value < 0:
            raise ValueError(f"`{name}` must not be negative, but is {value}{where(config)}.")


def where(config: object) -> str:
    """Returns which configuration a message is about."""
    return f" in the `{type(config).__name__}`"


def _is_of_type(value: object, declared) -> bool:
    origin, args = get_origin(declared), get_args(declared)
    if origin in (Union, types.UnionType):
        return any(_is_of_type(value, member) for member in args)
    if origin is Literal:
        return isinstance(value, str) and value in args
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if args[-1] is Ellipsis:
            args = args[:1] * len(value)
        return len(value) == len(args) and all(map(_is_of_type, value, args))
    # In Python, True and False are integers too.
    return isinstance(value, declared) and (declared is bool or not isinstance(value, bool))


def _in_words(declared) -> str:
    """The allowed types, in words."""
    origin, args = get_origin(declared), get_args(declared)
    if origin in (Union, types.UnionType):
        # Every integer is a number.
        # `int | float` is "a number".
        members = [member for member in args if not (member is int and float in args)]
        return " or ".join(map(_in_words, members))
    if origin is Literal:
        return " or ".join(map(repr, args))
    if origin is tuple:
        return f"a tuple in which each is {_in_words(args[0])}"
    return _WORDS.get(declared) or f"a {declared.__name__}"


def check_multiple(config: object, name: str, divisor: str) -> None:
    """Raises if a field is not a multiple of another one, which may be None."""
    size, part = getattr(config, name), getattr(config, divisor)
    if part is not None and size % part:
        raise ValueError(
            f"`{name}` must be a multiple of `{divisor}`, but {size} is not a multiple of "
            f"{part}{where(config)}."
        )


def check_even(config: object, *names: str) -> None:
    for name in names:
        if (size := getattr(config, name)) % 2:
            raise ValueError(f"`{name}` must be even, but is {size}{where(config)}.")


def check_entries(config: Any, name: str) -> None:
    """Raises if a field has entries, but not one for each layer."""
    count, layers = len(getattr(config, name)), config.layers
    if count and count != layers:
        raise ValueError(
            f"`{name}` must have one entry for each of the {layers} layers, but has {count}."
        )


def check_local(config: Any) -> None:
    """Raises if `local` does not have one entry for each layer, or needs a missing `window`."""
    check_entries(config, "local")
    if any(config.local) and config.window is None:
        raise ValueError(
            "`local` gives layers a window, but `window` is None. Pass its size in tokens."
        )


def check_chosen(config: Any) -> None:
    """Raises if a token is routed to more experts than there are, if there are any."""
    if config.experts is not None and config.chosen > config.experts:
        raise ValueError(
            f"`chosen` must be at most `experts`, but they are {config.chosen} and "
            f"{config.experts}."
        )


def check_patches(image: int | tuple[int, int], patch: int | tuple[int, int]) -> None:
    """Raises if the height or the width of an image is not a multiple of the patch size."""
    sides, steps = np.atleast_1d(image), np.atleast_1d(patch)  # of a number or a pair
    if min(*sides, *steps) < 1 or any(sides % steps):
        raise ValueError(
            f"`image` must be a multiple of `patch`, but {image} is not a multiple of {patch}."
        )


def check_labels(config: Any) -> None:
    """Raises if there are fewer than one label, or if `label_names` has a different length."""
    labels, names = config.labels, config.label_names
    if labels < 1:
        raise ValueError(f"`labels` must be at least 1, but is {labels}.")
    if names is not None and len(names) != labels:
        raise ValueError(f"`label_names` has {len(names)} names, but there are {labels} `labels`.")


def check_decoder_start(config: Any) -> None:
    """Raises if the token that a decoder starts with, if there is one, is not in the vocabulary."""
    start, vocab = config.decoder_start, config.vocab
    if start is not None and not 0 <= start < vocab:
        raise ValueError(
            f"`decoder_start` is {start}, but the token ids of the vocabulary are 0 to {vocab - 1}"
            f"{where(config)}. Pass one of these as `decoder_start`."
        )


def check_length(config: object, length: int) -> None:
    """Raises if a row has more tokens than a model has learned positions, if it has any."""
    positions = getattr(config, "positions", length)
    if length > positions:
        raise ValueError(
            f"There are {length} tokens in a row, but the model has {positions} positions. "
            "Truncate the rows to that length."
        )
