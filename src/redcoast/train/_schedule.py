"""Learning-rate schedules whose length is derived from the data."""

import math
import numbers
from collections.abc import Callable
from typing import Literal, get_args

import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from ..core._errors import check_choice, check_integer, check_number
from ..core._frames import hide_frames

# An optax schedule with a narrower result type.
Schedule = Callable[[ArrayLike], Array]
Decay = Literal["cosine", "linear", "constant"]


@hide_frames
def learning_rate_schedule(
    peak: int | float,
    *,
    examples: int,
    batch_size: int,
    epochs: int | None = None,
    steps: int | None = None,
    warmup: int | float = 0.05,
    decay: Decay = "cosine",
    end: int | float = 0.1,
) -> Schedule:
    """Creates a schedule with a linear warmup to `peak` and a decay over the rest of the run.

    With `T` steps in total and `W` warmup steps, step `t = 0, 1, ...` has the learning rate

    - `peak * (t + 1) / W` while `t < W`. The first step already trains, and step `W - 1` is the
      first with the learning rate `peak`;
    - then, with `s = max(W - 1, 0)` and `p = (t - s) / (T - 1 - s)`,
      `peak * (1 - (1 - end) * p)` for `decay="linear"`, and
      `peak * (end + (1 - end) * (1 + cos(pi * p)) / 2)` for `decay="cosine"`. The last step,
      `t = T - 1`, has the learning rate `end * peak`, and so do all later steps.

    The cosine decay is equation 5 of Loshchilov and Hutter, *SGDR: Stochastic Gradient Descent with
    Warm Restarts*, 2017, without restarts.

    **Arguments:**

    - `peak`: the largest learning rate.
    - `examples`: the number of training examples, `len(examples)`.
    - `batch_size`: the global batch size.
    - `epochs`: the number of passes over the examples. The last batch may be short, so the number
      of steps is `epochs * examples / batch_size`, rounded up.
    - `steps`: the number of steps. Pass either this or `epochs`.
    - `warmup`: an `int` is the number of warmup steps; a `float` in [0, 1) is their fraction of
      all steps, rounded to an integer number of steps.
    - `decay`: `"cosine"`, `"linear"` or `"constant"` (`peak` after the warmup; ignores `end`).
    - `end`: the last learning rate as a fraction of `peak`.

    **Returns:**

    A function from the step (an integer or an array of integers) to the learning rate in float32.
    Pass it to an optax optimizer as `learning_rate`.

    **Raises:**

    `ValueError` if not exactly one of `epochs` and `steps` is given, or if a number is out of
    range.

    !!! Example

        ```python
        schedule = rc.learning_rate_schedule(3e-4, examples=10_000, batch_size=32, epochs=3)
        optimizer = optax.adamw(schedule)
        ```
    """
    for name, number in (("peak", peak), ("warmup", warmup), ("end", end)):
        check_number(name, number)
    total = _total_steps(examples, batch_size, epochs, steps)
    warmup_steps = _warmup_steps(warmup, total)
    if not (math.isfinite(peak) and peak > 0):
        raise ValueError(f"`peak` must be positive and finite, but is {peak}.")
    check_choice("decay", decay, get_args(Decay))
    if not 0 <= end <= 1:
        raise ValueError(f"`end` must be a fraction of `peak` between 0 and 1, but is {end}.")
    # The first step of a warmup has a rate above 0, and the last one the peak.
    start = max(warmup_steps - 1, 0)
    # The last step has the final rate.
    length = total - 1 - start
    if decay == "constant" or length == 0:
        main = optax.constant_schedule(peak)
    elif decay == "cosine":
        main = optax.cosine_decay_schedule(peak, length, alpha=end)
    else:
        main = optax.linear_schedule(peak, end * peak, length)
    if start > 0:
        rise = optax.linear_schedule(peak / warmup_steps, peak, start)
        main = optax.join_schedules([rise, main], [start])
    # Optax counts steps in int32, which strict dtype promotion cannot combine with floats.
    return lambda step: jnp.asarray(main(jnp.asarray(step, jnp.float32)), jnp.float32)


def _total_steps(examples: int, batch_size: int, epochs: int | None, steps: int | None) -> int:
    if (epochs is None) == (steps is None):
        passed = "both are"
        if epochs is None:
            passed = "neither is"
        raise ValueError(f"Pass exactly one of `epochs` and `steps`; {passed} given.")
    sizes = {"examples": examples, "batch_size": batch_size, "epochs": epochs, "steps": steps}
    for name, size in sizes.items():
        if size is not None or name in ("examples", "batch_size"):
            check_integer(name, size)
    if epochs is None:
        assert steps is not None
        return steps
    # Batches go across the ends of epochs, so only the last of the run may be short.
    return -(-epochs * examples // batch_size)


def _warmup_steps(warmup: int | float, total: int) -> int:
    if not isinstance(warmup, numbers.Integral):
        if not 0 <= warmup < 1:
            raise ValueError(
                f"A float `warmup` is a fraction of all steps and must be in [0, 1), but is "
                f"{warmup}. For a number of steps, pass an int."
            )
        return min(round(warmup * total), total - 1)
    if not 0 <= warmup <= total:
        raise ValueError(
            f"`warmup` must be between 0 and {total}, the number of steps of the run, but is "
            f"{warmup}. For a fraction of the run, pass a float in [0, 1)."
        )
    return int(warmup)
