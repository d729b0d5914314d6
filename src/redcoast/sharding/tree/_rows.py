"""The spec and the reason for every array of a tree."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from ._leaves import Leaf, children_of, flat_leaves, key_name
from ._optimizer_state import follow

OVERRIDE = "override"  # the reason for what a user decided
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
