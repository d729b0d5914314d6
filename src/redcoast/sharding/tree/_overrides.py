"""Specs that the user gives for paths, checked in full before they are taken."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod

from jax.sharding import PartitionSpec as P

from ._leaves import Leaf

Override = tuple[str, P | tuple | None]


def apply_overrides(
    leaves: Sequence[Leaf], overrides: Iterable[Override], axes: dict[str, int]
) -> dict[int, P]:
    """The spec of each leaf (by index) that a pattern matches; the first pattern that does wins."""
    specs: dict[int, P] = {}
    for override in overrides:
        if isinstance(override, str) or len(override) != 2:
            raise ValueError(
                f"The override {override!r} is no pair. `overrides` is a list of pairs of a "
                "pattern of paths and a `PartitionSpec` or `None`."
            )
        pattern, given = override
        spec = _spec(pattern, given, axes)
        matched = [leaf for leaf in leaves if _compiled(pattern).search(leaf.name)]
        if not matched:
            raise ValueError(_nothing(pattern, leaves))
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


def spec_parts(spec: P, axes: Mapping[str, int]) -> int:
    """Into how many parts a spec splits an array over a mesh with such axes."""
    return prod(axes[axis] for entry in spec for axis in spec_axes(entry))


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(
            f"The override pattern {pattern!r} is not a regular expression: {error}."
        ) from error


def _spec(pattern: str, given: P | tuple | None, axes: dict[str, int]) -> P:
    spec = P() if given is None else P(*given)
    used = [axis for entry in spec for axis in spec_axes(entry)]
    for axis in used:
        if axis not in axes:
            known = ", ".join(repr(name) for name in axes)
            raise ValueError(
                f"The override {pattern!r} names the mesh axis {axis!r}; the mesh has {known}."
            )
        if used.count(axis) > 1:
            raise ValueError(
                f"The override {pattern!r} uses the mesh axis {axis!r} twice in {spec}; an axis "
                "can split one dimension of an array."
            )
    return spec


def _check(leaf: Leaf, pattern: str, spec: P, axes: dict[str, int]) -> None:
    if len(spec) > len(leaf.shape):
        raise ValueError(
            f"The override {pattern!r} gives {spec} with {len(spec)} entries, but {leaf.name} has "
            f"shape {leaf.shape} with {len(leaf.shape)} dimensions."
        )
    for dim, entry in enumerate(spec):
        parts = prod(axes[axis] for axis in spec_axes(entry))
        if leaf.shape[dim] % parts:
            raise ValueError(_indivisible(leaf, pattern, dim, spec_axes(entry), parts, axes))


def _indivisible(
    leaf: Leaf, pattern: str, dim: int, names: tuple[str, ...], parts: int, axes: dict[str, int]
) -> str:
    size = leaf.shape[dim]
    sizes = " x ".join(f"{name}={axes[name]}" for name in names)
    fits = [d for d in range(len(leaf.shape)) if leaf.shape[d] and leaf.shape[d] % parts == 0]
    below = size // parts * parts
    near = f"{below} or {below + parts}" if below else f"{parts}"
    others = f", or splitting dimension {' or '.join(map(str, fits))}" if fits else ""
    return (
        f"The override {pattern!r} splits dimension {dim} of {leaf.name}, shape {leaf.shape}, over "
        f"{sizes}; {size} is not a multiple of {parts}. A size of {near} would divide{others}."
    )


def _nothing(pattern: str, leaves: Sequence[Leaf]) -> str:
    names = [leaf.name for leaf in leaves]
    close = difflib.get_close_matches(pattern, names, n=5, cutoff=0.3) or names[:5]
    return (
        f"The override pattern {pattern!r} matches no array's path. "
        f"Among the {len(names)} paths are: {', '.join(close) or 'none at all'}."
    )
