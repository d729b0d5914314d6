"""How a model is trained, as one record; and several steps in one program, for steps that take less
time than the call of a program.

That program is a loop over batches that are stacked, with as many iterations as it is told. So one
program serves every number of steps, and where the calls of a run begin and end changes no result.
"""

import functools as ft
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from ..core._control_flow import AnyJaxpr, open_jaxpr
from ..core._dtypes import keep_large_counts
from ..core._errors import check_functions, check_integer, check_optimizer
from ..core._jaxpr import as_traced
from ..core._pytree import Arrays, Static, abstract_array, join, split
from ..core._target import sequence_parts, target
from ..core._tracing import abstract_key, traced_mesh
from ..distributed._mesh import batch_sharding
from ..sharding import Plan
from ..tracking._metrics import PackedMetrics, pack_metrics
from ._compile import CompiledStep, compile_reusable_step
from ._compiler_options import (
    Option,
    Options,
    check_compiler_options,
    compiler_options_for,
)
from ._flat_function import is_jit_disabled
from ._loss import LossFn, check_metrics, evaluate_loss
from ._one_thread import in_one_thread
from ._precision import ComputeDtype, as_compute_dtype
from ._step import train_step


class _Program(NamedTuple):
    """What a function computes from the arrays of its arguments."""

    jaxpr: AnyJaxpr
    output: Static
    returns_model: bool  # whether its third result is the model that it was called with


def traced_once(loss_fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Returns `loss_fn(model, batch, key)`, which is traced once for each kind of arguments.

    It is for one run: a later run traces the function again, and notices whatever it reads that has
    changed.
    """
    programs: dict[Hashable, _Program] = {}

    # Messages name the user's function.
    @ft.wraps(loss_fn, updated=())
    def loss(model: PyTree, *args: PyTree) -> PyTree:
        arrays, static = split((model, *args))
        key = _kind(arrays, static)
        if key is None:
            return loss_fn(model, *args)
        if key not in programs:
            programs[key] = _trace(loss_fn, arrays, static)
        program = programs[key]
        outvars = open_jaxpr(program.jaxpr).outvars
        # Numbers that the function returns are arrays here too.
        results = list(map(as_traced, jaxpr_as_fun(program.jaxpr)(*arrays), outvars))
        result = join(results, program.output)
        if program.returns_model:
            return (*result[:2], model)
        return result

    return loss


def _kind(arrays: Arrays, static: Static) -> Hashable | None:
    """What a trace depends on, or None if the function is to be called itself."""
    # Then it is debugged, operation by operation.
    if is_jit_disabled():
        return None
    try:
        hash(static)
    except TypeError:  # such as of a list in a leaf that is no array
        return None
    types = [abstract_array(x) for x in arrays]
    kinds = tuple((x.shape, x.dtype, x.weak_type) for x in types)
    meshes = traced_mesh(), jax.sharding.get_abstract_mesh()
    return static, kinds, meshes, target(), sequence_parts()


def _trace(loss_fn: Callable[..., PyTree], arrays: Arrays, static: Static) -> _Program:
    outputs: list[tuple[Static, bool]] = []  # the last is of the trace that JAX returns

    def flat(*arrays: jax.Array) -> Arrays:
        model, *args = join(list(arrays), static)
        result = loss_fn(model, *args)
        check_metrics(result, model)  # before JAX, whose error would name no metric
        returns_model = type(result) is tuple and len(result) == 3 and result[2] is model
        flat_result, output = split(result)
        outputs.append((output, returns_model))
        return keep_large_counts(flat_result)

    flat.__wrapped__ = loss_fn  # JAX's messages name this function  # type: ignore[attr-defined]
    jaxpr = jax.make_jaxpr(flat)(*map(abstract_array, arrays))
    return _Program(jaxpr, *outputs[-1])


@dataclass(frozen=True)
class Training:
    """What a training step depends on, beside its state and its batch.

    The fields are the arguments of [`redcoast.train_step`][], and options of the compiler in place
    of the defaults.
    """

    loss_fn: LossFn
    optimizer: optax.GradientTransformation
    accumulate: int = 1
    compute_dtype: ComputeDtype = None
    trainable: PyTree = eqx.is_inexact_array
    compiler_options: Mapping[str, Option] | None = None

    @ft.cached_property
    def traced_loss(self) -> LossFn:
        """The loss, which the plan and the step of a run trace together."""
        return traced_once(self.loss_fn)

    def loss(self, model: PyTree, batch: PyTree, key: PRNGKeyArray) -> Float[Array, ""]:
        """The loss alone, without its metrics."""
        return evaluate_loss(self.traced_loss, model, batch, key, self.compute_dtype).loss

    def options_for(self, mesh: Mesh | AbstractMesh) -> Options:
        """The options of the compiler for the devices of a mesh."""
        return compiler_options_for(mesh, self.compiler_options)

    def layers(self, model: PyTree, batch: PyTree, mesh: Mesh | AbstractMesh) -> str:
        """How the compiled loss runs the layers that a model stacks; empty if it stacks none."""
        parts: list[str] = []
        for count, unroll in self.loops(model, batch, mesh):
            how = "in a loop"
            if unroll >= count:
                how = "unrolled"
            parts.append(f"{count} {how}")
        return ", ".join(parts)

    def loops(
        self, model: PyTree, batch: PyTree, mesh: Mesh | AbstractMesh
    ) -> list[tuple[int, int]]:
        """For each loop of the loss over arrays of the model: how many layers it runs, and how many
        of them in one iteration."""
        # As for all that examines programs, importing redcoast stays cheap.
        from ..sharding._function_reports import layer_loops

        return layer_loops(self.loss, model, (batch, abstract_key()), mesh)

    def step(
        self, plan: Plan, accumulate: int, take: Callable[..., PyTree] = train_step
    ) -> Callable[..., tuple[PyTree, PyTree]]:
        """The step `(state, batch) -> (state, metrics)` with the activations of a plan.

        `take` may also be `train_steps`, for stacked batches.
        """
        return ft.partial(
            take,
            loss_fn=plan.constrain(self.traced_loss),
            optimizer=self.optimizer,
            accumulate=accumulate,
            compute_dtype=self.compute_dtype,
            trainable=self.trainable,
        )

    def compiled_by(self, plan: Plan) -> Callable[[int], CompiledStep]:
        """A function that returns the compiled step of a plan for a number of microbatches.

        The metrics of the step are packed. A later run with the same program uses it again.
        """

        # One step for each number of microbatches, which is traced once.
        @ft.cache
        def compiled(accumulate: int) -> CompiledStep:
            step = pack_metrics(self.step(plan, accumulate))
            options = self.options_for(plan.mesh)
            return compile_reusable_step(step, plan.shardings, self.loss_fn, options=options)

        return compiled

    def several_by(self, plan: Plan, mesh: Mesh) -> CompiledStep:
        """The compiled step of a plan for several stacked batches, as `several_steps` makes it."""
        step = several_steps(pack_metrics(self.step(plan, self.accumulate)), plan.shardings, mesh)
        return compile_reusable_step(
            step, plan.shardings, self.loss_fn, rows_axis=1, options=self.options_for(mesh)
        )


def make_training(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    accumulate: int,
    compute_dtype: DTypeLike | None,
    trainable: PyTree,
    compiler_options: Mapping[str, Option] | None,
) -> Training:
    """The record of the arguments of a training, which are checked.

    Raises `TypeError` or `ValueError` if one of them is invalid.
    """
    check_functions(loss_fn=loss_fn)
    check_optimizer(optimizer)
    accumulate = check_integer("accumulate", accumulate)
    compute_dtype = as_compute_dtype(compute_dtype)
    check_compiler_options(compiler_options)
    return Training(loss_fn, optimizer, accumulate, compute_dtype, trainable, compiler_options)


PackedStep = Callable[..., tuple[PyTree, PackedMetrics]]


class StepsTaken(eqx.Module):
    """What the program returns beside the new state.

    - `before`: a copy of the arrays of the state before the first step, which was donated. With it,
        the state after any of the steps can be computed again.
    - `names`, `values`: the metrics of each step; the rows after the last step are zero.
    """

    before: list[Array]
    names: tuple[str, ...] = eqx.field(static=True)
    values: Float[Array, "most metrics"]


def several_steps(step: PackedStep, shardings: PyTree, mesh: Mesh) -> Callable[..., PyTree]:
    """Converts a step on a batch to several steps on stacked batches.

    Returns `several(state, batches, count) -> (state, StepsTaken)`: takes a step on each of the
    first `count` of the batches, which are stacked along a new first dimension. It raises
    `ValueError` if the step does not keep the types of the state.
    """
    places = jax.tree.leaves(shardings)

    def several(state: PyTree, batches: PyTree, count: Int[Array, ""]) -> tuple[PyTree, StepsTaken]:
        arrays, static = split(state)
        names: tuple[str, ...] = ()

        def one(arrays: Arrays, batch: PyTree) -> tuple[Arrays, Array]:
            # Known after the trace: the names of metrics are no results of a program.
            nonlocal names
            state, metrics = step(join(arrays, static), batch)
            names = metrics.names
            return split(state)[0], metrics.values

        # Traced here, and not by the loop, which has to know the number of metrics.
        first = jax.tree.map(lambda x: x[0], batches)
        program, (_, row) = jax.make_jaxpr(one, return_shape=True)(arrays, first)
        run = in_one_thread(program, mesh)
        # A loop carries arrays of the same types from step to step.
        for old, new in zip(program.in_avals, program.out_avals[:-1], strict=False):
            if (old.shape, old.dtype) != (new.shape, new.dtype):
                raise ValueError(
                    f"The step changes an array of the state from {old.str_short()} to "
                    f"{new.str_short()}, so several steps cannot be taken in one call. Pass "
                    "`steps_per_call=1`."
                )

        def take(i: Array, carry: tuple[Arrays, Array]) -> tuple[Arrays, Array]:
            arrays, values = carry
            batch = [_batch(x, i, mesh) for x in jax.tree.leaves(batches)]
            *arrays, row = run(*arrays, *batch)
            if mesh.size > 1:
                # The compiler would choose other shardings inside of the loop than outside, and
                # move the state each time.
                arrays = list(map(jax.lax.with_sharding_constraint, arrays, places))
            return arrays, jax.lax.dynamic_update_index_in_dim(values, row, i, 0)

        most = jax.tree.leaves(batches)[0].shape[0]
        values = jnp.zeros((most, *row.shape), row.dtype)
        before = jax.lax.optimization_barrier(arrays)  # without it, JAX would return the arguments
        # `count` is an argument, so that a shorter last call runs the same program.
        arrays, values = jax.lax.fori_loop(0, count, take, (arrays, values))
        return join(arrays, static), StepsTaken(before, names, values)

    return several


def _batch(stacked: Array, index: Array, mesh: Mesh) -> Array:
    """An array of one of the batches, sharded as it would be alone."""
    x = jax.lax.dynamic_index_in_dim(stacked, index, keepdims=False)
    if mesh.size == 1 or x.ndim == 0:
        return x
    return jax.lax.with_sharding_constraint(x, batch_sharding(mesh, x.shape[0]))
