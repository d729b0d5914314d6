"""How a model is trained, as one record."""

import functools as ft
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import equinox as eqx
import optax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import PyTree

from ..core._tracing import abstract_key
from ..sharding import Plan
from ..sharding._plan import layer_loops
from ..tracking._metrics import pack_metrics
from ._compile import CompiledStep, compile_reusable_step
from ._compiler_options import Option, Options, compiler_options_for
from ._loss import LossFn, evaluate_loss
from ._precision import ComputeDtype
from ._several_steps import several_steps
from ._step import train_step


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
        measure = ft.partial(evaluate_loss, self.loss_fn, compute_dtype=self.compute_dtype)
        loss = lambda model, batch, key: measure(model, batch, key).loss
        return layer_loops(loss, model, (batch, abstract_key()), mesh)

    def step(
        self, plan: Plan, accumulate: int, take: Callable[..., PyTree] = train_step
    ) -> Callable[..., tuple[PyTree, PyTree]]:
        """The step `(state, batch) -> (state, metrics)` with the activations of a plan.

        `take` may also be `train_steps`, for stacked batches.
        """
        return ft.partial(
            take,
            loss_fn=plan.constrain(self.loss_fn),
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
