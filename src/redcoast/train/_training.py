"""How a model is trained, as one record."""

import functools as ft
from collections.abc import Callable
from dataclasses import dataclass

import equinox as eqx
import optax
from jaxtyping import PyTree

from ..sharding import Plan
from ..tracking._metrics import pack_metrics
from ._compile import CompiledStep, compile_reusable_step
from ._loss import LossFn
from ._precision import ComputeDtype
from ._step import train_step


@dataclass(frozen=True)
class Training:
    """What a training step depends on, beside its state and its batch.

    The fields are the arguments of [`redcoast.train_step`][].
    """

    loss_fn: LossFn
    optimizer: optax.GradientTransformation
    accumulate: int = 1
    compute_dtype: ComputeDtype = None
    trainable: PyTree = eqx.is_inexact_array

    def step(self, plan: Plan, accumulate: int) -> Callable[..., tuple[PyTree, PyTree]]:
        """The step `(state, batch) -> (state, metrics)` with the activations of a plan."""
        return ft.partial(
            train_step,
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

        @ft.cache
        def compiled(accumulate: int) -> CompiledStep:
            step = pack_metrics(self.step(plan, accumulate))
            return compile_reusable_step(step, plan.shardings, self.loss_fn)

        return compiled
