"""What the models keep for the backward pass, and loops over their layers."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redcoast import models
from redcoast.core._target import Target, compiling_for
from redcoast.models._basic import ACTIVATIONS, activate_gated, layer_norm, rms_norm
from redcoast.models._einsum import product

X = jax.random.normal(jax.random.key(0), (4, 8, 16))
CONFIG = models.GPT2Config(vocab=11, width=8, layers=3, heads=2, hidden=16, positions=6)
TOKENS = jnp.arange(12).reshape(2, 6) % 11


def kept(fn, *args):
    """The numbers of elements of the arrays that the backward pass keeps, without constants."""
    _, pull = jax.vjp(fn, *args)
    return sorted(x.size for x in jax.tree.leaves(pull) if eqx.is_array(x) and x.size > 1)


@pytest.mark.parametrize("name", ["gelu", "gelu_new"])
def test_an_activation_keeps_its_input_only(name):
    assert kept(ACTIVATIONS[name], X) == [X.size]


def test_a_gated_activation_keeps_its_two_inputs():
    assert kept(lambda gate, up: activate_gated("silu", gate, up), X, X + 1) == [X.size] * 2


def test_norms_keep_their_inputs_only():
    scale = jnp.ones(16)
    assert kept(lambda x, s: rms_norm(x, s, 1e-6), X, scale) == [16, X.size]
    assert kept(lambda x, s, b: layer_norm(x, s, b, 1e-6), X, scale, scale) in (
        [16, X.size],
        [16, 16, X.size],
    )


@pytest.mark.thorough
@pytest.mark.parametrize(("platform", "has_barrier"), [("cpu", True), ("gpu", False)])
def test_only_programs_for_a_cpu_have_barriers(platform, has_barrier):
    """The compilers for GPUs and TPUs access fewer bytes without them."""
    model = models.GPT2(CONFIG, key=jax.random.key(0))
    arrays, static = eqx.partition(model, eqx.is_array)
    loss_fn = lambda arrays: jnp.sum(eqx.combine(arrays, static)(TOKENS) ** 2)
    with compiling_for(Target(platform, 0)):
        text = jax.jit(jax.grad(loss_fn)).lower(arrays).as_text()
    assert ("optimization_barrier" in text) == has_barrier


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("equation", "shape"),
    [("bsd,dh->bsh", (16, 12)), ("bsd,dhk->bshk", (16, 3, 4)), ("bsd,vd->bsv", (12, 16))],
)
def test_products_have_the_derivatives_of_einsum(equation, shape):
    """Forward and reverse mode, second derivatives, and under `vmap`."""
    weight = jax.random.normal(jax.random.key(1), shape)
    ours = lambda x, w: jnp.sum(jnp.tanh(product(equation, x, w)))
    exact = lambda x, w: jnp.sum(jnp.tanh(jnp.einsum(equation, x, w)))
    args, tangents = (X, weight), (jnp.cos(X), jnp.sin(weight))
    for actual, expected in zip(
        jax.grad(ours, (0, 1))(*args), jax.grad(exact, (0, 1))(*args), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
    pushed = [jax.jvp(fn, args, tangents)[1] for fn in (ours, exact)]
    np.testing.assert_allclose(*pushed, rtol=1e-4)
    twice = [jax.jvp(jax.grad(fn, 1), args, tangents)[1] for fn in (ours, exact)]
    np.testing.assert_allclose(*twice, rtol=1e-4, atol=1e-4)
    rows = [jax.vmap(jax.grad(fn, 1), (0, None))(X[:, None], weight) for fn in (ours, exact)]
    np.testing.assert_allclose(*rows, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("remat", ["none", "full"])
def test_unrolled_layers_have_the_same_losses_and_gradients(remat):
    """Also for a number that does not divide the layers, and for more than there are."""

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss_fn(model):
        return jnp.mean(model(TOKENS) ** 2)

    actual = []
    for unroll in (1, 2, 9) if remat == "none" else (1, 3):
        config = dataclasses.replace(CONFIG, unroll=unroll, remat=remat)
        loss, gradient = loss_fn(models.GPT2(config, key=jax.random.key(0)))
        actual.append([loss, *jax.tree.leaves(gradient)])
    for other in actual[1:]:
        for x, y in zip(actual[0], other, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)


@pytest.mark.thorough
def test_a_model_has_forward_mode_derivatives():
    model = models.GPT2(CONFIG, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    loss_fn = lambda params: jnp.mean(eqx.combine(params, static)(TOKENS) ** 2)
    direction = jax.tree.map(jnp.cos, params)
    _, forward = jax.jit(lambda *both: jax.jvp(loss_fn, *both))((params,), (direction,))
    gradient = jax.jit(jax.grad(loss_fn))(params)
    products = jax.tree.map(lambda g, d: jnp.sum(g * d), gradient, direction)
    np.testing.assert_allclose(forward, sum(jax.tree.leaves(products)), rtol=1e-4)


def test_unroll_is_checked():
    with pytest.raises(ValueError, match="`unroll` must be at least 1, but is 0"):
        dataclasses.replace(CONFIG, unroll=0)
