"""Gradients of grouped convolutions, which the compiler gets wrong if it is left alone."""

import contextlib
import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problem import quiet

import redcoast as rc

# On each, the batch is split over some devices while others have nothing to do; six channels
# divide over none of the `model` axes, and eight over all.
MESHES = [
    {"data": 2, "model": 4},
    {"fsdp": 2, "model": 4},
    {"data": 2, "fsdp": 2, "model": 2},
]


def depthwise(x, kernel):
    numbers = ("NHWC", "HWIO", "NHWC")
    groups = x.shape[-1] // kernel.shape[-2]
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups
    )


def loss_fn(params, batch, key):
    hidden = depthwise(jnp.tanh(batch @ params["into"]), params["kernel"])
    return jnp.mean((jnp.tanh(hidden) @ params["out"]) ** 2)


def make(channels):
    keys = jax.random.split(jax.random.key(0), 4)
    draw = lambda key, *shape: jax.random.normal(key, shape) / 2
    params = {
        "into": draw(keys[0], 16, channels),
        "kernel": draw(keys[1], 3, 3, 1, channels),
        "out": draw(keys[2], channels, 16),
    }
    return params, draw(keys[3], 8, 6, 6, 16)


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("channels", [6, 8])
def test_gradients_are_right(sizes, channels):
    params, batch = make(channels)
    plan = rc.plan_shardings(params, rc.make_mesh(**sizes), fn=loss_fn, args=(batch, None))
    errors = plan.verify(loss_fn, params, batch, tolerance=1e-5)
    assert set(errors) == {"loss", "into", "kernel", "out"}


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [MESHES[0], MESHES[2]])
def test_and_wrong_without_the_protection(sizes, monkeypatch):
    # Fails when the compiler is mended, and the protection can go.
    monkeypatch.setattr(
        "redcoast.sharding.constrain._split_conv.is_grouped", lambda equation: False
    )
    params, batch = make(6)
    plan = rc.plan_shardings(params, rc.make_mesh(**sizes), fn=loss_fn, args=(batch, None))
    with pytest.raises(ValueError, match="kernel"):
        plan.verify(loss_fn, params, batch)


@pytest.mark.thorough
@pytest.mark.parametrize("count", [8, 6, 3])
def test_batches_that_do_not_divide(count):
    params, batch = make(6)
    plan = rc.plan_shardings(params, rc.make_mesh(model=2), fn=loss_fn, args=(batch, None))
    assert max(plan.verify(loss_fn, params, batch[:count]).values()) < 1e-5


@pytest.mark.thorough
def test_compiled_steps_of_constrained_losses_are_not_refused():
    def grad_norm(mesh):
        params, batch = make(6)
        optimizer = optax.sgd(1.0)
        state = rc.init_state(lambda key: params, optimizer, key=jax.random.key(0))
        plan = rc.plan_shardings(state, mesh, fn=loss_fn, args=(batch, None))
        step = ft.partial(rc.train_step, loss_fn=plan.constrain(loss_fn), optimizer=optimizer)
        _, metrics = rc.compile_step(step, plan.shardings)(state, np.asarray(batch))
        return float(metrics["grad_norm"])

    one = grad_norm(rc.make_mesh(devices=jax.devices()[:1]))
    np.testing.assert_allclose(grad_norm(rc.make_mesh(model=4)), one, rtol=1e-5)


@pytest.mark.thorough
def test_gradients_inside_the_loss_and_under_scan():
    def loss(params, batch, key):
        def layer(x, kernel):
            return jnp.tanh(depthwise(x, kernel)), None

        inner = lambda kernel: jnp.mean(depthwise(batch @ params["into"], kernel) ** 2)
        kernels = jnp.stack(
            [params["kernel"], params["kernel"] - jax.grad(inner)(params["kernel"])]
        )
        x, _ = jax.lax.scan(jax.checkpoint(layer), batch @ params["into"], kernels)
        return jnp.mean((x @ params["out"]) ** 2)

    params, batch = make(6)
    plan = rc.plan_shardings(params, rc.make_mesh(model=4), fn=loss, args=(batch, None))
    assert max(plan.verify(loss, params, batch).values()) < 1e-5


@pytest.mark.thorough
def test_fit_trains_them_as_one_device_does():
    _, data = make(6)
    examples = [np.asarray(row) for row in data] * 4

    def losses(mesh):
        actual = []
        params, _ = make(6)
        rc.fit(
            params,
            optax.sgd(0.1),
            examples,
            collate_fn=np.stack,
            loss_fn=loss_fn,
            batch_size=8,
            steps=4,
            mesh=mesh,
            log=quiet(lambda metrics, step: actual.append(metrics["loss"])),
        )
        return actual

    one = losses(rc.make_mesh(devices=jax.devices()[:1]))
    np.testing.assert_allclose(losses(rc.make_mesh(data=2, model=4)), one, rtol=1e-5)


@pytest.mark.few("sizes0-True", "sizes2-False")
@pytest.mark.parametrize(
    ("sizes", "wrong"),
    [({"data": 2, "model": 4}, True), ({"fsdp": 8, "data": 1}, False), ({}, False)],
)
def test_without_constraints_only_where_gradients_are_right(sizes, wrong, monkeypatch):
    def fail(call, *args):
        raise TypeError("This operation is not known.")

    params, batch = make(8)
    plan = rc.plan_shardings(params, rc.make_mesh(**sizes), fn=loss_fn, args=(batch, None))
    monkeypatch.setattr("redcoast.sharding.constrain._interpreter._run", fail)
    compute = lambda: plan.constrain(loss_fn)(params, batch, None)
    if wrong:
        with pytest.raises(RuntimeError, match="Use a mesh with model=1"):
            compute()
    else:
        # Where the batch alone is split, nothing is lost, and nothing is said.
        warned = pytest.warns(UserWarning, match="cannot be re-evaluated")
        with warned if sizes else contextlib.nullcontext():
            actual = compute()
        np.testing.assert_allclose(actual, loss_fn(params, batch, None), rtol=1e-6)
