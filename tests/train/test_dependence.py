"""A loss that does not depend on its argument `model` raises an error."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problem import arrays, batch_of, collate_fn, loss_fn, make_examples, make_model, quiet

import redcoast as rc

MODEL = make_model()
OPTIMIZER = optax.sgd(0.1)
ONE = {"devices": jax.devices()[:1]}
WORDS = "does not depend on any trainable leaf of its argument"


def of_another(model, batch, key):
    """A common mistake: `MODEL` is a global variable."""
    return loss_fn(MODEL, batch, key)


def constant(model, batch, key):
    return jnp.float32(1)


def of_the_batch(model, batch, key):
    return jnp.mean(batch["x"]) + model.layers[0].weight.shape[0]


def stopped(model, batch, key):
    stop = lambda x: jax.lax.stop_gradient(x) if eqx.is_array(x) else x
    return loss_fn(jax.tree.map(stop, model), batch, key)


def of_choices(model, batch, key):
    return jnp.mean(jnp.argmax(jax.vmap(model)(batch["x"]), -1).astype(jnp.float32))


INDEPENDENT = [of_another, constant, of_the_batch, stopped, of_choices]


@pytest.mark.parametrize("loss", INDEPENDENT, ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_raises_when_it_is_traced(loss, accumulate):
    state = rc.init_state(lambda key: make_model(), OPTIMIZER, key=jax.random.key(0))
    step = ft.partial(rc.train_step, loss_fn=loss, optimizer=OPTIMIZER, accumulate=accumulate)
    with pytest.raises(ValueError, match=WORDS):
        eqx.filter_eval_shape(step, state, batch_of(4))


@pytest.mark.few("{'model': 2}")
@pytest.mark.parametrize("sizes", [ONE, {"model": 2}, {"fsdp": 8, "data": 1}], ids=str)
def test_a_run_raises_before_its_first_step(sizes):
    steps = []
    with pytest.raises(ValueError, match=WORDS):
        rc.fit(
            make_model(),
            OPTIMIZER,
            make_examples(32),
            collate_fn=collate_fn,
            loss_fn=of_another,
            batch_size=16,
            steps=2,
            mesh=rc.make_mesh(**sizes),
            log=quiet(lambda metrics, step: steps.append(step)),
        )
    assert steps == []


def test_a_loss_of_frozen_leaves_only_raises():
    """`trainable` selects the last layer, but the loss depends only on the first."""
    trainable = jax.tree.map(lambda _: False, make_model())
    trainable = eqx.tree_at(lambda m: m.layers[-1].weight, trainable, True)
    of_the_first = lambda model, batch, key: jnp.mean(model.layers[0].weight ** 2)
    options = {"optimizer": OPTIMIZER, "trainable": trainable}
    state = rc.init_state(lambda key: make_model(), OPTIMIZER, key=KEY, trainable=trainable)
    with pytest.raises(ValueError, match="check which leaves `trainable` selects"):
        eqx.filter_eval_shape(
            ft.partial(rc.train_step, loss_fn=of_the_first, **options), state, batch_of(4)
        )


KEY = jax.random.key(0)


def test_a_loss_may_depend_on_a_single_leaf():
    """The dependence goes through a scan, rematerialisation and an inner `jit`."""

    def of_one(model, batch, key):
        x = model.layers[0].bias

        @jax.jit
        def total(x):
            return jax.lax.scan(lambda sum, one: (sum + one, None), jnp.float32(0), x)[0]

        return jax.checkpoint(total)(x) + jax.lax.stop_gradient(loss_fn(model, batch, key)[0])

    state = rc.init_state(lambda key: make_model(), OPTIMIZER, key=KEY)
    step = eqx.filter_jit(ft.partial(rc.train_step, loss_fn=of_one, optimizer=OPTIMIZER))
    state, metrics = step(state, batch_of(4))
    assert metrics["grad_norm"] == pytest.approx(np.sqrt(32))


def test_updating_a_model_without_a_gradient_warns(caplog):
    """Updating running averages may be the purpose."""

    def averages(model, batch, key):
        moved = eqx.tree_at(lambda m: m.layers[0].bias, model, jnp.mean(batch["x"]) + jnp.zeros(32))
        return jnp.float32(0), {}, moved

    trainable = jax.tree.map(eqx.is_inexact_array, make_model())
    trainable = eqx.tree_at(lambda m: m.layers[0].bias, trainable, False)
    options = {"trainable": trainable, "optimizer": OPTIMIZER}
    state = rc.init_state(lambda key: make_model(), OPTIMIZER, key=KEY, trainable=trainable)
    step = eqx.filter_jit(ft.partial(rc.train_step, loss_fn=averages, **options))
    state, _ = step(state, batch_of(4))
    np.testing.assert_allclose(state.model.layers[0].bias, np.mean(batch_of(4)["x"]), rtol=1e-6)
    assert WORDS in caplog.text


@pytest.mark.thorough
def test_evaluation_and_outer_gradients_do_not_raise():
    """The check applies only to the gradient of the step itself."""
    actual = rc.evaluate(
        make_model(), make_examples(8), collate_fn=collate_fn, loss_fn=constant, batch_size=8
    )
    assert actual["loss"] == 1
    state = rc.init_state(lambda key: make_model(), OPTIMIZER, key=KEY)
    step = ft.partial(rc.train_step, loss_fn=loss_fn, optimizer=OPTIMIZER)

    @eqx.filter_jit
    @eqx.filter_grad
    def meta(model):
        after, _ = step(eqx.tree_at(lambda s: s.model, state, model), batch_of(4))
        return loss_fn(after.model, batch_of(4, seed=1), None)[0]

    assert all(np.abs(x).max() > 0 for x in arrays(meta(make_model())))
