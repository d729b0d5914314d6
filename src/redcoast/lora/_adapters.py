"""Functions that add, extract, replace and merge the adapters of a model."""

import dataclasses
import math
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath
from jaxtyping import PRNGKeyArray, PyTree

from ..core._errors import check_integer, check_key, check_number
from ..core._frames import hide_frames
from ..core._pytree import leaf_paths, map_where, show_path
from ..models._basic import normal, wide
from ..models._einsum import LowRank, merged
from ._targets import find_matrices, is_adapted, is_weight, match_targets, with_paths


@hide_frames
def add_adapters(
    model: PyTree,
    rank: int,
    *,
    targets: str | Sequence[str],
    alpha: int | float | None = None,
    key: PRNGKeyArray,
) -> PyTree:
    """Adds low-rank adapters to matrices of a model
    (LoRA, Hu et al., 2021, <https://arxiv.org/abs/2106.09685>).

    A weight W becomes W + alpha / rank * A B (section 4.1). A is random and B is zero, so the model
    initially computes the same as before. Each layer and expert in a stack has its own adapter.

    **Arguments:**

    - `model`: a model of `redcoast.models`, or any PyTree that contains such models or
        `eqx.nn.Linear`; concrete, or abstract inside `eqx.filter_eval_shape`.
    - `rank`: the rank of A B, usually 4 to 64.
    - `targets`: a regular expression, or several, that are searched in the paths of the matrices,
        such as `"layers/w[qkvo]"`, or `"."` for all matrices.
    - `alpha`: by default the rank, so that A B is not scaled.
    - `key`: PRNG key for A, which is normal with variance 1 / inputs.

    **Returns:**

    The model with a [`redcoast.lora.LowRank`][] in place of each matched weight. The dtype of `a`
    and `b` is float32, or the weight's dtype if it is wider.

    **Raises:**

    `ValueError` if a pattern matches no matrix, if a matched matrix already has an adapter or is of
    integers, if the rank is less than 1, or if `alpha` is not positive and finite; `TypeError` if
    an argument has another type.

    !!! Example

        ```python
        model = lora.add_adapters(model, 8, targets="layers/w[qkvo]", key=jax.random.key(0))
        state = rc.fit(model, optimizer, examples, trainable=lora.trainable(model), **functions)
        lora.save_adapters(state.model, "adapters")
        ```
    """
    check_integer("rank", rank)
    check_key(key)
    if alpha is not None:
        check_number("alpha", alpha, above=0, finite=True)
    matrices = find_matrices(model)
    chosen = sorted(match_targets(targets, matrices))
    if adapted := sorted(leaf_paths(model, LowRank).keys() & chosen):
        raise ValueError(
            f"{', '.join(adapted)} has an adapter already. Merge it (`lora.merge`) before adding "
            "another, or match other weights."
        )
    # By the sorted paths, so that the same key gives the same adapters.
    keys = dict(zip(chosen, jax.random.split(key, len(chosen)), strict=True))
    scale = 1.0
    if alpha is not None:
        scale = float(alpha / rank)

    def adapt(path: KeyPath, leaf: PyTree) -> PyTree:
        name = show_path(path)
        if name not in keys:
            return leaf
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise ValueError(
                f"{name} has dtype {leaf.dtype}, to which an adapter cannot be added. Quantise "
                "matrices with `lora.quantise`, or match other weights."
            )
        matrix, dtype = matrices[name], wide(leaf.dtype)
        stack, inputs, outputs = matrix.sides(leaf.shape)
        # The product of both factors is zero, so that training begins with the model itself.
        shape = (*stack, *inputs, rank)
        a = normal(keys[name], shape, fan_in=math.prod(inputs)).astype(dtype)
        b = jnp.zeros((*stack, rank, *outputs), dtype)
        return LowRank(leaf, a, b, scale, matrix.outputs_first)

    return jax.tree_util.tree_map_with_path(adapt, model, is_leaf=is_weight)


@hide_frames
def trainable(model: PyTree) -> PyTree:
    """Selects the adapters of a model as its trainable parameters.

    **Arguments:**

    - `model`: a model with adapters.

    **Returns:**

    A PyTree of booleans with the structure of the model, to pass as `trainable` to
    [`redcoast.fit`][], [`redcoast.init_state`][] and [`redcoast.train_step`][], so that only the
    adapters have gradients and optimizer state.

    **Raises:**

    `ValueError` if there are no adapters.
    """
    if not leaf_paths(model, LowRank):
        raise ValueError("The model has no adapters. Add them first, with `lora.add_adapters`.")
    nothing = jax.tree.map(lambda _: False, model)
    return eqx.tree_at(_factors, nothing, replace_fn=lambda _: True)


def _factors(model: PyTree) -> list[PyTree]:
    factors = []
    for node in leaf_paths(model, LowRank).values():
        factors += [node.a, node.b]
    return factors


@hide_frames
def adapters(model: PyTree) -> PyTree:
    """Extracts the adapters of a model, for example to save only them.

    **Arguments:**

    - `model`: a model with adapters.

    **Returns:**

    The model with `None` in place of all other arrays. Pass it to [`redcoast.save_checkpoint`][],
    as `like` to [`redcoast.load_checkpoint`][], or to [`redcoast.lora.with_adapters`][].

    **Raises:**

    `ValueError` if there are no adapters.
    """
    return eqx.filter(model, trainable(model))


@hide_frames
def with_adapters(model: PyTree, adapters: PyTree) -> PyTree:
    """Replaces the adapters of a model.

    **Arguments:**

    - `model`: a model, with or without adapters.
    - `adapters`: the result of [`redcoast.lora.adapters`][] for a model of the same sizes.

    **Returns:**

    The model with these adapters and no others.

    **Raises:**

    `ValueError` if the model lacks the weight of an adapter, or if its shape does not match.

    !!! Example

        ```python
        rc.save_checkpoint("runs/adapters", lora.adapters(state.model))
        fresh = lora.add_adapters(model, 8, targets="layers/w[qkvo]", key=jax.random.key(0))
        loaded = rc.load_checkpoint("runs/adapters", lora.adapters(fresh))
        model = lora.with_adapters(model, loaded)
        ```
    """
    new, problems = leaf_paths(adapters, LowRank), []
    shapes = {}
    for path, leaf in with_paths(model, is_weight):
        shapes[path] = getattr(leaf, "shape", None)
    for path, node in new.items():
        shape = shapes.get(path)
        if shape is None:
            problems.append(f"{path} (there is no such weight)")
        elif _weight_shape(node, len(shape)) != shape:
            problems.append(f"{path} (it is {shape})")
    if problems or not new:
        listed = "; ".join(problems) or "there are none"
        raise ValueError(f"The adapters do not match the model: {listed}.")

    def put(path: KeyPath, leaf: PyTree) -> PyTree:
        saved_with = ()
        if isinstance(leaf, LowRank):
            # Adapters that the model has already are replaced.
            leaf, saved_with = leaf.weight, leaf.saved_with
        node = new.get(show_path(path))
        if node is None:
            return leaf
        return dataclasses.replace(node, weight=leaf, saved_with=saved_with)

    return jax.tree_util.tree_map_with_path(put, model, is_leaf=is_weight)


def _weight_shape(node: LowRank, ndim: int) -> tuple[int, ...]:
    """Returns the shape of the weight with `ndim` dimensions that an adapter is for."""
    # Both factors have the stack, and each the rank, which the weight does not have.
    stacked = node.a.ndim + node.b.ndim - ndim - 2
    if stacked < 0:
        return ()
    stack = node.a.shape[:stacked]
    inputs, outputs = node.a.shape[stacked:-1], node.b.shape[stacked + 1 :]
    if node.outputs_first:
        return (*stack, *outputs, *inputs)
    return (*stack, *inputs, *outputs)


def merge(model: PyTree) -> PyTree:
    """Merges the adapters of a model into its weights.

    **Arguments:**

    - `model`: a model, with or without adapters.

    **Returns:**

    The model with plain arrays, of the same shapes and dtypes as before adapters were added. Its
    results are the same up to rounding: each sum is computed in float32 or wider, and rounded once
    to the dtype of the weight. Weights that are quantised and have no adapter stay so.
    """
    return map_where(is_adapted, merged, model, is_leaf=is_adapted)


def without_adapters(model: PyTree) -> PyTree:
    """Removes the adapters of a model: the model as it was before they were added.

    Its arrays are those of the model, so a frozen reference costs no memory. It can be called
    inside `jax.jit` and in a loss.

    **Arguments:**

    - `model`: a model, with or without adapters.

    **Returns:**

    The model with the frozen weights in place of each [`redcoast.lora.LowRank`][].

    !!! Example

        ```python
        adapted = lora.add_adapters(model, 8, targets="layers/w[qkvo]", key=jax.random.key(0))
        reference = lora.without_adapters(adapted)
        ```
    """
    return map_where(is_adapted, lambda x: x.weight, model, is_leaf=is_adapted)
