import functools as ft
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from problem import arrays, batch_of, loss_fn, make_model

import redcoast as rc

KEY = jax.random.key(0)
OPTIMIZER = optax.adam(1e-2)
STEP = ft.partial(rc.train_step, loss_fn=loss_fn, optimizer=OPTIMIZER)


def start(mesh, init_fn=lambda key: make_model()):
    state = rc.init_state(init_fn, OPTIMIZER, key=KEY)
    return state, rc.infer_shardings(state, mesh)


def counting(step):
    traces = []

    def counted(*args):
        traces.append(1)
        return step(*args)

    return counted, traces


def test_equals_the_step_itself_and_keeps_the_shardings():
    mesh = rc.make_mesh(data=2, fsdp=2, model=2)
    state, shardings = start(mesh)
    expected = eqx.filter_jit(STEP)
    reference = state
    counted, traces = counting(STEP)
    step = rc.compile_step(counted, shardings)
    batch = batch_of(16)
    state = jax.tree.map(lambda x: jnp.copy(x) if eqx.is_array(x) else x, state)
    for _ in range(3):
        reference, metrics = expected(reference, batch)
        state, found = step(state, batch)
        np.testing.assert_allclose(found["loss"], metrics["loss"], rtol=1e-5)
        for x, sharding in zip(
            jax.tree.leaves(eqx.filter(state, eqx.is_array)),
            jax.tree.leaves(shardings),
            strict=True,
        ):
            assert x.sharding == sharding
    assert len(traces) == 1
    step(state, batch_of(8))
    assert len(traces) == 2


def test_state_is_donated():
    state, shardings = start(rc.make_mesh())
    step = rc.compile_step(STEP, shardings)
    state, _ = step(state, batch_of(16))
    new, _ = step(state, batch_of(16))
    assert state.model.layers[0].weight.is_deleted()
    assert not new.model.layers[0].weight.is_deleted()


def test_returns_before_the_device_is_done():
    def slow(state, x):
        y = jax.lax.fori_loop(0, 400, lambda _, y: jnp.tanh(y @ y) + 0.1, x)
        return state + 1.0, jnp.sum(y)  # seconds later

    mesh = rc.make_mesh(devices=jax.devices()[:1])
    state = jnp.zeros(())
    step = rc.compile_step(slow, rc.infer_shardings(state, mesh))
    x = np.full((400, 400), 0.01, np.float32)
    state, total = step(state, x)
    jax.block_until_ready(total)
    # Of several, in case this thread is not run again before a result is there.
    early = False
    for _ in range(5):
        state, total = step(state, x)
        early = early or not total.is_ready()
        jax.block_until_ready(total)
        if early:
            break
    assert early


def test_lower_takes_abstract_arguments():
    mesh = rc.make_mesh()
    abstract = eqx.filter_eval_shape(rc.init_state, lambda key: make_model(), OPTIMIZER, key=KEY)
    step = rc.compile_step(STEP, rc.infer_shardings(abstract, mesh))
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch_of(16))
    memory: Any = step.lower(abstract, batch).compile().memory_analysis()
    assert memory.alias_size_in_bytes > 0


def test_arguments_may_be_models_keys_and_numbers():
    mesh = rc.make_mesh()
    state = {"total": jnp.zeros(())}

    def step(state, model, key, scale, name):
        assert name == "sum"
        x = jax.random.normal(key, (16,))
        return {"total": state["total"] + scale * jnp.sum(model(x))}, None

    counted, traces = counting(step)
    compiled = rc.compile_step(counted, rc.infer_shardings(state, mesh))
    for scale in (1.0, 2.0, 3.0):  # a new number is no new program
        state, _ = compiled(state, make_model(), KEY, scale, "sum")
    assert len(traces) == 1
    expected = 6.0 * jnp.sum(make_model()(jax.random.normal(KEY, (16,))))
    np.testing.assert_allclose(state["total"], expected, rtol=1e-5)


def test_bare_specs_refer_to_the_mesh():
    mesh = rc.make_mesh(model=8)
    state = jnp.ones((16, 8))

    def step(state):
        return jax.lax.with_sharding_constraint(state * 2.0, P("model")), {}

    after, _ = rc.compile_step(step, rc.infer_shardings(state, mesh))(state)
    np.testing.assert_array_equal(after, 2 * np.ones((16, 8)))


def test_structure_must_stay():
    mesh = rc.make_mesh()
    state = {"a": jnp.zeros(3), "b": jnp.zeros(3)}
    shardings = rc.infer_shardings(state, mesh)
    with pytest.raises(ValueError, match="structure"):
        rc.compile_step(lambda s: ({"a": s["a"]}, {}), shardings)(state)
    counter = {"a": jnp.zeros(3), "n": 0}
    step = rc.compile_step(
        lambda s: ({"a": s["a"], "n": s["n"] + 1}, {}), rc.infer_shardings(counter, mesh)
    )
    with pytest.raises(ValueError, match="given 0 at n and returned 1 at n.*must be a JAX array"):
        step(counter)
    with pytest.raises(ValueError, match="holds 1 arrays.*2 shardings"):
        rc.compile_step(lambda s: (s, {}), shardings)({"a": jnp.zeros(3)})
    with pytest.raises(ValueError, match="no sharding"):
        rc.compile_step(lambda s: (s, {}), {"a": None})


def test_a_finished_state_is_not_kept_alive():
    import gc
    import weakref

    state, shardings = start(rc.make_mesh())
    step = rc.compile_step(STEP, shardings)
    state, _ = step(state, batch_of(16))
    weight = weakref.ref(state.model.layers[0].weight)
    del state
    gc.collect()
    assert weight() is None


def discriminate(model, x):
    return jax.vmap(model)(x)[:, 0]


def generator_loss(models, batch, key):
    fake = jax.vmap(models["generator"])(jax.random.normal(key, (32, 4)))
    return jnp.mean(jax.nn.softplus(-discriminate(models["discriminator"], fake)))


def discriminator_loss(models, batch, key):
    fake = jax.vmap(models["generator"])(jax.random.normal(key, (32, 4)))
    real = jnp.mean(jax.nn.softplus(-discriminate(models["discriminator"], batch)))
    return real + jnp.mean(jax.nn.softplus(discriminate(models["discriminator"], fake)))


@pytest.mark.parametrize("sizes", [{}, {"fsdp": 2, "model": 2}])
@pytest.mark.thorough
def test_a_loop_of_ones_own_with_two_optimizers(sizes):
    """A GAN that learns where a cloud of points lies, without `fit`."""
    mesh = rc.make_mesh(**sizes)
    keys = jax.random.split(KEY)
    models = {
        "generator": eqx.nn.MLP(4, 2, 64, 2, key=keys[0]),
        "discriminator": eqx.nn.MLP(2, 1, 64, 2, key=keys[1]),
    }
    steps, states = {}, {}
    for name, loss in (("generator", generator_loss), ("discriminator", discriminator_loss)):
        optimizer = optax.adam(2e-3, b1=0.5)
        own = {n: jax.tree.map(lambda _, own=n == name: own, m) for n, m in models.items()}
        state = rc.init_state(
            lambda key: jax.tree.map(lambda x: jnp.copy(x) if eqx.is_array(x) else x, models),
            optimizer,
            key=KEY,
            trainable=own,
        )
        step = ft.partial(rc.train_step, loss_fn=loss, optimizer=optimizer, trainable=own)
        steps[name] = rc.compile_step(step, rc.infer_shardings(state, mesh))
        states[name] = state

    def give(to, model, name):
        copies = jax.tree.map(lambda x: jnp.copy(x) if eqx.is_array(x) else x, model)
        return eqx.tree_at(lambda s: s.model[name], to, copies)

    rng = np.random.default_rng(0)
    for _ in range(150):
        real = rng.normal([2.0, -1.0], 0.1, size=(32, 2)).astype(np.float32)
        states["discriminator"], _ = steps["discriminator"](states["discriminator"], real)
        states["generator"] = give(
            states["generator"], states["discriminator"].model["discriminator"], "discriminator"
        )
        states["generator"], metrics = steps["generator"](states["generator"], real)
        states["discriminator"] = give(
            states["discriminator"], states["generator"].model["generator"], "generator"
        )
        jax.block_until_ready(metrics)
    fake = jax.vmap(states["generator"].model["generator"])(jax.random.normal(KEY, (500, 4)))
    assert np.linalg.norm(np.mean(fake, 0) - np.array([2.0, -1.0], np.float32)) < 1.0
    assert all(np.isfinite(x).all() for x in arrays(states))


class Depthwise(eqx.Module):
    convolution: eqx.nn.Conv2d

    def __init__(self, key):
        self.convolution = eqx.nn.Conv2d(8, 8, 3, groups=8, key=key)

    def __call__(self, x):
        return self.convolution(x)


def grouped_gradient(mesh):
    optimizer = optax.sgd(1.0)
    loss = lambda model, batch, key: jnp.mean(jax.vmap(model)(batch) ** 2)
    state = rc.init_state(Depthwise, optimizer, key=KEY)
    step = ft.partial(rc.train_step, loss_fn=loss, optimizer=optimizer)
    step = rc.compile_step(step, rc.infer_shardings(state, mesh))
    batch = np.random.default_rng(0).normal(size=(16, 8, 6, 6)).astype(np.float32)
    return float(step(state, batch)[1]["grad_norm"])


@pytest.mark.parametrize("sizes", [{}, {"fsdp": 4}, {"data": 1, "model": 8}])
def test_gradients_of_grouped_convolutions_are_right(sizes):
    expected = grouped_gradient(rc.make_mesh(devices=jax.devices()[:1]))
    np.testing.assert_allclose(grouped_gradient(rc.make_mesh(**sizes)), expected, rtol=1e-5)


@pytest.mark.parametrize("sizes", [{"model": 4}, {"fsdp": 2, "model": 2}])
def test_or_refused_where_the_compiler_gets_them_wrong(sizes, monkeypatch):
    with pytest.raises(ValueError, match="8 groups comes out wrong on a mesh of data="):
        grouped_gradient(rc.make_mesh(**sizes))
    # Fails when the compiler is mended, and this protection can go.
    monkeypatch.setattr("redcoast._compile.refuse_wrong_gradients", lambda *_: None)
    expected = grouped_gradient(rc.make_mesh(devices=jax.devices()[:1]))
    assert not np.isclose(grouped_gradient(rc.make_mesh(**sizes)), expected, rtol=0.1)
