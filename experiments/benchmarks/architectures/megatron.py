"""Megatron's shardings over the `model` axis, by the names of the arrays (arXiv:1909.08053)."""

from typing import Any

import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

# The sharded dimension, counted from the end because stacked layers have one more in front.
COLUMN = dict.fromkeys(["wq", "wk", "wv", "wqkv", "w_in", "gate", "up", "head"], -1)
COLUMN_BIAS = dict.fromkeys(["bq", "bk", "bv", "bqkv", "b_in", "head_bias"], -1)
ROW = dict.fromkeys(["wo", "w_out", "down"], -2)
VOCABULARY = {"embed": -2}
SPLIT = COLUMN | COLUMN_BIAS | ROW | VOCABULARY


def megatron_specs(params: PyTree) -> PyTree:
    """A spec for each array: column-parallel, row-parallel, or replicated."""

    def spec(path: Any, array: jax.Array) -> P:
        dim = SPLIT.get(path[-1].key)
        if dim is None:
            return P()
        entries: list[str | None] = [None] * array.ndim
        entries[dim] = "model"
        return P(*entries)

    return jax.tree.map_with_path(spec, params)
