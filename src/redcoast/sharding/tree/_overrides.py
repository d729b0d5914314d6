"""Checks and applies the specs that a user gives for paths."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from math import prod

import jax
from jax.sharding import PartitionSpec as P

from ...core._errors import short_repr, wrong_type
from ._leaves import Leaf

Override = tuple[str, P | tuple | None]


def apply_overrides(
    leaves: Sequence[Leaf], overrides: Iterable[Override], axes: Mapping[str, int]
) -> dict[int, P]:
    """Returns the spec of each leaf that a pattern matches, by index. The first match decides."""
    words = "a list of pairs of a pattern of paths and a `PartitionSpec` or `None`"
    if isinstance(overrides, str | Mapping | jax.Array) or not isinstance(overrides, Iterable):
        raise wrong_type("overrides", overrides, words)
    specs: dict[int, P] = {}  # by the index of a leaf
    for override in overrides:
        if not isinstance(override, list | tuple) or len(override) != 2:
            raise ValueError(
                f"The override {short_repr(override)} is not a pair. `overrides` must be {words}."
            )
        pattern, entries = override
        spec = _spec(pattern, entries, axes)
        for leaf in _matching(pattern, leaves):
            # An earlier pattern decides, and a later one is not checked against the leaf.
            if leaf.index not in specs:
                _check_fits(leaf, pattern, spec, axes)
                specs[leaf.index] = spec
    return specs


def _matching(pattern: str, leaves: Sequence[Leaf]) -> list[Leaf]:
    """The leaves with a path in which a pattern occurs. Raises if there is none."""
    matching: list[Leaf] = []
    try:
        for leaf in leaves:
            if re.search(pattern, leaf.name):
                matching.append(leaf)
    except (re.error, TypeError) as error:
        raise ValueError(
            f"The override pattern {pattern!r} is not a regular expression: {error}."
        ) from error
    if not matching:
        # Most mistakes are a path that is spelt otherwise.
        names = [leaf.name for leaf in leaves]
        text = str(getattr(pattern, "pattern", pattern))  # it may be compiled
        similar = difflib.get_close_matches(text, names, n=5, cutoff=0.3) or names[:5]
        raise ValueError(
            f"The override pattern {pattern!r} matches no array's path. "
            f"Among the {len(names)} paths are: {', '.join(similar) or 'none at all'}."
        )
    return matching


def spec_axes(entry: object) -> tuple[str, ...]:
    """The mesh axes of one entry of a spec."""
    if isinstance(entry, str):
        return (entry,)
    if isinstance(entry, tuple):
        return entry
    return ()


def axes_of_spec(spec: Iterable[object]) -> list[str]:
    """The mesh axes of all entries of a spec."""
    return [*chain(*map(spec_axes, spec))]


def model_dim(spec: Iterable[object]) -> int | None:
    """The first dimension that a spec shards over `model`, if any."""
    for d, entry in enumerate(spec):
        if "model" in spec_axes(entry):
            return d
    return None


def spec_parts(spec: Iterable[object], axes: Mapping[str, int]) -> int:
    """The number of shards of an array with this spec."""
    return prod(map(axes.__getitem__, axes_of_spec(spec)))


def _is_entry(x: object) -> bool:
    # One axis, several, or none.
    if isinstance(x, tuple):
        return all(isinstance(axis, str) for axis in x)
    return x is None or isinstance(x, str)


def _spec(pattern: str, entries: P | tuple | None, axes: Mapping[str, int]) -> P:
    if entries is None:
        return P()
    if not isinstance(entries, P | tuple | list) or not all(map(_is_entry, entries)):
        raise ValueError(
            f"The override {pattern!r} has {entries!r}. It must be `None`, or a `PartitionSpec` of "
            'names of mesh axes and `None`, such as `P("model")`.'
        )
    spec = P(*entries)
    used = axes_of_spec(spec)
    for axis in used:
        if axis not in axes:
            known = ", ".join(map(repr, axes))
            raise ValueError(
                f"The override {pattern!r} uses the mesh axis {axis!r}, but the mesh has {known}."
            )
        if used.count(axis) > 1:
            raise ValueError(
                f"The override {pattern!r} uses the mesh axis {axis!r} twice in {spec}. An axis "
                "can shard only one dimension of an array."
            )
    return spec


def _check_fits(leaf: Leaf, pattern: str, spec: P, axes: Mapping[str, int]) -> None:
    if len(spec) > len(leaf.shape):
        raise ValueError(
            f"The override {pattern!r} has {spec} with {len(spec)} entries, but {leaf.name} has "
            f"shape {leaf.shape} with {len(leaf.shape)} dimensions."
        )
    for dim, entry in enumerate(spec):
        size, parts = leaf.shape[dim], spec_parts((entry,), axes)
        if size % parts == 0:
            continue
        mesh_sizes = " x ".join(f"{name}={axes[name]}" for name in spec_axes(entry))
        # Most mistakes are another dimension than was meant.
        divisible: list[str] = []
        for d, n in enumerate(leaf.shape):
            if n and n % parts == 0:
                divisible.append(str(d))
        others = ""
        if divisible:
            others = f" Dimension {' or '.join(divisible)} is divisible."
        raise ValueError(
            f"The override {pattern!r} shards dimension {dim} of {leaf.name}, shape {leaf.shape}, "
            f"over {mesh_sizes}, but {size} is not a multiple of {parts} "
            f"({multiples_near(size, parts)} would be).{others}"
        )


def multiples_near(size: int, n: int) -> str:
    """The multiples of `n` around `size`, such as "48 or 52"."""
    below = size // n * n
    if below == 0:
        return f"{n}"
    return f"{below} or {below + n}"
