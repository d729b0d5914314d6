"""Plans and compiled steps that are reused by later runs with the same functions and shapes."""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from jax.sharding import Mesh
from jaxtyping import PyTree

from ..core._pytree import abstract_arrays, join, split
from ..core._reuse import reuse
from ..sharding import Plan
from ..tracking._metrics import pack_metrics
from ._compile import CompiledStep, compile_step
from ._loss import LossFn
from ._plan_step import plan_step
from ._step import TrainState, train_step

_PLANS: dict[Any, Any] = {}
_STEPS: dict[Any, Any] = {}


def reused_plan(
    state: TrainState,
    loss_fn: LossFn,
    batch: PyTree,
    mesh: Mesh,
    *,
    trainable: PyTree,
    overrides: Sequence[tuple[str, Any]],
    **options: Any,
) -> Plan:
    """The plan of `plan_step`, made once for the same functions, shapes, mesh and options."""
    arrays, static = split(state)
    shapes, given = abstract_arrays(arrays), split(batch)
    functions, rebuild, chosen = _parts(trainable)
    key = (tuple(shapes), static, tuple(given[0]), given[1], mesh, chosen)
    key = (*key, tuple(overrides), tuple(options.items()))

    def make(functions: Sequence[Callable[..., Any]]) -> Plan:
        loss, *selects = functions
        chosen = {"trainable": rebuild(selects), "overrides": overrides, **options}
        return plan_step(join(shapes, static), loss, batch, mesh, **chosen)

    return reuse(_PLANS, [loss_fn, *functions], key, make)


def reused_step(
    plan: Plan,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    *,
    trainable: PyTree,
    **options: Any,
) -> CompiledStep:
    """The step of `fit`, compiled once for the same functions, shapes, plan and options."""
    # `train_step` treats both kinds of optimizers differently.
    extra = isinstance(optimizer, optax.GradientTransformationExtraArgs)
    kind = optax.GradientTransformationExtraArgs if extra else optax.GradientTransformation
    functions, rebuild, chosen = _parts(trainable)
    leaves, structure = jax.tree.flatten(plan.shardings)
    key = (kind, chosen, tuple(leaves), structure, plan.mesh, plan.compute, tuple(options.items()))
    shardings, constrain = plan.shardings, plan.constrain

    def make(functions: Sequence[Callable[..., Any]]) -> CompiledStep:
        loss, init, update, *selects = functions
        given = {"loss_fn": constrain(loss), "optimizer": kind(init, update), **options}
        step = ft.partial(train_step, trainable=rebuild(selects), **given)
        return compile_step(pack_metrics(step), shardings)

    wanted = [loss_fn, optimizer.init, optimizer.update, *functions]
    return reuse(_STEPS, wanted, key, make).fresh()


def _parts(trainable: PyTree) -> tuple[list[Any], Callable[[Sequence[Any]], PyTree], Any]:
    """Returns the functions in `trainable`, a function that replaces them, and everything else."""
    leaves, structure = jax.tree.flatten(trainable)
    functions = [x for x in leaves if callable(x)]
    rest = tuple(None if callable(x) else x for x in leaves)

    def rebuild(functions: Sequence[Any]) -> PyTree:
        given = iter(functions)
        return structure.unflatten([next(given) if x is None else x for x in rest])

    return functions, rebuild, (structure, rest)
