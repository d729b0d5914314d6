"""The state, the compiled step and the plan of a training loop, in one call."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import optax
from jax.sharding import Mesh
from jaxtyping import PRNGKeyArray, PyTree

from ..core._axis_types import auto_ambient_mesh, on_auto_axes
from ..core._errors import check_integer
from ..core._frames import hide_frames
from ..core._pytree import show_place
from ..distributed._arrays import allowed_transfers
from ..distributed._mesh import ambient_or_default
from ..sharding import Plan
from ._compile import CompiledStep, compile_reusable_step, compile_step
from ._compiler_options import Option
from ._loss import LossFn
from ._plan_checks import check_own_step
from ._plan_step import plan_training
from ._start import starting_state
from ._state import TrainState
from ._step import train_steps
from ._training import make_training


class Prepared(NamedTuple):
    """The result of [`redcoast.prepare`][].

    **Attributes:**

    - `state`: the state at step 0, sharded as planned.
    - `step`: the compiled training step `(state, batch) -> (state, metrics)`.
    - `plan`: the plan of the state and the loss.
    """

    state: TrainState
    step: CompiledStep
    plan: Plan


@hide_frames
def prepare(
    init_fn: PyTree,
    optimizer: optax.GradientTransformation,
    loss_fn: LossFn,
    batch: PyTree,
    *,
    key: PRNGKeyArray | None = None,
    mesh: Mesh | None = None,
    overrides: Sequence[tuple[str, PyTree]] = (),
    accumulate: int = 1,
    compute_dtype: Any = None,
    trainable: PyTree = eqx.is_inexact_array,
    average: int | float | None = None,
    steps_per_call: int = 1,
    memory: int | float | Literal["auto"] | None = "auto",
    compiler_options: Mapping[str, Option] | None = None,
) -> Prepared:
    """Plans and creates the state of a custom training loop, and compiles its training step.

    It calls [`redcoast.plan_step`][], [`redcoast.init_state`][] with the plan's shardings, and
    [`redcoast.compile_step`][] for [`redcoast.train_step`][] with the constrained loss.

    **Arguments:**

    - `init_fn`: `init_fn(key) -> model`, whose arrays are created sharded, or a model, or a
        [`redcoast.TrainState`][], as for [`redcoast.fit`][]. A model is copied. A state is donated
        by the first step.
    - `optimizer`: an optax optimizer.
    - `loss_fn`: `loss_fn(model, batch, key)`, as for [`redcoast.train_step`][].
    - `batch`: a batch, or its shapes, batch dimension first.
    - `key`: a JAX key, by default `jax.random.key(0)`; not for a state, which has its own.
    - `mesh`: from [`redcoast.make_mesh`][]; by default the ambient mesh, or all devices as `data`.
    - `overrides`: as for [`redcoast.infer_shardings`][].
    - `accumulate`, `compute_dtype`, `trainable`: as for [`redcoast.train_step`][].
    - `average`: as for [`redcoast.fit`][].
    - `steps_per_call`: with more than 1, `step` takes several steps in one call, which is faster if
        a step takes less than a few milliseconds: `step(state, batches)` takes this many batches,
        stacked along a new first dimension, and returns metrics of shape `(steps_per_call,)`, as
        [`redcoast.train_steps`][] does. Each batch is sharded as it would be alone.
    - `memory`: as for [`redcoast.fit`][].
    - `compiler_options`: as for [`redcoast.compile_step`][].

    **Returns:**

    A named tuple `(state, step, plan)`.

    **Raises:**

    `ValueError` or `TypeError`, as these functions do.

    !!! Example

        ```python
        state, step, plan = rc.prepare(init_fn, optimizer, loss_fn, batch, key=key, mesh=mesh)
        state, metrics = step(state, batch)
        ```
    """
    steps_per_call = check_integer("steps_per_call", steps_per_call)
    training = make_training(
        loss_fn, optimizer, accumulate, compute_dtype, trainable, compiler_options
    )
    mesh, key = ambient_or_default(mesh), on_auto_axes(key)
    with allowed_transfers(), auto_ambient_mesh():
        abstract, _, create = starting_state(
            on_auto_axes(init_fn), training, key, average=average, caller="prepare"
        )
    plan = plan_training(training, abstract, batch, mesh, overrides=overrides, memory=memory)
    # Before the state is created, which takes minutes if it is large.
    check_own_step(plan, training, abstract, batch)
    if steps_per_call == 1:
        one_step = training.step(plan, training.accumulate)
        step = compile_step(one_step, plan.shardings, compiler_options=compiler_options)
    else:
        steps = counted(training.step(plan, training.accumulate, train_steps), steps_per_call)
        options = training.options_for(mesh)
        step = compile_reusable_step(steps, plan.shardings, loss_fn, rows_axis=1, options=options)
    # Each device creates its own shards, so that the state never exists whole.
    with allowed_transfers():
        state = create(plan.shardings)
    return Prepared(state, step, plan)


def counted(steps: Callable[..., PyTree], count: int) -> Callable[..., PyTree]:
    """Several steps, after a check that they are given as many batches."""

    # At trace time, so that the check costs nothing in a step.
    def checked(state: TrainState, batches: PyTree) -> tuple[TrainState, PyTree]:
        for path, x in jax.tree_util.tree_leaves_with_path(batches):
            if x.shape[:1] != (count,):
                raise ValueError(
                    f"An array of `batches`, {show_place(path, 'batches', 'the only one')}, has "
                    f"shape {x.shape}. "
                    f"With `steps_per_call={count}`, it must be {count} batches, stacked along a "
                    "new first dimension, as in `np.stack`."
                )
        return steps(state, batches)

    return checked
