"""What a run begins with: a function that makes a model, a model that can be called, or a state."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify

import redcoast as rc

KEY = jax.random.key(3)
BATCH = np.ones((8, 4), np.float32)
OPTIMIZER = optax.sgd(0.1)


class Callable(eqx.Module):
    """A model that can be called with an array, and so with a key."""

    weight: jax.Array

    def __call__(self, x):
        return x @ self.weight


def loss_fn(model, batch, key):
    return jnp.mean(model(batch) ** 2)


def model():
    return Callable(jnp.arange(16.0).reshape(4, 4))


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", [rc.make_mesh(), rc.make_mesh(devices=jax.devices()[:1])])
def test_a_loop_begins_with_a_function_a_model_or_a_state(mesh):
    begin = lambda first, **options: rc.prepare(
        first, OPTIMIZER, loss_fn, BATCH, mesh=mesh, **options
    )
    mine = model()
    first = begin(lambda key: model(), key=KEY)
    second = begin(mine, key=KEY)
    third = begin(rc.init_state(mine, OPTIMIZER, key=KEY))
    for state, step, _ in (first, second, third):
        state, metrics = step(state, BATCH)
        np.testing.assert_allclose(metrics["loss"], loss_fn(mine, BATCH, None), rtol=1e-6)
    np.testing.assert_array_equal(mine.weight, model().weight)  # it was copied, not donated
    with pytest.raises(ValueError, match="`prepare` was given has its own key"):
        begin(rc.init_state(mine, OPTIMIZER, key=KEY), key=KEY)


class MadeOfKey(eqx.Module):
    """A model whose class is a function of a key."""

    weight: jax.Array

    def __init__(self, key):
        self.weight = jax.random.normal(key, (4, 4))

    def __call__(self, x):
        return x @ self.weight


@pytest.mark.parametrize("init_fn", [MadeOfKey, jax.jit(MadeOfKey), eqx.filter_jit(MadeOfKey)])
def test_a_class_and_a_jitted_function_create_models(init_fn):
    state, _, _ = rc.prepare(init_fn, OPTIMIZER, loss_fn, BATCH, key=KEY)
    same = rc.init_state(lambda key: MadeOfKey(key), OPTIMIZER, key=KEY)
    np.testing.assert_allclose(state.model.weight, same.model.weight, rtol=1e-6)


def test_a_jitted_model_is_still_a_model():
    state, _, _ = rc.prepare(eqx.filter_jit(model()), OPTIMIZER, loss_fn, BATCH, key=KEY)
    assert [x.shape for x in jax.tree.leaves(eqx.filter(state.model, eqx.is_array))] == [(4, 4)]


def test_a_state_of_a_model_is_created_sharded():
    mine, mesh = model(), rc.make_mesh(fsdp=4)
    create = lambda **options: rc.init_state(mine, OPTIMIZER, key=KEY, **options)
    abstract = eqx.filter_eval_shape(create)
    shardings = rc.infer_shardings(abstract, mesh, overrides=[("weight", jax.P("fsdp"))])
    state = create(shardings=shardings)
    assert state.model.weight.sharding.spec == jax.P("fsdp")
    np.testing.assert_array_equal(state.model.weight, mine.weight)
    with pytest.raises(TypeError, match="`init_fn` is 3. It must be a function"):
        rc.init_state(3, OPTIMIZER, key=KEY)


@pytest.mark.thorough
def test_a_model_or_its_shapes_are_tried_without_the_hardware():
    run = lambda model: rc.dry_run(model, loss_fn, BATCH, OPTIMIZER, target="cpu:2")
    shapes = jax.eval_shape(model)
    assert run(model()).fits
    assert run(shapes).memory == run(lambda key: model()).memory


def test_leaves_of_a_batch_may_be_numbers_and_functions():
    def scaled(model, batch, key):
        return batch["scale"] * loss_fn(model, batch["apply"](batch["x"]), key)

    batch = {"x": BATCH, "scale": 3, "apply": jnp.sin, "none": None}
    state, step, _ = rc.prepare(model(), OPTIMIZER, scaled, batch, mesh=rc.make_mesh())
    _, metrics = step(state, batch)
    expected = scaled(model(), batch, None)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-6)


def test_transfers_of_public_functions_are_not_those_that_a_guard_forbids():
    x = jax.device_put(BATCH)
    mine = model()
    abstract = eqx.filter_eval_shape(rc.init_state, mine, OPTIMIZER, key=KEY)
    shardings = rc.infer_shardings(abstract, rc.make_mesh())
    with jax.transfer_guard("disallow"):
        rc.init_state(mine, OPTIMIZER, key=KEY)
        rc.init_state(lambda key: model(), OPTIMIZER, key=KEY, shardings=shardings)
        rc.predict(mine, x, predict_fn=lambda model, batch, key: model(batch))


def test_a_batch_on_other_devices_is_named():
    mesh = rc.make_mesh(devices=jax.devices()[:2])
    state, step, _ = rc.prepare(model(), OPTIMIZER, loss_fn, BATCH, mesh=mesh)
    with pytest.raises(ValueError, match=r"Argument 1 .*on the devices \[7\].*for \[0, 1\]"):
        step(state, jax.device_put(BATCH, jax.devices()[7]))
    step(state, BATCH)  # the state has not been donated


def test_a_key_without_a_type_may_be_of_the_implementation_that_is_set():
    """JAX keeps the shape of a key that it has traced, also when the setting changes."""
    rc.init_state(model(), OPTIMIZER, key=jax.random.PRNGKey(0))
    with jax.default_prng_impl("rbg"):
        state = rc.init_state(model(), OPTIMIZER, key=jax.random.PRNGKey(0))
    assert state.key.shape == (4,)


def print_in_order(model, batch, key):
    jax.debug.print("{x}", x=batch[0, 0], ordered=True)
    return loss_fn(model, batch, key)


def check_values(model, batch, key):
    checkify.check(jnp.all(batch < 9), "too large")
    return loss_fn(model, batch, key)


@pytest.mark.parametrize(
    ("loss", "words"),
    [(print_in_order, "Leave out `ordered=True`"), (check_values, "use `x = equinox.error_if")],
)
def test_effects_that_a_step_cannot_have_are_explained(loss, words):
    """Only here: JAX says what is impossible, and not what would work."""
    state, step, _ = rc.prepare(model(), OPTIMIZER, loss, BATCH)
    with pytest.raises(ValueError, match="not") as error:
        step(state, BATCH)
    assert any(words in note for note in error.value.__notes__)


def test_errors_inside_of_an_optimizer_and_a_scan_are_explained():
    """By notes, since the errors are those of optax and of the loss."""
    with pytest.raises(ValueError, match="pytree structure") as error:
        rc.init_state(model(), optax.masked(OPTIMIZER, {"w": True}), key=KEY)
    assert "trainable leaves of the model: weight. Masks" in error.value.__notes__[0]
    state = rc.init_state(model(), OPTIMIZER, key=KEY)
    rows = lambda model, batch, key: jnp.mean(jax.vmap(model)(batch) ** 2)
    with pytest.raises(ValueError, match="at least 1") as error:
        rc.train_steps(state, BATCH, loss_fn=rows, optimizer=OPTIMIZER)
    assert any("each of 8 batches" in note for note in error.value.__notes__)
