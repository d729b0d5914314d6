"""Learning-rate schedules whose length comes from the data."""

import math
from collections.abc import Callable
from typing import Literal, get_args

import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

# What Optax takes for a schedule, with a narrower result.
Schedule = Callable[[ArrayLike], Array]
Decay = Literal["cosine", "linear", "constant"]


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
    """A linear warm-up to `peak`, then a decay that ends with the last step of the run.

    With `T` steps in total, of which `W` warm up, step `t = 0, 1, ...` has the learning rate

    - `peak * (t + 1) / W` while `t < W`: the first step is not wasted on a learning rate of zero,
      and step `W - 1` is the first with the whole `peak`;
    - then, with `s = max(W - 1, 0)` and `p = (t - s) / (T - 1 - s)`, for `decay="linear"`
      `peak * (1 - (1 - end) * p)`, and for `decay="cosine"`
      `peak * (end + (1 - end) * (1 + cos(pi * p)) / 2)`, so that the last step, `t = T - 1`, has
      `end * peak`. Later steps stay there.

    The cosine is that of Loshchilov and Hutter, *SGDR: Stochastic Gradient Descent with Warm
    Restarts*, 2017, equation 5, without restarts.

    !!! example

        ```python
        schedule = rc.learning_rate_schedule(3e-4, examples=10_000, batch_size=32, epochs=3)
        optimizer = optax.adamw(schedule)
        ```

    **Arguments:**

    - `peak`: the largest learning rate.
    - `examples`: the number of training examples, `len(examples)`.
    - `batch_size`: the global batch size.
    - `epochs`: the number of passes over the examples; the last batch may be short, so that there
      are `epochs * examples / batch_size` steps, rounded up.
    - `steps`: the number of steps. Give either this or `epochs`.
    - `warmup`: the number of warm-up steps as an `int`, or, as a `float` in [0, 1), their share of
      all steps (rounded to whole steps).
    - `decay`: `"cosine"`, `"linear"` or `"constant"` (which stays at `peak` and ignores `end`).
    - `end`: the last learning rate as a fraction of `peak`.

    **Returns:**

    A function from the step (an integer, traced or not) to the learning rate in float32, which
    every Optax optimizer takes for its `learning_rate`. It also maps an array of steps.

    **Raises:**

    `ValueError` if not exactly one of `epochs` and `steps` is given, or if a number is out of
    range.
    """
    if not isinstance(peak, int | float):
        raise TypeError(f"peak is {peak!r}; it has to be a number.")
    total = _total_steps(examples, batch_size, epochs, steps)
    warmup_steps = _warmup_steps(warmup, total)
    if not (math.isfinite(peak) and peak > 0):
        raise ValueError(f"peak is {peak}; the learning rate has to be positive and finite.")
    if decay not in get_args(Decay):
        raise ValueError(f"decay is {decay!r}; it has to be one of {', '.join(get_args(Decay))}.")
    if not 0 <= end <= 1:
        raise ValueError(
            f"end is {end}; it is a fraction of the peak, between 0 and 1, not a learning rate."
        )
    return _schedule(peak, total, warmup_steps, decay, end)


def _schedule(
    peak: float | int, total: int, warmup: int, decay: Decay, end: float | int
) -> Schedule:
    start = max(warmup - 1, 0)
    length = total - 1 - start
    if decay == "constant" or length == 0:
        main = optax.constant_schedule(peak)
    elif decay == "cosine":
        main = optax.cosine_decay_schedule(peak, length, alpha=end)
    else:
        main = optax.linear_schedule(peak, end * peak, length)
    if start > 0:
        main = optax.join_schedules(
            [optax.linear_schedule(peak / warmup, peak, start), main], [start]
        )

    # Optax counts steps in int32, which strict dtype promotion does not mix with floats.
    return lambda step: jnp.asarray(main(jnp.asarray(step, jnp.float32)), jnp.float32)


def _total_steps(examples: int, batch_size: int, epochs: int | None, steps: int | None) -> int:
    if (epochs is None) == (steps is None):
        given = "neither" if epochs is None else "both"
        raise ValueError(f"Give either epochs or steps; {given} of them is given.")
    sizes = {"examples": examples, "batch_size": batch_size, "epochs": epochs, "steps": steps}
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{name} is {size}; it has to be at least 1.")
    if epochs is None:
        assert steps is not None
        return steps
    return -(-epochs * examples // batch_size)


def _warmup_steps(warmup: int | float, total: int) -> int:
    if isinstance(warmup, float):
        if not 0 <= warmup < 1:
            raise ValueError(
                f"warmup is {warmup}; as a float it is a share of all steps, which lies in [0, 1). "
                "For a number of steps, pass an int."
            )
        return min(round(warmup * total), total - 1)
    if not 0 <= warmup <= total:
        raise ValueError(
            f"warmup is {warmup} steps and the whole run is {total}; pass at most {total}, or a "
            "float in [0, 1) for a share of the run."
        )
    return warmup
