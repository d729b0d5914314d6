"""Scans over identical layers, whose arrays are stacked along the first dimension."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive
from jaxtyping import Array, Float, PyTree

from ..core._target import sequence_parts, target
from ._basic import split_key
from ._blockwise import KEPT
from ._by_layer import ByLayer
from ._inputs import Key

Remat = Literal["auto", "none", "dots", "full"]

# The kernels of fused attention, whose results are products too; they would run twice. What cuDNN's
# backward kernel needs beside the result is a float32 number for each query and head.
_FUSED = frozenset({"dot_product_attention_fwd", "dot_product_attention_fwd_wrapper"})


def _save_products(primitive: Primitive, *operands: Any, **params: Any) -> bool:
    """A policy that saves the products with weights, and the results of fused attention."""
    if primitive.name in _FUSED or (primitive.name == "name" and params["name"] == KEPT):
        return True
    return bool(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *operands, **params)
    )


_POLICIES = {
    "auto": None,  # what `memory` of `fit` decides
    "none": None,
    "dots": _save_products,
    "full": jax.checkpoint_policies.nothing_saveable,
}
# The largest number of layers that are by default unrolled in programs for a CPU.
MOST_UNROLLED = 12
# The same for a GPU, without a cache. For 16 layers of a LLaMA with 1.1 billion parameters, a loop
# moves 10 GB more in a step of an H100, since it collects what is saved for the backward pass in
# stacks; unrolled layers need less memory and compile in twice the time
# (`experiments/benchmarks/accelerators.py`, with jax 0.12).
MOST_UNROLLED_ON_GPU = 32
# Bytes of a layer on a GPU. The compiler gathers the weights of several unrolled layers at once,
# while others compute: 32 layers of Mixtral 8x7B, of 2.9 GB each in bfloat16 on 16 H100, take 101
# GB of temporaries, where a loop takes 22 (`accelerators.py steps-gpu`).
MOST_BYTES_UNROLLED = 2**30


def check_remat(remat: PyTree) -> None:
    if not isinstance(remat, str) or remat not in _POLICIES:
        raise ValueError(f"`remat` must be 'none', 'dots', 'full' or 'auto', but is {remat!r}.")


def with_remat(fn: Callable[..., Any], remat: Remat, *, prevent_cse: bool) -> Callable[..., Any]:
    """Returns the function, of which the backward pass computes again what `remat` says."""
    policy = _POLICIES[remat]
    if policy is None:
        return fn
    return jax.checkpoint(fn, policy=policy, prevent_cse=prevent_cse)


def scan_layers(
    layer_fn: Callable[..., tuple[Array, PyTree]],
    x: Float[Array, "..."],
    layers: PyTree,
    *,
    cache: PyTree = None,
    key: Key = None,
    remat: Remat = "none",
    unroll: int | None = None,
) -> tuple[Float[Array, "..."], PyTree]:
    """Applies layers one after the other to the residual stream.

    - `layer_fn`: `layer_fn(x, cache, layer, index, key)` returns the residual stream and the cache
        after a layer. `layer` is one slice of `layers`, and `index` is its number.
    - `layers`: a PyTree whose arrays are stacked over layers along their first dimension, or are
        `ByLayer`s, for which there is no loop and no rematerialisation.
    - `cache`: a PyTree that is passed from layer to layer, such as a key-value cache, or None.
    - `key`: PRNG key, split into one for each layer; None gives None to each layer.
    - `remat`: what to rematerialise in the backward pass, to save memory: `"none"`, `"dots"`
        (everything except the products with weights) or `"full"` (the entire layer).
    - `unroll`: the number of layers in one iteration of the loop; by default, all of them if there
        are few enough for the device (`default_unroll`), and otherwise one.

    Returns the residual stream and the cache after the last layer.
    """
    stacks = jax.tree.leaves(layers, is_leaf=is_by_layer)
    # Some stacks, such as flags of layers, are not split.
    by_layer = next(filter(is_by_layer, stacks), None)
    if by_layer is not None:
        for i, layer_key in enumerate(split_key(key, len(by_layer.arrays))):
            x, cache = layer_fn(x, cache, layer_arrays(layers, i), np.int32(i), layer_key)
        return x, cache
    count = jax.tree.leaves(layers)[0].shape[0]
    keys = None
    if key is not None:
        keys = jax.random.split(key, count)
    together = min(unroll or default_unroll(layers, count, has_cache=has_cache(cache)), count)

    # The residual stream of each layer is saved for the backward pass, in which XLA for GPUs
    # prefers another layout. XLA would copy the residual streams of all layers at once, which are
    # large for long sequences.
    fixed = sequence_parts() > 1 and target().platform == "gpu"

    def body(carry, inputs):
        x, cache = carry
        if fixed:
            x = with_layout_constraint(x, Layout(tuple(range(x.ndim))))
        return layer_fn(x, cache, *inputs), None

    # If an iteration has one layer, the compiler cannot undo rematerialisation by CSE.
    body = with_remat(body, remat, prevent_cse=together > 1)
    # Each iteration gets a slice of every array, and its number.
    inputs = (layers, jnp.arange(count), keys)
    (x, cache), _ = jax.lax.scan(body, (x, cache), inputs, unroll=together)
    return x, cache


def has_cache(cache: PyTree) -> bool:
    """Whether there is a key-value cache, rather than sums over the layers or nothing."""
    # Sums of routed tokens are vectors; keys and values have at least a row, a slot and a feature.
    return any(x.ndim > 2 for x in jax.tree.leaves(cache))


def default_unroll(layers: PyTree, count: int, *, has_cache: bool = False) -> int:
    """Returns the number of layers in one iteration of a loop over `count` layers: all or one.

    A loop compiles faster, but copies slices of weights and gradients. TPUs copy little. `layers`
    has the arrays of all of them.
    """
    platform, most = target().platform, 1
    if platform == "cpu":
        most = MOST_UNROLLED
    elif platform == "gpu" and not has_cache:
        layer_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(layers)) / count
        if layer_bytes <= MOST_BYTES_UNROLLED:
            most = MOST_UNROLLED_ON_GPU
    if count > most:
        return 1
    return count


def layer_arrays(layers: PyTree, i: int) -> PyTree:
    """Returns the arrays of one layer. `layers` has stacked arrays or `ByLayer`s."""

    def of_stack(stack: Array | ByLayer) -> Array:
        if isinstance(stack, ByLayer):
            return stack.arrays[i]
        return stack[i]

    return jax.tree.map(of_stack, layers, is_leaf=is_by_layer)


def is_by_layer(x: object) -> bool:
    return isinstance(x, ByLayer)
