"""The gradients of an unrolled layer on GPUs, which are complete before any of them is used."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redcoast.core._control_flow import inner_jaxprs
from redcoast.core._target import Target, compiling_for
from redcoast.models._scan_layers import scan_layers

LAYERS = 3
ADAPTER = np.linspace(0, 1, LAYERS * 16, dtype=np.float32).reshape(LAYERS, 4, 4)
FROZEN = np.linspace(1, 2, LAYERS * 16, dtype=np.float32).reshape(LAYERS, 4, 4)
X = np.ones((2, 4), np.float32)


@pytest.fixture(params=["gpu", "cpu"])
def platform(request):
    with compiling_for(Target(request.param, 9)):
        yield request.param


def loss(adapter, bias, frozen, *, remat, unroll):
    def layer_fn(x, cache, layer, index, key):
        adapter, bias, frozen, number = layer
        x = jnp.tanh(x @ adapter) @ frozen + bias[None]
        return x + (number + index).astype(jnp.float32), cache

    layers = (adapter, bias, frozen, jnp.arange(LAYERS))
    return jnp.sum(scan_layers(layer_fn, jnp.asarray(X), layers, remat=remat, unroll=unroll)[0])


def barriers(jaxpr):
    """The shapes of the arrays in the barriers of a program, with those of inner programs."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "optimization_barrier":
            found.append(sorted(x.aval.shape for x in equation.outvars))
        for inner in inner_jaxprs(equation):
            found += barriers(inner)
    return found


@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_barrier_has_the_gradients_of_one_layer(platform, remat):
    """Arrays that are not trained are in none: their gradients would be computed. A loop over
    layers, and other devices, need none."""
    bias = np.ones((LAYERS, 4), np.float32)

    def gradient(unroll):
        run = lambda adapter, bias: loss(adapter, bias, FROZEN, remat=remat, unroll=unroll)
        return jax.grad(run, argnums=(0, 1))

    of_gradients = [(4,), (4, 4)]
    unrolled = barriers(jax.make_jaxpr(gradient(LAYERS))(ADAPTER, bias).jaxpr)
    assert (of_gradients in unrolled) == (platform == "gpu")
    in_a_loop = barriers(jax.make_jaxpr(gradient(1))(ADAPTER, bias).jaxpr)
    assert of_gradients not in in_a_loop


def test_gradients_have_the_same_bits_and_can_be_differentiated():
    with compiling_for(Target("gpu", 9)):
        check_derivatives()


def check_derivatives():
    bias = np.ones((LAYERS, 4), np.float32)
    run = lambda adapter, unroll: loss(adapter, bias, FROZEN, remat="none", unroll=unroll)
    gradient = jax.jit(jax.grad(run), static_argnums=1)
    np.testing.assert_array_equal(gradient(ADAPTER, LAYERS), gradient(ADAPTER, 1))
    forward = jax.jvp(lambda adapter: run(adapter, LAYERS), (ADAPTER,), (ADAPTER,))[1]
    np.testing.assert_allclose(forward, jnp.sum(gradient(ADAPTER, 1) * ADAPTER), rtol=1e-5)
    second = jax.grad(lambda adapter: jnp.sum(jax.grad(run)(adapter, LAYERS) ** 2))(ADAPTER)
    assert np.isfinite(second).all()
