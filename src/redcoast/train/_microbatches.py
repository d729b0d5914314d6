"""The loss and its gradient, of a whole batch or as the sum over microbatches."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath
from jaxtyping import Array, PRNGKeyArray, PyTree

from ..core._errors import several
from ..core._pytree import show_place
from ..data._per_batch import has_per_batch
from ..tracking._metrics import check_scalars
from ._layer_state import warn_of_kept_state
from ._loss import LossFn, evaluate_loss
from ._precision import ComputeDtype, widen


def loss_of_params(
    params: PyTree,
    rest: PyTree,
    batch: PyTree,
    key: PRNGKeyArray,
    *,
    loss_fn: LossFn,
    compute_dtype: ComputeDtype,
    part: Callable[[PyTree], tuple[PyTree, PyTree]],
) -> tuple[Array, tuple[dict[str, Array], Array, PyTree]]:
    """Computes the loss from the trainable leaves; also returns aux, weight and other leaves."""
    model = eqx.combine(params, rest)
    loss, aux, weight, new_model = evaluate_loss(loss_fn, model, batch, key, compute_dtype)
    if new_model is model:
        warn_of_kept_state(model)
    return loss, (aux, weight, part(new_model)[1])


def loss_and_grads(
    loss_of: Callable[..., PyTree],
    params: PyTree,
    rest: PyTree,
    batch: PyTree,
    key: PRNGKeyArray,
    accumulate: int,
) -> tuple[tuple[Array, dict[str, Array], PyTree], PyTree]:
    """Computes loss, aux, updated other leaves, and gradient over `accumulate` microbatches."""
    value_and_grad = jax.value_and_grad(loss_of, has_aux=True)
    if accumulate == 1:
        (loss, (aux, _, rest)), grads = value_and_grad(params, rest, batch, key)
        return (loss, aux, rest), grads
    arrays, static = eqx.partition(rest, eqx.is_array)

    def weighted(arrays: PyTree, index: Array, microbatch: PyTree) -> tuple[PyTree, PyTree]:
        rest = eqx.combine(arrays, static)
        # Microbatches with one key would have the same dropout masks.
        microkey = jax.random.fold_in(key, index)
        (loss, (aux, weight, rest)), grads = value_and_grad(params, rest, microbatch, microkey)
        check_scalars(aux)
        # The loss of a microbatch that contains only padding may be 0 / 0.
        share = lambda x: jnp.where(weight != 0, x * weight.astype(x.dtype), jnp.zeros((), x.dtype))
        # Weighted sums, which one division at the end makes the mean over all tokens of the batch.
        sums = jax.tree.map(lambda x: share(widen(x)), (loss, aux, grads))
        return eqx.filter(rest, eqx.is_array), (sums, weight)

    def body(carry: PyTree, inputs: PyTree) -> tuple[PyTree, None]:
        arrays, sums = carry
        arrays, more = weighted(arrays, *inputs)
        return (arrays, jax.tree.map(jnp.add, sums, more)), None

    inputs = (jnp.arange(accumulate), split_rows(batch, accumulate))
    # The names of metrics are known only after a trace, and a scan needs them before.
    _, shapes = jax.eval_shape(weighted, arrays, *jax.tree.map(lambda x: x[0], inputs))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    (arrays, (sums, weight)), _ = jax.lax.scan(body, (arrays, zeros), inputs)
    # Weights that add up to 0, such as those of padding alone, leave the sums undivided.
    divisor = jnp.where(weight != 0, weight, jnp.ones_like(weight))
    loss, aux, grads = jax.tree.map(lambda x: x / divisor.astype(x.dtype), sums)
    if "weight" in aux:
        aux["weight"] = weight  # the sum over microbatches, not the mean
    # They were summed in float32.
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
    return (loss, aux, eqx.combine(arrays, static)), grads


def split_rows(batch: PyTree, count: int) -> PyTree:
    """Reshapes the batch dimension, of size b, to `(count, b // count)`."""
    refuse_other_rows(batch, count)

    def split_leaf(path: KeyPath, x: PyTree) -> Array:
        if x.shape[0] % count:
            where = show_place(path, "batch", "the batch")
            raise ValueError(
                f"`accumulate={count}` does not divide the batch dimension of {where}, of shape "
                f"{x.shape}. The batch size must be a multiple of `accumulate`."
            )
        # Microbatch i has the rows i, i + count, ..., so each device already has its share of
        # every microbatch, and no communication is needed.
        return jnp.swapaxes(jnp.reshape(x, (-1, count, *x.shape[1:])), 0, 1)

    return jax.tree_util.tree_map_with_path(split_leaf, batch)


def refuse_other_rows(batch: PyTree, accumulate: int) -> None:
    """Raises `ValueError` if the arrays of a batch cannot be split alike into microbatches."""
    if has_per_batch(batch):
        refuse_per_batch(accumulate)
    rows: dict[int, list[str]] = {}
    for path, x in jax.tree_util.tree_leaves_with_path(batch):
        size = next(iter(jnp.shape(x)), 0)
        rows.setdefault(size, []).append(show_place(path, "batch", "the batch"))
    if 0 in rows:
        raise ValueError(
            f"`accumulate={accumulate}` splits the batch dimension, which {several(rows[0], 3)} "
            "does not have. The first dimension of every array must be the batch."
        )
    if len(rows) > 1:
        sizes = [f"{several(names, 3)} of size {size}" for size, names in rows.items()]
        raise ValueError(
            f"`accumulate={accumulate}` splits the first dimension of every array of a batch, "
            f"which must be the batch. Here it differs: {several(sizes, 4, separator='; ')}. "
            "Arrays that are not one row for each example, such as a bank of negatives, the "
            "weights of classes or the nodes of graphs, cannot be split. Leave out `accumulate`; "
            "or keep such arrays in the model as frozen leaves, or in a closure of `loss_fn`."
        )


def refuse_per_batch(accumulate: int) -> None:
    raise ValueError(
        f"`accumulate={accumulate}` splits a batch along its examples, and some of its arrays are "
        "marked as `per_batch`, so they cannot be split. Leave out `accumulate`, and use a smaller "
        "`batch_size`."
    )


def microbatches(rows: int, *, batch_size: int, accumulate: int) -> int:
    """Returns the number of microbatches of a batch."""
    if rows == batch_size or accumulate == 1:
        return accumulate
    # A short last batch has microbatches that are no larger than those before. Their number must
    # not depend on the mesh, because the random keys of a step depend on it.
    least = -(-rows * accumulate // batch_size)
    # Microbatches of equal size, of which one row each always is a possibility.
    return next(k for k in range(least, rows + 1) if rows % k == 0)
