"""Dynamic loss scaling for float16 (Micikevicius et al. 2017, arXiv:1710.03740)."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from ..core._errors import check_integer, check_number
from ..core._frames import hide_frames
from ..core._pytree import map_where
from ..tracking._metrics import LEAST_LOSS_SCALE
from ._precision import widen

_MOST = 2.0**24  # as in NVIDIA's Apex


class LossScale(eqx.Module):
    """A factor that keeps gradients within the range of float16.

    The loss is multiplied by it before it is differentiated, and the gradient is divided by it
    afterwards, in float32. It doubles after `period` steps with a finite gradient, up to 2^24. It
    halves after each step with an infinite or NaN gradient, down to 1. Such a step must be skipped.
    [`redcoast.train_step`][] does all of this for the `loss_scale` of its state; call the methods
    in a step that computes its own gradients.

    - `value`: the factor; float32.
    - `good`: the number of steps since the factor changed or a step was skipped; int32.
    - `skipped`: the number of steps skipped so far; int32.
    - `period`: the number of steps after which the factor doubles.

    !!! Example

        ```python
        scale = rc.LossScale(2.0**10, period=500)
        grads = scale.unscale(jax.grad(lambda w: scale.scale(jnp.sum(w**2)))(jnp.ones(3)))
        scale = scale.adjust(jnp.isfinite(optax.tree.norm(grads)))
        ```
    """

    value: Float[Array, "..."]
    good: Int[Array, "..."]
    skipped: Int[Array, "..."]
    period: int = eqx.field(static=True)

    @hide_frames
    def __init__(self, value: float = 2.0**15, *, period: int = 2000):
        """**Arguments:**

        - `value`: the first factor, between 1 and 2^24. A power of two rounds nothing.
        - `period`: the number of steps with a finite gradient after which the factor doubles.

        **Raises:**

        `ValueError` or `TypeError` if an argument is out of range or not a number.
        """
        check_number("value", value)
        if not LEAST_LOSS_SCALE <= value <= _MOST:
            raise ValueError(f"`value` is {value}. It must be between 1 and 2^24.")
        check_integer("period", period)
        self.value = jnp.asarray(value, jnp.float32)
        self.good = jnp.zeros((), jnp.int32)
        self.skipped = jnp.zeros((), jnp.int32)
        self.period = int(period)

    def scale(self, loss: Float[Array, "..."]) -> Float[Array, "..."]:
        """Multiplies a loss by the factor, in float32 or wider."""
        loss = widen(loss)
        return loss * self.value.astype(loss.dtype)

    def unscale(self, tree: PyTree) -> PyTree:
        """Divides the arrays of a tree, such as a gradient, by the factor; they keep their
        dtypes."""
        return map_where(eqx.is_inexact_array, self._divide, tree)

    def adjust(self, finite: Bool[Array, "..."]) -> "LossScale":
        """Returns the scale for the next step, given whether the gradient was finite."""
        # Doubled after many good steps, halved after one bad one: too large costs a step, too small
        # only digits.
        grown = self.good + 1 >= self.period
        doubled = jnp.minimum(self.value * 2, _MOST)
        value = jnp.where(grown, doubled, self.value)
        halved = jnp.maximum(self.value / 2, LEAST_LOSS_SCALE)
        # The count begins again with each change of the scale.
        good = jnp.where(finite & ~grown, self.good + 1, 0)
        skipped = self.skipped + (~finite).astype(jnp.int32)
        value = jnp.where(finite, value, halved)
        return eqx.tree_at(lambda s: (s.value, s.good, s.skipped), self, (value, good, skipped))

    def _divide(self, x: Array) -> Array:
        # Divided in float32: a gradient in float16 may vanish.
        wide = widen(x)
        return (wide / self.value.astype(wide.real.dtype)).astype(x.dtype)
