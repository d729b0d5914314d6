"""Checks and applies the specs that a user gives for paths."""

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
        matched = [leaf for leaf in leaves if _compiled(pattern).search(leaf.name)]
        if not matched:
            raise ValueError(_no_match(pattern, leaves))
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
    """The number of shards of an array with this spec."""
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
    for dim, entry in enumerate(spec):
        parts = spec_parts(P(entry), axes)
        if leaf.shape[dim] % parts:
            raise ValueError(_indivisible(leaf, pattern, dim, spec_axes(entry), parts, axes))


def _indivisible(
    leaf: Leaf, pattern: str, dim: int, names: tuple[str, ...], parts: int, axes: dict[str, int]
) -> str:
    size = leaf.shape[dim]
    sizes = " x ".join(f"{name}={axes[name]}" for name in names)
    fits = [d for d in range(len(leaf.shape)) if leaf.shape[d] and leaf.shape[d] % parts == 0]
    others = f" Dimension {' or '.join(map(str, fits))} is divisible." if fits else ""
    return (
        f"The override {pattern!r} shards dimension {dim} of {leaf.name}, shape {leaf.shape}, over "
        f"{sizes}, but {size} is not a multiple of {parts} ({multiples_near(size, parts)} would "
        f"be).{others}"
    )


def multiples_near(size: int, n: int) -> str:
    """The multiples of `n` around `size`, such as "48 or 52"."""
    below = size // n * n
    return f"{below} or {below + n}" if below else f"{n}"


def _no_match(pattern: str, leaves: Sequence[Leaf]) -> str:
    names = [leaf.name for leaf in leaves]
    close = difflib.get_close_matches(pattern, names, n=5, cutoff=0.3) or names[:5]
    return (
        f"The override pattern {pattern!r} matches no array's path. "
        f"Among the {len(names)} paths are: {', '.join(close) or 'none at all'}."
    )
