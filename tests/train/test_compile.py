import dataclasses
import functools as ft
from typing import Any
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from problem import arrays, batch_of, loss_fn, make_model

import redcoast as rc
from redcoast.distributed._emulation import Overdue, call_watched

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
        state, actual = step(state, batch)
        np.testing.assert_allclose(actual["loss"], metrics["loss"], rtol=1e-5)
        for x, sharding in zip(
            jax.tree.leaves(eqx.filter(state, eqx.is_array)),
            jax.tree.leaves(shardings),
            strict=True,
        ):
            assert x.sharding == sharding
    assert len(traces) == 1
    step(state, batch_of(8))
    assert len(traces) == 2


@pytest.mark.thorough
def test_state_is_donated():
    state, shardings = start(rc.make_mesh())
    step = rc.compile_step(STEP, shardings)
    state, _ = step(state, batch_of(16))
    new, _ = step(state, batch_of(16))
    assert state.model.layers[0].weight.is_deleted()
    assert not new.model.layers[0].weight.is_deleted()


@pytest.mark.thorough
def test_returns_before_the_device_has_finished():
    def slow(state, x):
        y = jax.lax.fori_loop(0, 200, lambda _, y: jnp.tanh(y @ y) + 0.1, x)
        return state + 1.0, jnp.sum(y)  # takes seconds

    mesh = rc.make_mesh(devices=jax.devices()[:1])
    state = jnp.zeros(())
    step = rc.compile_step(slow, rc.infer_shardings(state, mesh))
    x = np.full((400, 400), 0.01, np.float32)
    state, total = step(state, x)
    jax.block_until_ready(total)
    # Several calls, in case the system suspends this thread until a result is ready.
    early = False
    for _ in range(5):
        state, total = step(state, x)
        early = early or not total.is_ready()
        jax.block_until_ready(total)
        if early:
            break
    assert early


def towards(state, batch, target, key=KEY):
    """A training step whose loss compares the model with a target model."""

    def loss(model, batch, key):
        there = jax.vmap(target["net"])(batch["x"])
        return jnp.mean((jax.vmap(model)(batch["x"]) - there) ** 2 + jax.random.uniform(key))

    draws = jax.random.wrap_key_data(key) if key.dtype == jnp.uint32 else key
    state = eqx.tree_at(lambda s: s.key, state, jax.random.fold_in(draws, 0))
    return rc.train_step(state, batch, loss_fn=loss, optimizer=OPTIMIZER)


def same_memory(x):
    return jax.device_put(x, x.sharding) if eqx.is_array(x) else x


# Ways in which arrays of the state can also be arguments. If a donated buffer is passed again, XLA
# raises an error or, on several devices, aborts the process.
ALIASES = {
    "as they are": lambda state: (state.model, state.key),
    "in other arrays": lambda state: (
        jax.tree.map(same_memory, state.model),
        jax.random.key_data(state.key),
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("how", ALIASES)
def test_arguments_may_share_arrays_with_the_state(how, devices):
    """A target network that is initially the model, and is updated every few steps."""
    mesh = rc.make_mesh(devices=jax.devices()[:devices])
    create = ft.partial(rc.init_state, lambda key: make_model(), OPTIMIZER, key=KEY)
    shardings = rc.infer_shardings(eqx.filter_eval_shape(create), mesh)
    step, expected = rc.compile_step(towards, shardings), eqx.filter_jit(towards)
    state, reference = create(shardings=shardings), create()
    for _ in range(2):
        (target, key), kept, drawn = ALIASES[how](state), reference.model, reference.key
        for _ in range(2):
            state, actual = step(state, batch_of(16), {"net": target}, key)
            reference, metrics = expected(reference, batch_of(16), {"net": kept}, drawn)
            np.testing.assert_allclose(actual["loss"], metrics["loss"], rtol=1e-5)
        for x, y in zip(arrays(target), arrays(kept), strict=True):  # it can still be read
            np.testing.assert_allclose(x, y, rtol=1e-5)


def test_an_array_twice_in_the_state_is_donated_once():
    """The same array, another array of the same buffer, and an array that the step closes over."""
    mesh = rc.make_mesh()
    x = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, P()))
    key = jax.random.key(1)
    state = {"x": x, "same": x, "other": same_memory(x), "key": key, "again": key}
    shardings = rc.infer_shardings(state, mesh)
    step = rc.compile_step(lambda s: (s, s["x"] + s["same"] + s["other"] + x), shardings)
    for _ in range(2):
        state, total = step(state)
        np.testing.assert_array_equal(total, 4 * np.arange(8.0))
    np.testing.assert_array_equal(x, np.arange(8.0))
    assert jax.random.key_data(state["again"]).shape == (2,)


@pytest.mark.thorough
def test_arrays_of_the_closure_stay_valid_for_each_new_state():
    """Several runs with one compiled step start from the arrays that it closes over."""
    teacher = make_model()
    start_again = lambda: rc.init_state(lambda key: teacher, OPTIMIZER, key=KEY)

    def loss_of(model, batch, key):
        follow = jnp.mean((jax.vmap(model)(batch["x"]) - jax.vmap(teacher)(batch["x"])) ** 2)
        return loss_fn(model, batch, key)[0] + follow

    step = ft.partial(rc.train_step, loss_fn=loss_of, optimizer=OPTIMIZER)
    step = rc.compile_step(
        step, rc.infer_shardings(start_again(), rc.make_mesh(data=1, devices=jax.devices()[:1]))
    )
    losses = [float(step(start_again(), batch_of(16))[1]["loss"]) for _ in range(3)]
    assert len(set(losses)) == 1


@pytest.mark.thorough
def test_donated_arrays_are_named():
    """Donated arguments and states; JAX's own error reports only their shape."""
    state, shardings = start(rc.make_mesh())
    step = rc.compile_step(STEP, shardings)
    before = state
    state, _ = step(state, batch_of(16))
    with pytest.raises(ValueError, match="state that the step .*at model/layers/0/weight can no"):
        step(before, batch_of(16))
    follow = rc.compile_step(towards, shardings)
    with pytest.raises(ValueError, match="(?s)Argument 2 .*at net/layers/0/weight .*jnp.copy"):
        follow(state, batch_of(16), {"net": before.model})
    follow(state, batch_of(16), {"net": make_model()})  # a state that has not been donated


@ft.partial(jax.tree_util.register_dataclass, data_fields=["model"], meta_fields=[])
@dataclasses.dataclass
class Mutable:
    model: Any


class Frozen(eqx.Module):
    model: Any


@pytest.mark.parametrize("kind", [Mutable, Frozen])
def test_a_state_changed_in_place_is_partitioned_again(kind):
    """The partition of the last state is cached only if the state is immutable."""
    mesh = rc.make_mesh()
    state = kind({"bias": jnp.zeros(8), "n": jnp.zeros(())})
    step = rc.compile_step(
        lambda s: (kind({**s.model, "n": s.model["n"] + 1}), jnp.sum(s.model["bias"])),
        rc.infer_shardings(state, mesh),
    )
    state, _ = step(state)
    state.model["bias"] = jnp.ones(8)
    state, total = step(state)
    assert (float(total), float(state.model["n"])) == (8.0, 2.0)


@pytest.mark.thorough
@pytest.mark.parametrize("devices", [1, 8])
def test_numpy_arguments_may_be_overwritten_at_once(devices):
    """The next batch may be written to the same memory while the step is running."""

    def slow(state, x):
        y = jax.lax.fori_loop(0, 80, lambda _, y: jnp.tanh(y @ y) + 0.1, jnp.full((300, 300), 0.1))
        return state + 0 * y[0, 0], jnp.sum(x) + 0 * y[0, 0]

    mesh = rc.make_mesh(devices=jax.devices()[:devices])
    state = jnp.zeros(())
    step = rc.compile_step(slow, rc.infer_shardings(state, mesh))
    # JAX uses the memory of aligned NumPy arrays without a copy.
    memory = np.zeros(64 * 64 * 4 + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    x = memory[begin : begin + 64 * 64 * 4].view(np.float32).reshape(64, 64)
    x[:] = 1.0
    state, _ = step(state, x)
    state, total = step(state, x)
    x[:] = 5.0
    assert float(total) == 64 * 64


def test_lower_places_arguments_as_a_call_does():
    """NumPy and abstract arrays are split; JAX arrays and those with a sharding keep it."""
    mesh = rc.make_mesh(data=4, model=2)
    state, shardings = start(mesh)
    step = rc.compile_step(lambda s, *args: (s, [jnp.sum(x) for x in args]), shardings)
    split, rows = P(("data", "fsdp")), np.ones((16, 3))
    abstract = jax.ShapeDtypeStruct((16, 3), jnp.float32)
    own = jax.NamedSharding(mesh, P(None, None))
    placed = jax.device_put(rows, jax.NamedSharding(mesh, P("model")))
    inputs = (rows, abstract, jax.ShapeDtypeStruct((16, 3), jnp.float32, sharding=own), placed)
    ragged, scalar = np.ones((3,), np.float32), np.float32(1)
    lowered = step.lower(state, *inputs, ragged, scalar, 2.0)
    actual = [x.spec for x in jax.tree.leaves(lowered.compile().input_shardings)[-7:]]
    assert actual[:4] == [split, split, own.spec, P("model")]
    assert all(not any(spec) for spec in actual[4:])
    assert not any(x.is_deleted() for x in jax.tree.leaves(eqx.filter(state, eqx.is_array)))
    assert [x.dtype for x in jax.tree.leaves(lowered.args_info[0])[-7:-5]] == [np.float32] * 2


def test_shardings_may_be_a_prefix_of_the_state():
    """As for `jax.jit`; bare specs refer to the given mesh."""
    mesh = rc.make_mesh(fsdp=8)
    state = {"net": {"a": jnp.ones((8, 2)), "b": jnp.ones(8)}, "n": jnp.zeros((), jnp.int32)}
    for rows in (jax.NamedSharding(mesh, P("fsdp")), P("fsdp")):
        step = rc.compile_step(lambda s: (s, {}), {"net": rows, "n": P()}, mesh=mesh)
        after, _ = step(jax.tree.map(jnp.copy, state))
        assert [x.sharding.spec for x in jax.tree.leaves(after["net"])] == [P("fsdp")] * 2
    replicated = jax.NamedSharding(mesh, P())
    after, _ = rc.compile_step(lambda s: (s, {}), replicated)(state)
    assert all(x.sharding == replicated for x in jax.tree.leaves(after))


@pytest.mark.parametrize(
    ("shardings", "error", "words"),
    [
        ({"a": P()}, ValueError, "no sharding for b/x, b/y.*infer_shardings"),
        (
            {"a": P(), "c": P(), "d": P()},
            ValueError,
            "no sharding for b/x, b/y. The state has nothing at c, d",
        ),
        ({"a": P("data"), "b": P()}, ValueError, r"at a, of shape \(3,\), cannot be .*'data'"),
        ({"a": P(None, "data"), "b": P()}, ValueError, r"at a, of shape \(3,\), cannot be"),
        ({"a": "data", "b": P()}, TypeError, "has 'data' at a.*NamedSharding"),
        ({"a": None}, ValueError, "has no leaves"),
    ],
)
def test_shardings_that_do_not_match_are_named(shardings, error, words):
    mesh = rc.make_mesh()
    state = {"a": jnp.zeros(3), "b": {"x": jnp.zeros(8), "y": jnp.zeros(8)}}
    with pytest.raises(error, match=words):
        rc.compile_step(lambda s: (s, {}), shardings, mesh=mesh)(state)


def test_shardings_of_a_different_tree_raise():
    state = {"x": jnp.zeros((8, 4)), "y": jnp.zeros(8)}
    shardings = rc.infer_shardings({"a": state["x"], "b": state["y"]}, rc.make_mesh())
    with pytest.raises(ValueError, match="no sharding for x, y. The state has nothing at a, b"):
        rc.compile_step(lambda s: (s, {}), shardings)(state)


def test_shardings_without_a_mesh_or_devices_raise():
    with pytest.raises(ValueError, match="are `PartitionSpec`s. Pass the `mesh`"):
        rc.compile_step(lambda s: (s, {}), P())
    abstract = jax.sharding.AbstractMesh((8, 1, 1), ("data", "fsdp", "model"))
    with pytest.raises(TypeError, match="which has no devices"):
        rc.compile_step(lambda s: (s, {}), jax.NamedSharding(abstract, P()))


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (lambda s: s, "only the state. It must return `.state, aux.`"),
        (lambda s: None, "returned None. It must"),
        (lambda s: (s, 1.0, {}), "a tuple of length 3. It must"),
        (lambda s: jnp.ones(3), "returned a .*Tracer. It must"),
    ],
)
def test_a_step_that_does_not_return_state_and_aux(out, words):
    for state in ({"a": jnp.zeros(3)}, (jnp.zeros(3), jnp.zeros(()))):
        shardings = rc.infer_shardings(state, rc.make_mesh())
        with pytest.raises(ValueError, match=words):
            rc.compile_step(out, shardings)(state)


def test_aux_may_contain_anything():
    """Arrays, numbers and other objects; the latter have their values from tracing."""
    state = {"a": jnp.zeros(3)}
    unhashable = {1, 2}

    def step(state):
        return state, {"td": jnp.ones(16), "phase": "critic", "f": np.sin, "n": 3, "s": unhashable}

    compiled = rc.compile_step(step, rc.infer_shardings(state, rc.make_mesh()))
    for _ in range(2):
        state, aux = compiled(state)
        assert (aux["phase"], aux["f"], aux["s"], int(aux["n"])) == ("critic", np.sin, {1, 2}, 3)
        assert aux["td"].shape == (16,)


def test_an_unhashable_argument_is_named():
    state = {"a": jnp.zeros(3)}
    step = rc.compile_step(lambda s, x: (s, {}), rc.infer_shardings(state, rc.make_mesh()))
    with pytest.raises(TypeError, match="a set at 0/names, which is neither an array nor hashable"):
        step(state, {"names": {"a"}})


@pytest.mark.thorough
def test_lower_takes_abstract_arguments():
    mesh = rc.make_mesh()
    abstract = eqx.filter_eval_shape(rc.init_state, lambda key: make_model(), OPTIMIZER, key=KEY)
    step = rc.compile_step(STEP, rc.infer_shardings(abstract, mesh))
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch_of(16))
    memory: Any = step.lower(abstract, batch).compile().memory_analysis()
    assert memory.alias_size_in_bytes > 0


@pytest.mark.thorough
def test_arguments_may_be_models_keys_and_numbers():
    mesh = rc.make_mesh()
    state = {"total": jnp.zeros(())}

    def step(state, model, key, scale, name):
        assert name == "sum"
        x = jax.random.normal(key, (16,))
        return {"total": state["total"] + scale * jnp.sum(model(x))}, None

    counted, traces = counting(step)
    compiled = rc.compile_step(counted, rc.infer_shardings(state, mesh))
    for scale in (1.0, 2.0, 3.0):  # other numbers do not compile again
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


def test_the_structure_of_the_state_must_not_change():
    mesh = rc.make_mesh()
    state = {"a": jnp.zeros(3), "b": jnp.zeros(3)}
    shardings = rc.infer_shardings(state, mesh)
    with pytest.raises(ValueError, match="structure"):
        rc.compile_step(lambda s: ({"a": s["a"]}, {}), shardings)(state)
    counter = {"a": jnp.zeros(3), "n": 0}
    step = rc.compile_step(
        lambda s: ({"a": s["a"], "n": s["n"] + 1}, {}), rc.infer_shardings(counter, mesh)
    )
    with pytest.raises(ValueError, match="given 0 at n and returned 1 at n.*must be JAX arrays"):
        step(counter)
    with pytest.raises(ValueError, match="The state has nothing at b"):
        rc.compile_step(lambda s: (s, {}), shardings)({"a": jnp.zeros(3)})
    with pytest.raises(ValueError, match="has no leaves"):
        rc.compile_step(lambda s: (s, {}), {"a": None})


@pytest.mark.thorough
def test_an_unused_state_is_freed():
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
def test_a_custom_training_loop_with_two_optimizers(sizes):
    """A GAN that learns the mean of a cloud of points, without `fit`."""
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


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [{}, {"fsdp": 4}, {"data": 1, "model": 8}])
def test_gradients_of_grouped_convolutions(sizes):
    expected = grouped_gradient(rc.make_mesh(devices=jax.devices()[:1]))
    np.testing.assert_allclose(grouped_gradient(rc.make_mesh(**sizes)), expected, rtol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [{"model": 4}, {"fsdp": 2, "model": 2}])
def test_wrong_gradients_of_grouped_convolutions_raise(sizes, monkeypatch):
    with pytest.raises(ValueError, match="8 groups would be wrong on a mesh of data="):
        grouped_gradient(rc.make_mesh(**sizes))
    # Fails when the compiler has been fixed; the check can then be removed.
    monkeypatch.setattr("redcoast.train._compile.refuse_wrong_gradients", lambda *_: None)
    expected = grouped_gradient(rc.make_mesh(devices=jax.devices()[:1]))
    assert not np.isclose(grouped_gradient(rc.make_mesh(**sizes)), expected, rtol=0.1)


def test_emulated_devices_are_watched_by_a_result_that_says_when_it_is_ready():
    """A typed key does not, and ended the thread that watches."""
    overdue = mock.create_autospec(Overdue, instance=True)
    loss = jnp.ones(())
    call_watched(overdue, lambda: (loss, jax.random.key(0)))
    overdue.end.assert_called_once_with(loss)
