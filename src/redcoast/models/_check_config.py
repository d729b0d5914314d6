"""Checks that several configurations share."""

import dataclasses
import math
import types
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np

from ..core._errors import short_repr
from ._basic import check_activation
from ._scan_layers import check_remat

# Optional fields that must be positive, or not negative, unless they are None.
_POSITIVE = frozenset(
    """
    window context head_size experts pooler_size rope_base local_rope_base score_scale score_cap
    logit_cap layer_scale embed_scale residual_scale score_factor logit_divisor factor low high
    original
    """.split()  # noqa: SIM905
)
_NOT_NEGATIVE = frozenset(("norm_eps", "router_loss_weight", "query_growth"))
_KINDS = {int: "an integer", float: "a number", bool: "True or False", str: "text"}


def check_fields(config: Any) -> None:
    """Raises if the value of a field is not of its declared type (a bool is not a number), is NaN
    or infinite, or is out of range."""
    for field in dataclasses.fields(config):
        name, value = field.name, getattr(config, field.name)
        if not _is_of_kind(value, field.type):
            # An unknown name has the right type.
            wrong = ValueError if isinstance(value, str) else TypeError
            raise wrong(
                f"`{name}` must be {_kind(field.type)}, but is {short_repr(value)}{_where(config)}."
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"`{name}` must be a finite number, but is {value}{_where(config)}.")
        if value is not None and name in _POSITIVE and not value > 0:
            raise ValueError(f"`{name}` must be positive, but is {value}{_where(config)}.")
        if value is not None and name in _NOT_NEGATIVE and value < 0:
            raise ValueError(f"`{name}` must not be negative, but is {value}{_where(config)}.")


def _where(config: Any) -> str:
    return f" in the `{type(config).__name__}`"


def _is_of_kind(value: Any, kind: Any) -> bool:
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(_is_of_kind(value, one) for one in args)
    if origin is Literal:
        return isinstance(value, str) and value in args
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        kinds = [args[0]] * len(value) if args[-1] is Ellipsis else args
        return len(value) == len(kinds) and all(map(_is_of_kind, value, kinds))
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _kind(kind: Any) -> str:
    """The allowed types, in words."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        # Every integer is a number.
        kinds = [one for one in args if not (one is int and float in args)]
        return " or ".join(map(_kind, kinds))
    if origin is Literal:
        return " or ".join(map(repr, args))
    if origin is tuple:
        return f"a tuple in which each is {_kind(args[0])}"
    return _KINDS.get(kind) or ("None" if kind is types.NoneType else f"a {kind.__name__}")


def check_config(config: Any, *sizes: str) -> None:
    """Raises if a field has a wrong type or is out of range, if a size or `unroll` is below 1, if
    `kv_heads` does not divide `heads`, if a dropout rate is not in [0, 1), or if an activation
    function or `remat` is unknown.

    Integers without a default value are sizes, and so are the fields named in `sizes`.
    """
    check_remat(config.remat)
    check_fields(config)
    fields = dataclasses.fields(config)
    required = [x.name for x in fields if x.type is int and x.default is dataclasses.MISSING]
    for name in (*required, *sizes, *["unroll"] * (config.unroll is not None)):
        if (value := getattr(config, name)) < 1:
            raise ValueError(f"`{name}` must be at least 1, but is {value}{_where(config)}.")
    kv_heads = getattr(config, "kv_heads", config.heads)
    if config.heads % kv_heads:
        raise ValueError(
            f"`heads` must be a multiple of `kv_heads`, but {config.heads} is not a multiple of "
            f"{kv_heads}{_where(config)}."
        )
    for name, value in vars(config).items():
        if name.endswith("activation"):
            check_activation(value)
        if name.endswith("dropout") and value is not None and not 0 <= value < 1:
            raise ValueError(
                f"`{name}` must be at least 0 and less than 1, but is {value}{_where(config)}."
            )


class HeadSizes:
    """Configurations with heads of one size."""

    @property
    def head_dim(self) -> int:
        c: Any = self
        return getattr(c, "head_size", None) or c.width // c.heads


def check_heads(config: Any, *, even: bool = False) -> None:
    """Raises if `heads` does not divide `width` and there is no `head_size`; or, with `even`, if
    the head size is odd (rotary embeddings rotate pairs of features).

    Sets `head_size` to None if it is `width / heads`, so that configurations of the same model are
    equal.
    """
    size = getattr(config, "head_size", None)
    if size is None and config.width % config.heads:
        raise ValueError(
            f"`width` must be a multiple of `heads`, but {config.width} is not a multiple of "
            f"{config.heads}{_where(config)}."
        )
    if even and config.head_dim % 2:
        raise ValueError(f"The head size must be even, but is {config.head_dim}{_where(config)}.")
    if size is not None and size * config.heads == config.width:
        object.__setattr__(config, "head_size", None)


def check_rotary_dim(config: Any) -> None:
    """Raises if the number of rotated features is odd or larger than the head size.

    Sets `rotary_dim` to None if all features are rotated, so that configurations of the same model
    are equal.
    """
    size = config.rotated
    if size % 2 or not 0 < size <= config.head_dim:
        raise ValueError(
            f"`rotary_dim` must be even, positive and at most the head size {config.head_dim}, but "
            f"is {size}."
        )
    if config.rotary_dim == config.head_dim:
        object.__setattr__(config, "rotary_dim", None)


def check_local(config: Any) -> None:
    """Raises if `local` does not have one entry for each layer, or if it needs a missing
    `window`."""
    if config.local and len(config.local) != config.layers:
        raise ValueError(
            f"`local` must have one entry for each of the {config.layers} layers, but has "
            f"{len(config.local)}."
        )
    if any(config.local) and config.window is None:
        raise ValueError("`local` gives layers a window, so `window` must be its size.")


def check_chosen(config: Any) -> None:
    """Raises if a token is routed to more experts than there are."""
    if config.chosen > config.experts:
        raise ValueError(
            f"`chosen` must be at most `experts`, but they are {config.chosen} and "
            f"{config.experts}."
        )


def check_patches(config: Any) -> None:
    """Raises if the height or the width of an image is not a multiple of the patch size."""
    image, patch = np.atleast_1d(config.image), np.atleast_1d(config.patch)
    if min(*image, *patch) < 1 or any(image % patch):
        raise ValueError(
            f"`image` must be a multiple of `patch`, but {config.image} is not a multiple of "
            f"{config.patch}."
        )


def check_length(config: Any, length: int) -> None:
    """Raises if a row has more tokens than a model has learned positions, if it has any."""
    if length > getattr(config, "positions", length):
        raise ValueError(
            f"There are {length} tokens in a row, but the model has {config.positions} positions. "
            "Truncate the rows to that length."
        )
