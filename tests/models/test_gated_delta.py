"""The gated delta rule in chunks, against the recurrence over tokens in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoder_checks import assert_close

from redcoast.models._gated_delta import gated_delta_rule, invert_unit_lower

run = jax.jit(gated_delta_rule, static_argnames="chunk")


def recurrence(q, k, v, decays, strengths, state):
    """One token after the other, each of which reads, moves and is read from the state."""
    each = v.shape[2] // k.shape[2]
    outputs = []
    for t in range(q.shape[1]):
        query, key = (np.repeat(y[:, t], each, axis=1) for y in (q, k))
        state = state * np.exp(decays[:, t])[..., None, None]
        read = np.einsum("bhn,bhnp->bhp", key, state)
        change = (v[:, t] - read) * strengths[:, t][..., None]
        state = state + key[..., None] * change[:, :, None]
        outputs.append(np.einsum("bhn,bhnp->bhp", query, state))
    return np.stack(outputs, axis=1), state


def make_inputs(length, *, alike):
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(2, length, 2, 5)) for _ in "qk")
    k = np.broadcast_to(k[:, :1], k.shape) if alike else k
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    v, state = rng.normal(size=(2, length, 4, 3)), rng.normal(size=(2, 4, 5, 3))
    decays = -rng.uniform(0, 0.01 if alike else 2.0, (2, length, 4))
    strengths = np.ones_like(decays) if alike else rng.uniform(0, 1, decays.shape)
    return q, k, v, decays, strengths, state


@pytest.mark.few("7-4-False")
@pytest.mark.parametrize(
    ("length", "chunk", "alike"),
    [(7, 4, False), (1, 64, False), (5, 64, False), (8, 8, False), (70, 64, True)],
)
def test_chunks_are_as_one_token_after_the_other(length, chunk, alike):
    """Whatever the chunks, from a state that is given, and for keys that are all alike."""
    inputs = make_inputs(length, alike=alike)
    outputs, state = run(*[jnp.asarray(x, jnp.float32) for x in inputs], chunk=chunk)
    expected, last = recurrence(*inputs)
    assert_close(outputs, expected, 1e-5)
    assert_close(state, last, 1e-5)


@pytest.mark.thorough
def test_gradients_are_those_of_the_recurrence():
    inputs = [jnp.asarray(x, jnp.float32) for x in make_inputs(7, alike=False)]

    def loss(chunk):
        return lambda *inputs: sum(jnp.sum(jnp.sin(y)) for y in run(*inputs, chunk=chunk))

    # With one token in a chunk there is nothing but the recurrence.
    pair = [jax.grad(loss(chunk), argnums=range(6))(*inputs) for chunk in (4, 1)]
    for actual, expected in zip(*pair, strict=True):
        assert_close(actual, expected, 1e-5)


@pytest.mark.thorough
def test_triangular_matrices_are_inverted_without_their_powers():
    """Powers of a matrix of ones have entries of 1e17, and sums of them no digit of the inverse."""
    x = jnp.ones((1, 64, 64))
    inverse = jax.jit(invert_unit_lower)(x)[0]
    expected = np.eye(64) - np.eye(64, k=-1)
    np.testing.assert_allclose(inverse, expected, atol=1e-5)
