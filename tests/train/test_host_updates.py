"""Updates of an optimizer's state in the memory of the host, one layer after another."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import SingleDeviceSharding

import redcoast as rc
from redcoast.core._jaxpr import iter_equations, struct_of

STACK = (2, 1024, 1024)  # 2**20 elements a layer, the least that are updated one layer at a time
OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    # Its steps depend on the norms of all layers of an array, so that it has no loop.
    "lamb": optax.lamb(1e-2),
}


def loss_fn(model, batch, key):
    x = batch
    for w in model["layers"]:
        x = jnp.tanh(x @ w)
    return jnp.mean((x @ model["head"]) ** 2)


def take_steps(state, batch, optimizer):
    @jax.jit
    def step(state, batch):
        return rc.train_step(state, batch, loss_fn=loss_fn, optimizer=optimizer)

    for _ in range(2):
        state, _ = step(state, batch)
    return state, jax.make_jaxpr(step)(state, batch)


def with_state_on_host(state):
    """The state with the arrays of its optimizer in the memory of the host, but for scalars."""
    host = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    arrays, scalars = eqx.partition(state.opt_state, lambda x: eqx.is_array(x) and x.ndim > 0)
    opt_state = eqx.combine(jax.device_put(arrays, host), scalars)
    return eqx.tree_at(lambda s: s.opt_state, state, opt_state)


@pytest.mark.thorough
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.few("clipped")
def test_a_state_on_the_host_is_updated_as_on_the_device_without_copies_of_whole_stacks(name):
    """No array of the program copies a whole stack to the device, unless the optimizer needs all
    layers at once."""
    optimizer = OPTIMIZERS[name]
    random = np.random.default_rng(0)
    layers = random.normal(0, 0.03, STACK).astype(np.float32)
    model = {"layers": jnp.asarray(layers), "head": jnp.ones((1024, 2), jnp.float32)}
    batch = jnp.asarray(random.normal(size=(4, 1024)), jnp.float32)
    state = rc.init_state(lambda key: model, optimizer, key=jax.random.key(0))
    moved = with_state_on_host(state)
    expected, _ = take_steps(state, batch, optimizer)
    updated, program = take_steps(moved, batch, optimizer)
    for x, y in zip(jax.tree.leaves(expected), jax.tree.leaves(updated), strict=True):
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    for x in jax.tree.leaves(updated.opt_state):
        assert x.sharding.memory_kind == ("pinned_host" if x.ndim else "device")
    copies = 0
    for equation in iter_equations(program):
        if equation.primitive.name == "device_put":
            copies += struct_of(equation.outvars[0]).shape == STACK
    assert (copies > 0) == (name == "lamb")


def test_an_optimizer_may_print_what_it_updates():
    """Equations without results, as of a print, are no part of the loop."""

    def update(updates, state, params=None):
        jax.debug.print("{}", updates["layers"])
        return updates, state

    printing = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    optimizer = optax.chain(printing, optax.adam(1e-2))
    model = {"layers": jnp.ones(STACK, jnp.float32), "head": jnp.ones((1024, 2), jnp.float32)}
    state = rc.init_state(model, optimizer, key=jax.random.key(0))
    step = lambda state, batch: rc.train_step(state, batch, loss_fn=loss_fn, optimizer=optimizer)
    loops = 0
    for equation in jax.make_jaxpr(step)(with_state_on_host(state), jnp.ones((4, 1024))).eqns:
        loops += equation.primitive.name == "scan"
    assert loops == 1
