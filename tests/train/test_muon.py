"""Muon on stacked models, over the devices of a mesh."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOptionalSubscript=false

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redcoast as rc

WIDTH, HIDDEN, LAYERS = 16, 24, 6
ROWS = np.random.default_rng(0).normal(size=(64, WIDTH)).astype(np.float32)


def make(key):
    up, down = jax.random.split(key)
    return {
        "up": jax.random.normal(up, (LAYERS, WIDTH, HIDDEN)) / 8,
        "down": jax.random.normal(down, (LAYERS, HIDDEN, WIDTH)) / 8,
        "norms": jnp.ones((LAYERS, WIDTH)),
        "head": jnp.eye(WIDTH),
    }


def loss_fn(params, x, key):
    def layer(x, p):
        return x + jax.nn.relu(x * p["norms"][None] @ p["up"]) @ p["down"], None

    layers = {name: params[name] for name in ("up", "down", "norms")}
    y, _ = jax.lax.scan(layer, x, layers)
    return jnp.mean((y @ params["head"] - x[:, ::-1]) ** 2)


def dimensions():
    return rc.matrix_dimensions(make(jax.random.key(0)), loss_fn, ROWS[:8], None)


def orthogonal(x):
    """The published Newton-Schulz iteration, in float64."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x.T if x.shape[0] > x.shape[1] else x
    x = x / np.linalg.norm(x)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@jax.numpy_dtype_promotion("standard")  # optax needs it
def test_updates_are_those_of_the_published_algorithm():
    params, momentum = make(jax.random.key(0)), None
    optimizer = rc.muon(0.1, dimensions(), others=optax.sgd(0.5), momentum=0.9, weight_decay=0.01)
    state = optimizer.init(params)
    for seed in range(3):
        grads = jax.tree.map(
            lambda x, seed=seed: jax.random.normal(jax.random.key(seed + x.size), x.shape), params
        )
        updates, state = optimizer.update(grads, state, params)
        gradient = np.float64(grads["down"])
        momentum = gradient if momentum is None else gradient + 0.9 * momentum
        for layer in range(LAYERS):
            nesterov = gradient[layer] + 0.9 * momentum[layer]
            decayed = orthogonal(nesterov).T + 0.01 * np.float64(params["down"][layer])
            np.testing.assert_allclose(updates["down"][layer], -0.1 * decayed, atol=2e-6)
        np.testing.assert_allclose(updates["norms"], -0.5 * grads["norms"], rtol=1e-6)


@pytest.mark.thorough
@jax.numpy_dtype_promotion("standard")
def test_the_first_update_is_that_of_optax():
    params, numbers = make(jax.random.key(0)), dimensions()
    grads = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape), params)
    for rms in (None, 0.2):
        ours = rc.muon(0.1, numbers, others=optax.sgd(0.1), rms=rms)
        theirs = optax.contrib.muon(0.1, muon_weight_dimension_numbers=numbers, consistent_rms=rms)
        actual, _ = ours.update(grads, ours.init(params), params)
        expected, _ = theirs.update(grads, theirs.init(params), params)
        for name in ("up", "down"):
            np.testing.assert_allclose(actual[name], expected[name], atol=2e-6)


def prepared(optimizer, **sizes):
    mesh = rc.make_mesh(**sizes)
    return rc.prepare(make, optimizer, loss_fn, ROWS[:16], key=jax.random.key(0), mesh=mesh)


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [{}, {"data": 2, "fsdp": 2, "model": 2}])
def test_meshes_change_no_result(sizes):
    """6 layers of two arrays are 12 matrices of one shape, which do not divide over 8 devices."""
    optimizer = rc.muon(0.05, dimensions(), others=optax.adam(1e-2))
    state, step, _ = prepared(optimizer, **sizes)
    one = {"data": 1, "devices": jax.devices()[:1]}
    expected, one_step, _ = prepared(optimizer, **one)
    for i in range(3):
        batch = ROWS[16 * i : 16 * i + 16]
        state, _ = step(state, batch)
        expected, _ = one_step(expected, batch)
    for x, y in zip(jax.tree.leaves(state.model), jax.tree.leaves(expected.model), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)


@pytest.mark.thorough
def test_no_matrix_is_orthogonalised_twice():
    numbers = dimensions()
    theirs = optax.contrib.muon(0.05, muon_weight_dimension_numbers=numbers)
    flops = []
    for optimizer in (rc.muon(0.05, numbers, others=optax.adam(1e-2)), theirs):
        state, step, _ = prepared(optimizer)
        cost = step.lower(state, ROWS[:16]).compile().cost_analysis()
        flops.append(cost["flops"])
    assert flops[0] < 0.4 * flops[1]


@pytest.mark.thorough
def test_ranks_that_are_not_those_of_matrices_are_named():
    options = {"loss_fn": loss_fn, "batch_size": 16, "steps": 1, "log": False}
    message = "orthogonalises norms, which.*higher rank to Adam: down, up.*rc.matrix_dimensions"
    with pytest.warns(UserWarning, match=message):
        rc.fit(make(jax.random.key(0)), optax.contrib.muon(0.02), ROWS, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for optimizer in (
            optax.contrib.muon(0.02, muon_weight_dimension_numbers=dimensions()),
            rc.muon(0.02, dimensions(), others=optax.sgd(1e-3)),
        ):
            rc.fit(make(jax.random.key(0)), optimizer, ROWS, **options)


@pytest.mark.thorough
def test_dimension_numbers_in_the_shape_of_a_callable_module():
    """Optax calls labels that are callable."""
    model = eqx.nn.MLP(WIDTH, WIDTH, 32, 2, key=jax.random.key(0))
    loss = lambda model, x, key: jnp.mean((jax.vmap(model)(x) - x) ** 2)
    numbers = rc.matrix_dimensions(model, loss, ROWS[:8], None)
    options = {"loss_fn": loss, "batch_size": 16, "steps": 2, "log": False}
    for optimizer in (
        rc.muon(0.02, numbers, others=optax.adam(1e-3)),
        optax.contrib.muon(0.02, muon_weight_dimension_numbers=numbers),
    ):
        state = rc.fit(model, optimizer, ROWS, **options)
        assert not jnp.allclose(state.model.layers[1].weight, model.layers[1].weight)
