"""Functions that quantise the matrices of a model, to train adapters of them in less memory."""

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from ..core._frames import hide_frames
from ..core._pytree import show_path
from ..models._einsum import LowRank
from ..models._quantised_weight import Numbers, is_quantised, quantised_weight, unquantised
from ..pretrained._matrix_roles import Matrix
from ._targets import find_matrices, is_weight, match_targets


@hide_frames
def quantise(
    model: PyTree, numbers: str = "nf4", *, targets: str | Sequence[str] = "layers"
) -> PyTree:
    """Stores matrices of a model as integers with scales, to train adapters of them
    (QLoRA, Dettmers et al., 2023, <https://arxiv.org/abs/2305.14314>).

    `"nf4"` has 4.5 bits for each number: a code of 4 bits, and a float32 scale for 64 numbers.
    `"int8"` has 8 bits, and a scale for all inputs of an output. A matrix is dequantised where it
    is multiplied, so results and gradients are those of the model with the dequantised matrices,
    which [`redcoast.lora.dequantise`][] returns.

    `rc.load_pretrained(path, quantise="nf4")` does so while it reads the files, so that the devices
    never store the model whole in its own dtype.

    **Arguments:**

    - `model`: a model of `redcoast.models`, or any PyTree that contains such models or
        `eqx.nn.Linear`, with or without adapters; concrete, or abstract inside
        `eqx.filter_eval_shape`.
    - `numbers`: `"nf4"` or `"int8"`.
    - `targets`: a regular expression, or several, that are searched in the paths of the matrices;
        by default the matrices of the layers, and not the output head.

    **Returns:**

    The model with a [`redcoast.lora.QuantisedWeight`][] in place of each matched weight. Its arrays
    are sharded like the weight, and are not trained.

    **Raises:**

    `ValueError` if the tree contains no model or layer whose matrices are known, if a pattern
    matches none, or if a matrix cannot be stored in these numbers.

    !!! Example

        ```python
        base = lora.quantise(model, "nf4")
        adapted = lora.add_adapters(base, 8, targets="layers/w[qkvo]", key=jax.random.key(0))
        state = rc.fit(adapted, optimizer, examples, trainable=lora.trainable(adapted), **functions)
        lora.save_adapters(state.model, "adapters")
        ```
    """
    if numbers != "nf4" and numbers != "int8":
        raise ValueError(f"`numbers` must be 'nf4' or 'int8', but is {numbers!r}.")
    matrices = find_matrices(model)
    chosen = match_targets(targets, matrices)

    def replace(path: KeyPath, leaf: PyTree) -> PyTree:
        name = show_path(path)
        if name not in chosen:
            return leaf
        if isinstance(leaf, LowRank):
            # The factors are trained, and keep their numbers.
            weight = _quantised(leaf.weight, numbers, matrices[name], name)
            return dataclasses.replace(leaf, weight=weight)
        return _quantised(leaf, numbers, matrices[name], name)

    return jax.tree_util.tree_map_with_path(replace, model, is_leaf=is_weight)


def _quantised(weight: PyTree, numbers: Numbers, matrix: Matrix, name: str) -> PyTree:
    if is_quantised(weight):
        raise ValueError(f"{name} is quantised already. Dequantise it first (`lora.dequantise`).")
    # A scale is for numbers that a product sums over.
    axis = matrix.last_input(weight.shape)
    return jax.jit(partial(quantised_weight, numbers=numbers, axis=axis))(weight)


def dequantise(model: PyTree) -> PyTree:
    """Replaces quantised matrices by arrays, of the same shapes and dtypes as before.

    Adapters stay. It can be called inside `jax.jit`.

    **Arguments:**

    - `model`: a model, with or without quantised matrices.

    **Returns:**

    The model with plain arrays, such as [`redcoast.save_pretrained`][] needs.
    """
    return jax.tree.map(unquantised, model, is_leaf=is_quantised)
