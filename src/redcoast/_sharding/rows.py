"""The spec and the reason for every array of a tree."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from .nodes import Leaf, children_of, flat_leaves, is_inexact, key_name
from .optimizer_state import follow, trim
from .overrides import Override, apply_overrides
from .rules.fsdp import fsdp_dim
from .rules.roles import Roles, find_roles
from .rules.splits import Split

FSDP_TOO = "; fsdp: largest remaining dimension"


@dataclass(frozen=True)
class Row:
    """One array of a plan; `role` is "parameter", "optimizer state" or "other"."""

    leaf: Leaf
    spec: P
    reason: str
    role: str


def plan_rows(tree: Any, model_rows: Callable[[Any], list[Row]]) -> list[Row]:
    """A row for each array, in flattened order; those of the model are made by `model_rows`."""
    model_part = model_of(tree)
    if model_part is tree:
        return model_rows(tree)
    model = model_rows(model_part)
    specs = {row.leaf.index: row.spec for row in model}
    outside = [leaf for leaf in flat_leaves(tree) if leaf is not None and leaf.path[0] != "model"]
    states = [leaf for leaf in outside if leaf.path[0] == "opt_state"]
    followed = follow(states, [row.leaf for row in model], specs)
    rows = [replace(row, leaf=_shifted(row.leaf, _offset(tree))) for row in model]
    for leaf in outside:
        if leaf.index in followed:
            rows.append(Row(leaf, *followed[leaf.index], "optimizer state"))
        else:
            rows.append(Row(leaf, P(), "one for the whole run", "other"))
    return sorted(rows, key=lambda row: row.leaf.index)


def model_of(tree: Any) -> Any:
    """The model in the state of a run; any other tree is a model itself."""
    parts = {key_name(key): child for key, child in children_of(tree) if key is not None}
    return parts["model"] if {"model", "opt_state"} <= set(parts) else tree


def _offset(tree: Any) -> int:
    """How many leaves come before those of the model in a training state."""
    count = 0
    for key, child in children_of(tree):
        if key_name(key) == "model":
            break
        count += len(jax.tree.leaves(child))
    return count


def _shifted(leaf: Leaf, offset: int) -> Leaf:
    return replace(leaf, index=leaf.index + offset)


def structural_rows(model: Any, axes: dict[str, int], overrides: Sequence[Override]) -> list[Row]:
    """Rows by the rules on the structure of the tree."""
    leaves = [leaf for leaf in flat_leaves(model) if leaf is not None]
    given = apply_overrides(leaves, overrides, axes)
    roles = find_roles(model, axes["model"])
    rows = []
    for leaf in leaves:
        spec, reason = _spec(leaf, roles, axes)
        if leaf.index in given:
            spec, reason = given[leaf.index], "override"
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
