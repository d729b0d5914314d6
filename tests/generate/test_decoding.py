"""A plan made for the loss constrains prediction and decoding, too."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoder_checks import make_tokens
from random_models import random_model

import redcoast as rc
from redcoast.models import Llama, LlamaConfig

CONFIG = LlamaConfig(vocab=64, width=32, layers=2, heads=4, kv_heads=2, hidden=64)
MODEL = random_model(Llama, CONFIG)
TOKENS = make_tokens(CONFIG, (8, 12))


def loss_fn(model, batch, key):
    log_probs = jax.nn.log_softmax(model(batch)[:, :-1])
    return -jnp.mean(jnp.take_along_axis(log_probs, batch[:, 1:, None], axis=-1))


def decode(model, prompt, key):
    """Greedy continuation of four tokens by a `while` loop that ends when all rows have ended."""
    length = prompt.shape[1]
    tokens = jnp.pad(prompt, ((0, 0), (0, 4)))

    def step(carry):
        at, tokens = carry
        logits = jax.lax.dynamic_index_in_dim(model(tokens), at - 1, axis=1, keepdims=False)
        chosen = jnp.argmax(logits, axis=-1).astype(tokens.dtype)
        return at + 1, jax.lax.dynamic_update_slice_in_dim(tokens, chosen[:, None], at, axis=1)

    more = lambda carry: (carry[0] < length + 4) & jnp.any(carry[1][:, -1] == 0)
    return jax.lax.while_loop(more, step, (jnp.asarray(length), tokens))[1]


@pytest.mark.parametrize("sizes", [{"model": 2}, {"fsdp": 2, "model": 2}])
@pytest.mark.few("sizes1")
def test_decoding_is_one_devices(sizes):
    plan = rc.plan_shardings(MODEL, rc.make_mesh(**sizes), fn=loss_fn, args=(TOKENS, None))
    expected = eqx.filter_jit(decode)(MODEL, TOKENS, None)
    arrays, static = eqx.partition(MODEL, eqx.is_array)
    arrays = jax.device_put(arrays, eqx.filter(plan.shardings, lambda x: x is not None))
    actual = eqx.filter_jit(plan.constrain(decode))(eqx.combine(arrays, static), TOKENS, None)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.thorough
def test_the_loop_of_decoding_is_constrained():
    plan = rc.plan_shardings(MODEL, rc.make_mesh(model=2), fn=loss_fn, args=(TOKENS, None))
    arrays, static = eqx.partition(MODEL, eqx.is_array)
    planned = plan.constrain(decode)
    program = lambda arrays, tokens: planned(eqx.combine(arrays, static), tokens, None)
    equations = jax.make_jaxpr(program)(arrays, TOKENS).eqns
    (loop,) = (e for e in equations if e.primitive.name == "while")
    loop = str(loop.params["body_jaxpr"])
    assert loop.count("sharding_constraint") > 4
    assert "'model'" in loop
