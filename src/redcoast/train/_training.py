"""How a model is trained, as one record, and the compiled steps that follow from it."""

import functools as ft
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import equinox as eqx
import jax
import optax
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from ..core._errors import check_functions, check_integer, check_optimizer
from ..core._tracing import abstract_key
from ..sharding import Plan
from ..tracking._metrics import PackedMetrics, pack_metrics
from ._compile import CompiledStep, compile_reusable_step
from ._compiler_options import Option, Options, check_compiler_options, compiler_options_for
from ._last_state import FlatState
from ._loss import LossFn, evaluate_loss
from ._microbatches import microbatches
from ._precision import ComputeDtype, as_compute_dtype
from ._several_steps import several_steps
from ._step import train_step
from ._traced_loss import traced_once


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

        # One step for each number of microbatches, of which a run has at most two.
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


def by_microbatches(
    compiled: Callable[[int], CompiledStep], batch_size: int, accumulate: int
) -> Callable[[PyTree, PyTree], tuple[FlatState, PackedMetrics]]:
    """The method `take` of `compiled(accumulate)`, with another number for a short last batch.

    `compiled` is what `Training.compiled_by` returns.
    """

    def take(state: PyTree | FlatState, batch: PyTree) -> tuple[FlatState, PackedMetrics]:
        count = accumulate
        if accumulate > 1:
            rows = jax.tree.leaves(batch)[0].shape[0]
            count = microbatches(rows, batch_size=batch_size, accumulate=accumulate)
        return compiled(count).take(state, batch)

    return take
