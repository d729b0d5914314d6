"""Checks and applies the specs that a user gives for paths."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

from jax.sharding import PartitionSpec as P

from ._leaves import Leaf

Override = tuple[str, P | tuple | None]


def apply_overrides(
    leaves: Sequence[Leaf], overrides: Iterable[Override], axes: dict[str, int]
) -> dict[int, P]:
    """Returns the spec of each leaf that a pattern matches, by index. The first match decides."""
    specs: dict[int, P] = {}
    for override in overrides:
        if isinstance(override, str) or len(override) != 2:
            raise ValueError(
                f"The override {override!r} is not a pair. `overrides` must be a list of pairs of "
                "a pattern of paths and a `PartitionSpec` or `None`."
            )
        pattern, given = override
        spec = _spec(pattern, given, axes)
        try:
            matched = [leaf for leaf in leaves if re.search(pattern, leaf.name)]
        except (re.error, TypeError) as error:
            raise ValueError(
                f"The override pattern {pattern!r} is not a regular expression: {error}."
            ) from error
        if not matched:
            names = [leaf.name for leaf in leaves]
            text = str(getattr(pattern, "pattern", pattern))  # it may be compiled
            close = difflib.get_close_matches(text, names, n=5, cutoff=0.3) or names[:5]
            raise ValueError(
                f"The override pattern {pattern!r} matches no array's path. "
                f"Among the {len(names)} paths are: {', '.join(close) or 'none at all'}."
            )
        for leaf in matched:
            if leaf.index not in specs:
                _check(leaf, pattern, spec, axes)
                specs[leaf.index] = spec
    return specs


def spec_axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes of one entry of a spec."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def model_dim(spec: Iterable[Any]) -> int | None:
    """The first dimension that a spec shards over `model`, if any."""
    return next((d for d, entry in enumerate(spec) if "model" in spec_axes(entry)), None)


def spec_parts(spec: P, axes: Mapping[str, int]) -> int:
    """The number of shards of an array with this spec."""
    return prod(axes[axis] for entry in spec for axis in spec_axes(entry))


def _spec(pattern: str, given: P | tuple | None, axes: dict[str, int]) -> P:
    names = lambda x: (
        x is None
        or isinstance(x, str)
        or (isinstance(x, tuple) and all(isinstance(axis, str) for axis in x))
    )
    if not isinstance(given, P | tuple | list | None) or not all(map(names, given or ())):
        raise ValueError(
            f"The override {pattern!r} has {given!r}. It must be `None`, or a `PartitionSpec` of "
            'names of mesh axes and `None`, such as `P("model")`.'
        )
    spec = P() if given is None else P(*given)
    used = [axis for entry in spec for axis in spec_axes(entry)]
    for axis in used:
        if axis not in axes:
            known = ", ".join(repr(name) for name in axes)
            raise ValueError(
                f"The override {pattern!r} uses the mesh axis {axis!r}, but the mesh has {known}."
            )
        if used.count(axis) > 1:
            raise ValueError(
                f"The override {pattern!r} uses the mesh axis {axis!r} twice in {spec}. An axis "
                "can shard only one dimension of an array."
            )
    return spec


def _check(leaf: Leaf, pattern: str, spec: P, axes: dict[str, int]) -> None:
    if len(spec) > len(leaf.shape):
        raise ValueError(
            f"The override {pattern!r} has {spec} with {len(spec)} entries, but {leaf.name} has "
            f"shape {leaf.shape} with {len(leaf.shape)} dimensions."
        )
    for dim, (entry, size) in enumerate(zip(spec, leaf.shape, strict=False)):
        parts = spec_parts(P(entry), axes)
        if size % parts == 0:
            continue
        sizes = " x ".join(f"{name}={axes[name]}" for name in spec_axes(entry))
        fits = [str(d) for d, size in enumerate(leaf.shape) if size and size % parts == 0]
        others = f" Dimension {' or '.join(fits)} is divisible." if fits else ""
        raise ValueError(
            f"The override {pattern!r} shards dimension {dim} of {leaf.name}, shape {leaf.shape}, "
            f"over {sizes}, but {size} is not a multiple of {parts} ({multiples_near(size, parts)} "
            f"would be).{others}"
        )


def multiples_near(size: int, n: int) -> str:
    """The multiples of `n` around `size`, such as "48 or 52"."""
    below = size // n * n
    return f"{below} or {below + n}" if below else f"{n}"
