"""Several training steps in one program."""

from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, PyTree

from ..core._frames import hide_frames
from ._step import TrainState, train_step, with_loss_scale


@hide_frames
def train_steps(
    state: TrainState, batches: PyTree, **options: Any
) -> tuple[TrainState, dict[str, Array]]:
    """Takes a training step on each of several batches in one `jax.lax.scan`.

    Use it for the local steps of a federated client, the inner steps of meta-learning, or the
    epochs of minibatches in PPO. It is pure, and works under `jit`, `vmap` and `compile_step`.

    **Arguments:**

    - `state`: a [`redcoast.TrainState`][].
    - `batches`: a PyTree of arrays of shape `steps batch ...`.
    - `options`: keyword arguments of [`redcoast.train_step`][], such as `loss_fn` and `optimizer`.

    **Returns:**

    The state after the last step, and the metrics of all steps, each of shape `steps`.

    **Raises:**

    `ValueError` if the arrays have different leading dimensions; otherwise as `train_step`.

    !!! Example

        ```python
        parts = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), batch)
        state, metrics = rc.train_steps(state, parts, loss_fn=loss_fn, optimizer=optimizer)
        ```
    """
    sizes = {x.shape[:1] for x in jax.tree.leaves(batches)}
    if len(sizes) != 1 or () in sizes:
        raise ValueError(
            f"The arrays of `batches` have the leading dimensions {sorted(sizes)}, but they must "
            "all have the same one, the number of steps."
        )
    state = with_loss_scale(state, options.get("compute_dtype"))
    carried, static = eqx.partition(state, eqx.is_array)

    def body(carried: PyTree, batch: PyTree) -> tuple[PyTree, dict[str, Array]]:
        after, metrics = train_step(eqx.combine(carried, static), batch, **options)
        return eqx.filter(after, eqx.is_array), metrics

    carried, metrics = jax.lax.scan(body, carried, batches)
    return eqx.combine(carried, static), metrics
