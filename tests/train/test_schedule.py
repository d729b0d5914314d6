import inspect
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redcoast import learning_rate_schedule


def closed_form(t, peak, total, warmup, decay, end):
    if t < warmup:
        return peak * (t + 1) / warmup
    start = max(warmup - 1, 0)
    if decay == "constant" or total - 1 == start:
        return peak
    p = min((t - start) / (total - 1 - start), 1.0)
    if decay == "linear":
        return peak * (1 - (1 - end) * p)
    return peak * (end + (1 - end) * (1 + math.cos(math.pi * p)) / 2)


@settings(max_examples=60, deadline=None)
@given(
    peak=st.floats(1e-6, 1.0),
    total=st.integers(1, 10_000),
    share=st.floats(0.0, 1.0),
    decay=st.sampled_from(["cosine", "linear", "constant"]),
    end=st.floats(0.0, 1.0),
    data=st.data(),
)
def test_follows_the_formula(peak, total, share, decay, end, data):
    warmup = int(share * total)
    schedule = learning_rate_schedule(
        peak, examples=7, batch_size=3, steps=total, warmup=warmup, decay=decay, end=end
    )
    drawn = data.draw(st.lists(st.integers(0, total + 10), min_size=1, max_size=5))
    # The boundaries, where off-by-one errors occur, are always among the steps.
    steps = [0, max(warmup - 1, 0), warmup, total - 1, total, *drawn]
    expected = [closed_form(t, peak, total, warmup, decay, end) for t in steps]
    np.testing.assert_allclose(
        [float(schedule(t)) for t in steps], expected, rtol=2e-5, atol=1e-6 * peak
    )


@pytest.mark.parametrize("decay", ["cosine", "linear"])
@pytest.mark.parametrize(("epochs", "examples", "batch", "total"), [(3, 70, 16, 14), (2, 8, 4, 4)])
def test_length_comes_from_the_data(decay, epochs, examples, batch, total):
    schedule = learning_rate_schedule(
        1.0, examples=examples, batch_size=batch, epochs=epochs, warmup=0, decay=decay, end=0.25
    )
    values = [float(schedule(t)) for t in range(total + 1)]
    assert values[0] == 1.0
    assert values[-2] == pytest.approx(0.25)
    assert values[-3] > 0.26
    assert values[-1] == values[-2]


@pytest.mark.parametrize(("warmup", "steps"), [(0.1, 10), (10, 10), (0.0, 0), (0, 0), (1, 1)])
def test_warmup_as_share_or_number(warmup, steps):
    schedule = learning_rate_schedule(1.0, examples=1, batch_size=1, steps=100, warmup=warmup)
    values = [float(schedule(t)) for t in range(100)]
    assert values.index(max(values)) == max(steps - 1, 0)
    assert values[0] == pytest.approx(1 / max(steps, 1))
    assert values[-1] == pytest.approx(0.1)


def test_a_run_of_one_step_has_the_peak():
    for warmup in (0.05, 0.9, 0, 1):
        schedule = learning_rate_schedule(2.0, examples=1, batch_size=8, epochs=1, warmup=warmup)
        assert float(schedule(0)) == 2.0


@pytest.mark.few("sgd-True-cosine", "sgd-False-linear", "adamw-True-constant", "adamw-False-cosine")
@pytest.mark.parametrize("decay", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("inject", [True, False])
@pytest.mark.parametrize("make", [optax.sgd, optax.adamw])
def test_sets_the_step_size_of_an_optimizer(make, inject, decay):
    # With a gradient of one, SGD changes every parameter by the learning rate, and so, up to
    # rounding, does Adam.
    schedule = learning_rate_schedule(
        0.1, examples=20, batch_size=2, epochs=1, warmup=3, decay=decay
    )
    optimizer = (optax.inject_hyperparams(make) if inject else make)(learning_rate=schedule)
    params, gradients = jnp.zeros(3), jnp.ones(3)
    # Adam's bias correction raises a Python float to an int32 power, with any schedule.
    promotion = "strict" if make is optax.sgd else "standard"

    @jax.jit
    def step(state):
        with jax.numpy_dtype_promotion(promotion):
            return optimizer.update(gradients, state, params)

    state = optimizer.init(params)
    for t in range(10):
        updates, state = step(state)
        expected = closed_form(t, 0.1, 10, 3, decay, 0.1)
        np.testing.assert_allclose(updates, np.full(3, -expected), rtol=1e-4)
        assert updates.dtype == jnp.float32
        if inject:
            np.testing.assert_allclose(state.hyperparams["learning_rate"], expected, rtol=1e-5)


def test_is_a_float32_scalar_for_any_kind_of_step():
    schedule = learning_rate_schedule(0.1, examples=20, batch_size=2, epochs=1)
    values = [schedule(3), schedule(np.int64(3)), schedule(jnp.int32(3))]
    values.append(eqx.filter_jit(schedule)(jnp.int32(3)))
    np.testing.assert_allclose(schedule(jnp.arange(10))[3], values[0], rtol=1e-6)
    assert {(v.dtype.name, v.shape, v.weak_type) for v in values} == {("float32", (), False)}
    np.testing.assert_allclose([float(v) for v in values], float(values[0]), rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "one of `epochs` and `steps`; neither is given"),
        ({"epochs": 1, "steps": 1}, "one of `epochs` and `steps`; both are given"),
        ({"epochs": 1, "examples": 0}, "`examples` is 0"),
        ({"epochs": 0}, "`epochs` is 0"),
        ({"steps": 0}, "`steps` is 0"),
        ({"steps": 1, "batch_size": 0}, "`batch_size` is 0"),
        ({"steps": 5, "warmup": 6}, "must be between 0 and 5, .* but is 6"),
        ({"steps": 5, "warmup": -1}, "`warmup` must be .* but is -1"),
        ({"steps": 5, "warmup": 1.0}, "A float `warmup` .* but is 1.0. .* pass an int"),
        ({"steps": 5, "warmup": float("nan")}, "A float `warmup` .* but is nan"),
        ({"steps": 5, "end": 1.5}, "`end` must be .* but is 1.5"),
        ({"steps": 5, "peak": 0.0}, "`peak` must be .* but is 0.0"),
        ({"steps": 5, "peak": float("inf")}, "`peak` must be .* but is inf"),
    ],
)
def test_bad_input(changes, message):
    arguments = {"peak": 0.1, "examples": 10, "batch_size": 2, **changes}
    with pytest.raises(ValueError, match=message):
        learning_rate_schedule(arguments.pop("peak"), **arguments)


def test_unknown_decay():
    unchecked: Any = inspect.unwrap(learning_rate_schedule)  # without the checks of types
    with pytest.raises(ValueError, match="'exponential'. It must be 'cosine' or 'linear'"):
        unchecked(0.1, examples=10, batch_size=2, steps=5, decay="exponential")
