"""A run traces its loss once, for the plan and the step, and again only for another batch."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.core import Tracer
from problem import collate_fn, fit_quietly, make_examples, make_model
from problem import loss_fn as plain_loss

import redcoast as rc
from redcoast.train._traced_loss import traced_once

EXAMPLES = make_examples(48)
OPTIMIZER = optax.adam(1e-2)


def counting(fn):
    """The function, and a list that grows whenever it is called."""
    calls = []

    def counted(*args):
        calls.append(args)
        return fn(*args)

    return counted, calls


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [{"data": 1}, {"data": 2, "model": 2}])
def test_the_plan_and_the_step_of_fit_share_a_trace(sizes):
    loss, traces = counting(plain_loss)
    create, created = counting(lambda key: make_model())
    mesh = rc.make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])
    options = {"batch_size": 16, "mesh": mesh, "loss_fn": loss, "collate_fn": collate_fn}
    state = fit_quietly(create, OPTIMIZER, EXAMPLES, steps=2, **options)
    assert len(traces) == 1
    assert len(created) == 2  # for the plan, and for the arrays
    fit_quietly(state, OPTIMIZER, EXAMPLES, steps=3, **options)
    assert len(traces) == 2  # so that no change of what the loss reads is missed


@pytest.mark.thorough
def test_prepare_and_its_step_share_a_trace():
    loss, traces = counting(plain_loss)
    batch = collate_fn(EXAMPLES[:16])
    mesh = rc.make_mesh(data=2, devices=jax.devices()[:2])
    state, step, _ = rc.prepare(make_model(), OPTIMIZER, loss, batch, mesh=mesh)
    state, _ = step(state, batch)
    assert len(traces) == 1
    step(state, collate_fn(EXAMPLES[:8]))
    assert len(traces) == 2


def test_values_and_gradients_are_those_of_the_function():
    counted, calls = counting(lambda weight, x: (jnp.sum(weight["w"] * x) ** 2, {"x": x}))
    once = traced_once(counted)
    for size in (3, 3, 4):
        x = jnp.arange(size, dtype=jnp.float32)
        weight = {"w": x + 1}
        grad, aux = jax.grad(once, has_aux=True)(weight, x)
        np.testing.assert_array_equal(grad["w"], 2 * jnp.sum(weight["w"] * x) * x)
        np.testing.assert_array_equal(aux["x"], x)
    assert len(calls) == 2  # the kinds of arguments


def test_a_model_that_is_returned_as_it_is_stays_the_same_object():
    once = traced_once(lambda model, batch, key: (jnp.sum(model), {}, model))
    model = jnp.ones(3)
    assert once(model, None, None)[2] is model


def test_arguments_that_cannot_be_compared_call_the_function_itself():
    counted, calls = counting(lambda model, names: model * len(names))
    once = traced_once(counted)
    for _ in range(2):
        once(jnp.ones(3), {1, 2})
    assert len(calls) == 2


def test_the_function_itself_is_debugged():
    counted, calls = counting(lambda model: model * 2)
    once = traced_once(counted)
    with jax.disable_jit():
        for _ in range(2):
            once(jnp.ones(3))
    assert not any(isinstance(args[0], Tracer) for args in calls)
    assert len(calls) == 2
