"""Moving averages of weights, and that of a run, which is evaluated."""

import dataclasses
import math
from typing import TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from ..core._errors import check_number
from ..core._pytree import is_none
from ..core._trainable import partition_trainable
from ._precision import widen

if TYPE_CHECKING:
    from ._state import TrainState


class WeightAverage(eqx.Module):
    """The exponential average of the trainable leaves over the steps taken.

    After n steps it is the sum of `decay**(n - i) * weights_i`, divided by the sum of the factors,
    as in `optax.ema(decay, debias=True)`. The initial weights do not count.
    """

    weights: PyTree  # the average, in float32 or wider, with `None` at leaves that are not trained
    steps: Int[Array, "..."]  # the number of steps that were averaged; int32
    decay: float = eqx.field(static=True)  # a number between 0 and 1

    def after(self, params: PyTree, finite: Bool[Array, ""]) -> "WeightAverage":
        """Returns the average after a step to `params`; unchanged if the step was not finite."""
        if jax.tree.structure(params) != jax.tree.structure(self.weights):
            raise ValueError(
                "The averaged weights in the state do not match the leaves that "
                "`trainable` selects. Pass the `trainable` with which the state was created."
            )
        steps = self.steps + 1

        def mix(old: Array, new: Array) -> Array:
            number = steps.astype(old.real.dtype)
            # The sum of the factors is (1 - decay**n) / (1 - decay). `expm1` is exact where
            # decay**n is close to 1, as in the first steps.
            share = (1 - self.decay) / -jnp.expm1(number * math.log(self.decay))
            return jnp.where(finite, old + share * (new.astype(old.dtype) - old), old)

        weights = jax.tree.map(mix, self.weights, params)
        return WeightAverage(weights, jnp.where(finite, steps, self.steps), self.decay)


def with_average(state: "TrainState", decay: int | float | None, trainable: PyTree) -> "TrainState":
    """Adds an average of the trainable leaves to a state, if `decay` is not `None`."""
    if decay is None:
        return state
    check_number("average", decay)
    if not 0 < decay < 1:
        raise ValueError(
            f"`average` is {decay}. It is the decay of the average of the weights at each step, "
            "between 0 and 1, such as 0.999."
        )
    if state.average is not None:
        # A run that continues keeps its average, and may change its decay.
        average = dataclasses.replace(state.average, decay=float(decay))
    else:
        params, _ = partition_trainable(state.model, trainable)
        # In float32: small changes are lost in narrow dtypes.
        average = WeightAverage(jax.tree.map(widen, params), jnp.zeros((), jnp.int32), float(decay))
    return dataclasses.replace(state, average=average)


def model_with(average: WeightAverage | None, model: PyTree) -> PyTree:
    """Returns the model with averaged weights, in its own dtypes; without an average, the model."""
    if average is None:
        return model

    def choose(averaged: PyTree, own: PyTree) -> PyTree:
        # What is not trained has no average.
        if averaged is None:
            return own
        return averaged.astype(own.dtype)

    return jax.tree.map(choose, average.weights, model, is_leaf=is_none)


def evaluated_model(state: "TrainState") -> PyTree:
    """The model that a run evaluates: with the averaged weights, if there are any."""
    return model_with(state.average, state.model)


def moving_average(old: PyTree, new: PyTree, decay: float | Float[Array, ""]) -> PyTree:
    """Returns `decay * old + (1 - decay) * new`, for averages of weights and target networks.

    **Arguments:**

    - `old`: the average so far.
    - `new`: a tree of the same structure.
    - `decay`: a number between 0 and 1; with 1, the result is `old`.

    **Returns:**

    A tree with the dtypes of `old`. Leaves that are not floating arrays are taken from `new`.

    **Raises:**

    `ValueError` if the trees differ, or if `decay` is a number outside [0, 1].

    !!! Example

        ```python
        target = rc.moving_average(target, state.model, 0.995)
        ```
    """
    # It may also be an array, whose value is not known while tracing.
    if not isinstance(decay, jax.Array | np.ndarray):
        check_number("decay", decay)
        if not 0 <= decay <= 1:
            raise ValueError(f"`decay` is {decay}. It must be between 0 and 1.")
    if jax.tree.structure(old) != jax.tree.structure(new):
        raise ValueError(
            "`old` and `new` have different structures. Pass two trees of the same structure, such "
            "as a target network and the model."
        )

    def mix(a: PyTree, b: PyTree) -> PyTree:
        if not eqx.is_inexact_array(a):
            return b
        # Subtracted in double precision: a decay of 0.9999 is 1 in bfloat16.
        share = jnp.asarray(1 - decay, a.real.dtype)
        # Where both are equal, the result is the same to the last bit.
        return a + share * (b.astype(a.dtype) - a)

    return jax.tree.map(mix, old, new)
