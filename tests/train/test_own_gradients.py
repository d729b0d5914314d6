"""Custom gradients, averages, scanned steps and `prepare`, against plain JAX."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problem import batch_of, loss_fn, make_model

import redcoast as rc

OPTIMIZER = optax.sgd(0.1)
KEY = jax.random.key(0)
MESH = rc.make_mesh(fsdp=2, model=2)


def arrays(tree):
    return jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array))


def clipped(model, batch, key):
    """A loss with the sum of per-example gradients, each clipped to a norm of 1."""

    def one(x, y):
        example = {"x": x[None], "y": y[None]}
        gradient = eqx.filter_grad(lambda m: loss_fn(m, example, key)[0])(model)
        scale = 1 / jnp.maximum(1.0, optax.tree.norm(gradient))
        return jax.tree.map(lambda g: g * scale, gradient)

    gradient = jax.tree.map(lambda g: jnp.mean(g, axis=0), jax.vmap(one)(batch["x"], batch["y"]))
    return rc.with_gradient(loss_fn(model, batch, key)[0], model, gradient), gradient


def test_value_and_gradient_are_those_given():
    model, batch = make_model(), batch_of(16)

    @eqx.filter_jit
    def compute(model, batch):
        loss = lambda m: clipped(m, batch, KEY)[0]
        value, actual = eqx.filter_value_and_grad(loss)(model)
        return value, actual, loss_fn(model, batch, KEY)[0], clipped(model, batch, KEY)[1]

    value, actual, expected_value, expected = compute(model, batch)
    np.testing.assert_array_equal(value, expected_value)
    for a, b in zip(arrays(actual), arrays(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_part_of_the_model_may_get_no_gradient():
    model = {"a": jnp.ones(3), "b": jnp.ones(2), "name": "x"}
    gradient = {"a": jnp.arange(3.0), "b": None, "name": None}
    actual = eqx.filter_grad(lambda m: rc.with_gradient(jnp.float32(1), m, gradient))(model)
    np.testing.assert_array_equal(actual["a"], gradient["a"])
    np.testing.assert_array_equal(actual["b"], jnp.zeros(2))


def test_nan_in_a_gradient_skips_the_step():
    state = rc.init_state(lambda key: {"w": jnp.ones(3)}, OPTIMIZER, key=KEY)
    wrong = {"w": jnp.array([0.0, jnp.nan, 0.0])}
    loss = lambda model, batch, key: rc.with_gradient(jnp.float32(1), model, wrong)
    after, metrics = rc.train_step(state, jnp.ones(2), loss_fn=loss, optimizer=OPTIMIZER)
    assert metrics["skipped"] == 1
    np.testing.assert_array_equal(after.model["w"], state.model["w"])


@pytest.mark.thorough
def test_prepared_steps_with_own_gradients_are_those_of_one_device():
    """The planner follows the gradient, and sharding it changes no result."""
    batch = batch_of(16)
    loss = lambda *args: clipped(*args)[0]
    state, step, plan = rc.prepare(
        lambda key: make_model(), OPTIMIZER, loss, batch, key=KEY, mesh=MESH
    )
    assert not state.model.layers[1].weight.is_fully_replicated
    plan.verify(loss, make_model(), batch, KEY)
    one = rc.init_state(lambda key: make_model(), OPTIMIZER, key=KEY)
    plain = eqx.filter_jit(ft.partial(rc.train_step, loss_fn=loss, optimizer=OPTIMIZER))
    metrics, expected = {}, {}
    for _ in range(3):
        state, metrics = step(state, batch)
        one, expected = plain(one, batch)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)
    for a, b in zip(arrays(state.model), arrays(one.model), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.thorough
def test_scanned_steps_are_the_steps():
    batches = [batch_of(8, seed) for seed in range(3)]
    state = rc.init_state(lambda key: make_model(), optax.adam(1e-2), key=KEY)
    options = {"loss_fn": loss_fn, "optimizer": optax.adam(1e-2)}
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *batches)
    actual, metrics = eqx.filter_jit(ft.partial(rc.train_steps, **options))(state, stacked)
    losses = []
    for batch in batches:
        state, one = rc.train_step(state, batch, **options)
        losses.append(one["loss"])
    np.testing.assert_allclose(metrics["loss"], jnp.stack(losses), rtol=1e-5)
    assert actual.step == state.step == 3
    for a, b in zip(arrays(actual), arrays(state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.thorough
def test_averages_keep_dtypes_and_other_leaves():
    old = {"w": jnp.ones(2, jnp.bfloat16), "n": jnp.int32(1), "f": jnp.tanh}
    new = {"w": jnp.full(2, 3.0), "n": jnp.int32(5), "f": jnp.tanh}
    actual = rc.moving_average(old, new, 0.75)
    assert (actual["w"].dtype, actual["n"], actual["f"]) == (jnp.bfloat16, 5, jnp.tanh)
    np.testing.assert_array_equal(actual["w"], jnp.full(2, 1.5, jnp.bfloat16))
    same = rc.moving_average(new, old, jnp.float32(1.0))
    np.testing.assert_array_equal(same["w"], new["w"])


def test_no_gradient_flows_through_a_stopped_tree():
    model = make_model()
    loss = lambda m: jnp.sum(jax.vmap(rc.stop_gradient(m))(jnp.ones((2, 16))))
    assert not any(map(np.any, arrays(eqx.filter_grad(loss)(model))))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: rc.moving_average({"a": 1}, {"b": 1}, 0.5), "different structures"),
        (
            lambda: rc.with_gradient(jnp.float32(0), {"a": jnp.ones(2)}, {"a": jnp.ones(3)}),
            r"shape \(3,\) at a, where `model` has \(2,\)",
        ),
    ],
)
def test_trees_that_do_not_match(call, words):
    with pytest.raises(ValueError, match=words):
        call()
