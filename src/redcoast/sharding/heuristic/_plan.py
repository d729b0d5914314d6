"""Rows by the rules on the structure of a tree; imported when they are asked for."""

from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec as P

from ..tree._leaves import Leaf, flat_leaves, is_inexact
from ..tree._optimizer_state import trim
from ..tree._overrides import Override, apply_overrides
from ..tree._rows import FSDP_TOO, OVERRIDE, Row
from ._chains import fsdp_dim
from ._roles import Roles, find_roles
from ._splits import Split


def structural_rows(model: Any, axes: dict[str, int], overrides: Sequence[Override]) -> list[Row]:
    """Rows by the rules on the structure of the tree."""
    leaves = [leaf for leaf in flat_leaves(model) if leaf is not None]
    given = apply_overrides(leaves, overrides, axes)
    roles = find_roles(model, axes["model"])
    rows = []
    for leaf in leaves:
        spec, reason = _spec(leaf, roles, axes)
        if leaf.index in given:
            spec, reason = given[leaf.index], OVERRIDE
        rows.append(Row(leaf, spec, reason, "parameter" if is_inexact(leaf) else "other"))
    return rows


def _spec(leaf: Leaf, roles: Roles, axes: dict[str, int]) -> tuple[P, str]:
    """What the rules say: over `model` first, and then over `fsdp` what is left."""
    if not is_inexact(leaf):
        return P(), "whole: integers or keys, no parameter"
    split, fixed = roles.splits[leaf.index], roles.fixed[leaf.index]
    split = split if axes["model"] > 1 else Split(None, "")
    stored, why = None, ""
    if axes["fsdp"] > 1:
        stored, why = fsdp_dim(leaf.shape, roles.stacks[leaf.index], fixed, split, axes["fsdp"])
    entries = [None] * len(leaf.shape)
    for dim, axis in ((split.dim, "model"), (stored, "fsdp")):
        entries = [axis if d == dim else entry for d, entry in enumerate(entries)]
    return trim(tuple(entries)), _reason(split, stored, why)


def _reason(split: Split, stored: int | None, why: str) -> str:
    if split.dim is not None:
        return split.reason if stored is None else split.reason + FSDP_TOO
    if stored is not None:
        return f"{why}; not over model: {split.reason}" if split.reason else why
    return f"whole: {split.reason or why or 'one device on fsdp and model'}"
