"""Shampoo on stacked models, over the devices of a mesh."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from matrix_runs import assert_mesh_changes_no_result

import redcoast as rc
from redcoast.train import _side_statistics

Numbers = optax.contrib.MuonDimensionNumbers
WIDTH, HIDDEN, LAYERS = 6, 10, 3
OPTIONS = {"b1": 0.9, "b2": 0.8, "statistics": 0.7, "eps": 1e-3, "frequency": 2}
NUMBERS = {"up": Numbers(1, 2), "down": Numbers(1, 2), "norms": None}


def make(layers=LAYERS, hidden=HIDDEN):
    rng = np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / 3, jnp.float32)
    return {
        "up": draw(layers, WIDTH, hidden),
        "down": draw(layers, hidden, WIDTH),
        "norms": jnp.ones((layers, WIDTH)),
    }


class Published:
    """Shampoo of one matrix by Anil et al. (2020) with exponential averages, in float64."""

    def __init__(self, shape, *, sides):
        self.step, self.sides = 0, sides
        self.mean, self.squares = np.zeros(shape), np.zeros(shape)
        self.statistics = [np.zeros((n, n)) for n in shape]
        self.roots = [np.eye(n) for n in shape]

    def update(self, gradient):
        b1, b2, kept = OPTIONS["b1"], OPTIONS["b2"], OPTIONS["statistics"]
        gradient = np.float64(gradient)
        for side, product in enumerate((gradient @ gradient.T, gradient.T @ gradient)):
            self.statistics[side] = kept * self.statistics[side] + (1 - kept) * product
            if self.sides[side] and self.step % OPTIONS["frequency"] == 0:
                self.roots[side] = self.root(self.statistics[side])
        left, right = self.roots
        direction = left @ gradient @ right
        self.squares = b2 * self.squares + (1 - b2) * gradient**2
        self.step += 1
        grafted = gradient / (np.sqrt(self.squares / (1 - b2**self.step)) + 1e-8)
        direction *= np.linalg.norm(grafted) / np.linalg.norm(direction)
        self.mean = b1 * self.mean + (1 - b1) * direction
        return self.mean / (1 - b1**self.step)

    def root(self, statistics):
        values, vectors = np.linalg.eigh(statistics)
        values = np.maximum(values, 0) + OPTIONS["eps"] * values.max()
        return vectors @ np.diag(values ** (-0.5 / sum(self.sides))) @ vectors.T


@pytest.mark.thorough
@pytest.mark.parametrize("longest", [HIDDEN, WIDTH])
@jax.numpy_dtype_promotion("standard")  # optax needs it
def test_updates_are_those_of_the_published_algorithm(monkeypatch, longest):
    """With both sides, and with a longer side that has no statistics."""
    monkeypatch.setattr(_side_statistics, "_LARGEST", longest)
    params = make()
    optimizer = rc.shampoo(0.1, NUMBERS, others=optax.sgd(0.5), weight_decay=0.01, **OPTIONS)
    state = optimizer.init(params)
    shapes = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    ref = {}
    for name, shape in shapes.items():
        sides = tuple(size <= longest for size in shape)
        ref[name] = [Published(shape, sides=sides) for _ in range(LAYERS)]
    update = jax.jit(optimizer.update)
    rng = np.random.default_rng(2)
    for _ in range(5):
        grads = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), params)
        updates, state = update(grads, state, params)
        for name in shapes:
            for layer in range(LAYERS):
                expected = ref[name][layer].update(grads[name][layer])
                expected = -0.1 * (expected + 0.01 * np.float64(params[name][layer]))
                np.testing.assert_allclose(updates[name][layer], expected, atol=2e-5)
        np.testing.assert_allclose(updates["norms"], -0.5 * grads["norms"], rtol=1e-6)


@pytest.mark.thorough
@jax.numpy_dtype_promotion("standard")
def test_gradients_of_zeros_have_updates_of_zeros():
    params = make()
    optimizer = rc.shampoo(0.1, NUMBERS, others=optax.sgd(0.5))
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, state = optimizer.update(zeros, optimizer.init(params), params)
    for x in jax.tree.leaves(updates):
        np.testing.assert_array_equal(x, np.zeros(x.shape))
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(state))


@pytest.mark.thorough
@pytest.mark.parametrize("layers", [8, pytest.param(3, marks=pytest.mark.thorough)])
def test_a_run_on_a_mesh_is_that_on_one_device(layers):
    """Eight layers are divided as they are stored; three are padded."""
    params = make(layers)
    optimizer = rc.shampoo(0.02, NUMBERS, others=optax.sgd(0.02), **OPTIONS)
    assert_mesh_changes_no_result(optimizer, params, steps=2)
