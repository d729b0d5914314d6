"""The spec of every array of a tree, and the reason for it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
from jax.sharding import PartitionSpec as P

from ._leaves import Leaf, children_of, flat_leaves, key_name
from ._optimizer_state import follow_parameters
from ._reason import Reason

Role = Literal["parameter", "optimizer state", "other"]


@dataclass(frozen=True)
class Row:
    """One array of a plan, its spec, and the reason for it."""

    leaf: Leaf
    spec: P
    reason: Reason
    role: Role


def plan_rows(tree: Any, model_rows: Callable[[Any], list[Row]]) -> list[Row]:
    """Returns a row for each array, in flattened order. `model_rows` makes those of the model."""
    model_part = model_of(tree)
    if model_part is tree:
        return model_rows(tree)
    model = model_rows(model_part)
    specs = {row.leaf.index: row.spec for row in model}
    outside = [leaf for leaf in flat_leaves(tree) if leaf is not None and leaf.path[0] != "model"]
    states = [leaf for leaf in outside if leaf.path[0] == "opt_state"]
    followed = follow_parameters(states, [row.leaf for row in model], specs)
    offset = _leaves_before_model(tree)
    rows = [replace(row, leaf=replace(row.leaf, index=row.leaf.index + offset)) for row in model]
    for leaf in outside:
        if leaf.index in followed:
            rows.append(Row(leaf, *followed[leaf.index], "optimizer state"))
        else:
            text = "not a parameter" if leaf.shape else "scalar"
            rows.append(Row(leaf, P(), Reason("replicated", text), "other"))
    return sorted(rows, key=lambda row: row.leaf.index)


def model_of(tree: Any) -> Any:
    """The model of a training state, or the tree itself if it is not a training state."""
    parts = {key_name(key): child for key, child in children_of(tree) if key is not None}
    return parts["model"] if {"model", "opt_state"} <= set(parts) else tree


def _leaves_before_model(tree: Any) -> int:
    count = 0
    for key, child in children_of(tree):
        if key_name(key) == "model":
            break
        count += len(jax.tree.leaves(child))
    return count
