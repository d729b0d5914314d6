"""Loops over FSDP-sharded layers do not keep the gathered weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import redcoast as rc

LAYERS, WIDTH, HIDDEN = 8, 64, 256
WHOLE = LAYERS * 2 * WIDTH * HIDDEN * 4  # bytes of all weights


def weights():
    up, down = jax.random.split(jax.random.key(0))
    return {
        "up": jax.random.normal(up, (LAYERS, WIDTH, HIDDEN)) / 8,
        "down": jax.random.normal(down, (LAYERS, HIDDEN, WIDTH)) / 16,
    }


def layer(x, weights):
    return x + jnp.tanh(x @ weights["up"]) @ weights["down"], None


def cast(x, weights):
    """As a model in mixed precision, which scales and casts a layer where it is used."""
    up, down = ((0.5 * w).astype(jnp.bfloat16) for w in (weights["up"], weights["down"]))
    hidden = jnp.tanh(x.astype(jnp.bfloat16) @ up)
    return x + (hidden @ down).astype(jnp.float32), None


def normed(x, weights):
    """A norm is computed again by itself, as those of redcoast's models are."""

    @jax.checkpoint
    def norm(x):
        return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)

    hidden = jnp.tanh(norm(x) @ weights["up"])
    return x + hidden @ weights["down"], None


def by_einsum(x, weights):
    hidden = jnp.tanh(jnp.einsum("bw,wh->bh", x, weights["up"]))
    return x + jnp.einsum("bh,hw->bw", hidden, weights["down"]), None


def loss_of(layer):
    return lambda model, x, key: jnp.mean(jax.lax.scan(layer, x, model)[0] ** 2)


def in_groups(model, x, key):
    groups = jax.tree.map(lambda w: w.reshape(2, -1, *w.shape[1:]), model)
    of_group = lambda x, group: jax.lax.scan(layer, x, group)
    return jnp.mean(jax.lax.scan(of_group, x, groups)[0] ** 2)


def printing(x, weights):
    jax.debug.callback(SEEN.append, x[0, 0])
    return layer(x, weights)


def closing_over_weights(x, weights):
    """An inner loop applies one layer twice."""
    return jax.lax.scan(lambda x, _: layer(x, weights), x, None, length=2)[0], None


def scaled(model, x, key):
    """The stacks change before the loop."""
    halved = jax.tree.map(lambda w: 0.5 * w, model)
    return jnp.mean(jax.lax.scan(layer, x, halved)[0] ** 2)


SEEN: list[jax.Array] = []
CASES = {
    "layer": (loss_of(layer), 1e-6, 0.5),
    "einsum": (loss_of(by_einsum), 1e-6, 0.5),
    "cast": (loss_of(cast), 4e-3, 0.5),
    "normed": (loss_of(normed), 1e-6, 0.5),
    "groups": (in_groups, 1e-6, 0.5),
    "print": (loss_of(printing), 1e-6, 0.5),
    "scaled": (scaled, 1e-6, 0.5),
    # Copies of a layer for each shard of the batch.
    "closed over": (loss_of(closing_over_weights), 1e-5, 0.75),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_gathered_weights_are_not_kept_for_the_backward_pass(name):
    loss_fn, atol, most = CASES[name]
    mesh, model = rc.make_mesh(fsdp=8), weights()
    x = jax.random.normal(jax.random.key(1), (16, WIDTH))
    plan = rc.plan_shardings(model, mesh, fn=loss_fn, args=(x, None))
    differentiate = jax.jit(
        jax.grad(plan.constrain(loss_fn)),
        in_shardings=(plan.shardings, None, None),
        out_shardings=plan.shardings,
    )
    placed = jax.device_put(model, plan.shardings)
    assert not any(w.is_fully_replicated for w in placed.values())
    compiled = differentiate.lower(placed, x, None).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < most * WHOLE
    expected = jax.jit(jax.grad(loss_fn))(model, x, None)
    for name, gradient in compiled(placed, x, None).items():
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-5, atol=atol)
