import functools as ft
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redcoast as rc
from redcoast.train._skip_nonfinite import guarded_update

PARAMS = {"w": jnp.linspace(-1.0, 1.0, 64 * 64).reshape(64, 64), "b": jnp.ones(64)}
GRADS = jax.tree.map(jnp.cos, PARAMS)


def resets(updates: Any, state: Any, params: Any = None) -> Any:
    return updates, jnp.zeros(())


RESETS = optax.GradientTransformation(lambda params: jnp.ones(()), resets)
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adamw": optax.adamw(1e-2),
    "injected": optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(1e-2, 0.0, 9)),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
    "every other": optax.MultiSteps(optax.adam(1e-2), 2),
    "adafactor": optax.adafactor(1e-2),
    "optimistic": optax.optimistic_gradient_descent(0.1),  # its new state contains a constant
    "resets": RESETS,
    "noisy": optax.noisy_sgd(0.1, key=jax.random.key(0)),
}


def select_afterwards(update, grads, opt_state, finite):
    updates, new = update(grads, opt_state)
    return updates, jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, opt_state)


def run(guard, optimizer, finite):
    @jax.jit
    def step(params, opt_state, finite):
        with jax.numpy_dtype_promotion("standard"):
            update = lambda g, s: optimizer.update(g, s, params)
            updates, opt_state = guard(update, GRADS, opt_state, finite)
            return optax.apply_updates(params, updates), opt_state

    params, opt_state = PARAMS, optimizer.init(PARAMS)
    for each in finite:
        new, opt_state = step(params, opt_state, jnp.asarray(each))
        params = new if each else params
    return params, opt_state


@pytest.mark.few("adamw")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_a_selection_afterwards(name):
    flags = (True, False, True, True)
    ours = run(guarded_update, OPTIMIZERS[name], flags)
    plain = run(select_afterwards, OPTIMIZERS[name], flags)
    assert jax.tree.structure(ours) == jax.tree.structure(plain)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        assert a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7)


@pytest.mark.thorough
def test_the_state_is_overwritten_in_place():
    optimizer = OPTIMIZERS["adamw"]

    def compiled(guard):
        def step(params, opt_state):
            grads = jax.tree.map(jnp.cos, params)
            finite = jnp.isfinite(optax.tree.norm(grads))
            update = lambda g, s: optimizer.update(g, s, params)
            with jax.numpy_dtype_promotion("standard"):
                updates, opt_state = guard(update, grads, opt_state, finite)
                after = optax.apply_updates(params, updates)
            return jax.tree.map(lambda n, o: jnp.where(finite, n, o), after, params), opt_state

        jitted = jax.jit(step, donate_argnums=(0, 1))
        return jitted.lower(PARAMS, optimizer.init(PARAMS)).compile()

    copies = lambda program: program.as_text().count("f32[64,64]{1,0} copy(")
    assert copies(compiled(guarded_update)) == 0
    assert copies(compiled(select_afterwards)) > 0  # otherwise the optimisation is no longer needed


def test_an_optimizer_state_that_changes_its_structure():
    update = lambda g, s: (g, {**s, "b": s["a"]})
    with pytest.raises(ValueError, match="but the new state also has b. Create all"):
        guarded_update(update, GRADS, {"a": jnp.ones(3)}, jnp.asarray(True))


def test_an_optimizer_that_adds_to_its_state_is_refused_on_a_mesh():
    """As `optax.monitor` does; the plan of the update failed with an error of `zip`."""
    adds = lambda updates, state, params=None: (updates, {"n": jnp.ones(())})
    optimizer = optax.GradientTransformation(lambda params: {}, adds)
    loss_fn = lambda model, batch, key: jnp.mean((batch @ model["w"]) ** 2)
    batch, mesh = np.ones((8, 8), np.float32), rc.make_mesh(data=8)
    model = {"w": jnp.ones((8, 8))}
    key = jax.random.key(0)
    state, step, _ = rc.prepare(model, optimizer, loss_fn, batch, mesh=mesh, key=key)
    with pytest.raises(ValueError, match="the new state also has n"):
        step(state, batch)


@pytest.mark.thorough
def test_gradients_of_unrolled_layers_are_stacked_once():
    """XLA would fuse their stack with the norm, and again with the update."""

    def layer(x, weight):
        return jnp.tanh(x @ weight) @ weight.T, None

    def loss_fn(model, batch, key):
        return jnp.mean(jax.lax.scan(layer, batch, model["layers"], unroll=3)[0] ** 2)

    optimizer = optax.adamw(1e-2)
    model = {"layers": jnp.linspace(-0.1, 0.1, 3 * 64 * 96).reshape(3, 64, 96)}
    state = rc.init_state(model, optimizer, key=jax.random.key(0))
    options = {"loss_fn": loss_fn, "optimizer": optimizer}
    step: Any = eqx.filter_jit(ft.partial(rc.train_step, **options))
    text = step.lower(state, jnp.ones((8, 64))).compile().compiled.as_text()
    assert text.count(" concatenate(") == 1
