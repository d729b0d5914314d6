"""SOAP on stacked models, over the devices of a mesh."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from matrix_runs import assert_mesh_changes_no_result

import redcoast as rc
from redcoast.core._jaxpr import iter_equations
from redcoast.core._tracing import traced_over
from redcoast.train import _side_statistics

Numbers = optax.contrib.MuonDimensionNumbers

WIDTH, HIDDEN, LAYERS = 6, 10, 3
ROWS = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)


def make(layers=LAYERS, hidden=HIDDEN):
    rng = np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / 3, jnp.float32)
    return {
        "up": draw(layers, WIDTH, hidden),
        "down": draw(layers, hidden, WIDTH),
        "norms": jnp.ones((layers, WIDTH)),
        "head": draw(WIDTH, WIDTH),
    }


def loss_fn(params, x, key):
    def layer(x, p):
        return x + jnp.tanh(x * p["norms"][None] @ p["up"]) @ p["down"], None

    layers = {name: params[name] for name in ("up", "down", "norms")}
    y, _ = jax.lax.scan(layer, x, layers)
    return jnp.mean((y @ params["head"] - x[:, ::-1]) ** 2)


def dimensions():
    return rc.matrix_dimensions(make(), loss_fn, ROWS, None)


class Published:
    """Algorithm 3 of the paper for one matrix, in float64, with the published implementation's
    first step, correction of the means and order of the eigenvectors."""

    def __init__(self, shape, *, sides=(True, True), b1=0.9, b2=0.8, beta=0.7, frequency=2):
        self.b1, self.b2, self.beta, self.frequency = b1, b2, beta, frequency
        self.step, self.sides = 0, sides
        self.m, self.v = np.zeros(shape), np.zeros(shape)
        self.statistics = [np.zeros((n, n)) for n in shape]
        self.bases = [np.eye(n) for n in shape]

    def update(self, g):
        g = np.float64(g)
        step, n = self.step, np.zeros_like(g)
        ql, qr = self.bases
        if step > 0:
            self.m = self.b1 * self.m + (1 - self.b1) * g
            self.v = self.b2 * self.v + (1 - self.b2) * (ql.T @ g @ qr) ** 2
            m, v = self.m / (1 - self.b1**step), self.v / (1 - self.b2**step)
            n = ql @ ((ql.T @ m @ qr) / (np.sqrt(v) + 1e-8)) @ qr.T
        for side, product in enumerate((g @ g.T, g.T @ g)):
            self.statistics[side] *= self.beta
            self.statistics[side] += (1 - self.beta) * product
        if step % self.frequency == 0:
            for side in (0, 1):
                if not self.sides[side]:
                    continue
                p, q = self.statistics[side], self.bases[side]
                if step == 0:
                    self.bases[side] = np.linalg.eigh(p)[1][:, ::-1]
                    continue
                order = np.argsort(-np.einsum("ij,ij->j", q, p @ q), kind="stable")
                self.v = np.take(self.v, order, axis=side)
                self.bases[side] = np.linalg.qr(p @ q[:, order])[0]
        self.step += 1
        return n


OPTIONS = {"b1": 0.9, "b2": 0.8, "statistics": 0.7, "frequency": 2}


@pytest.mark.few("6")
@pytest.mark.parametrize("hidden", [WIDTH, HIDDEN])
@jax.numpy_dtype_promotion("standard")  # optax needs it
def test_updates_are_those_of_the_published_algorithm(monkeypatch, hidden):
    """The longer side has no statistics: after one gradient they have no full rank, so that some of
    their eigenvectors would be arbitrary."""
    monkeypatch.setattr(_side_statistics, "_LARGEST", WIDTH)
    params = make(hidden=hidden)
    optimizer = rc.soap(0.1, dimensions(), others=optax.sgd(0.5), weight_decay=0.01, **OPTIONS)
    state = optimizer.init(params)
    sides = (True, hidden == WIDTH)
    ref = {name: [Published((WIDTH, hidden), sides=sides) for _ in range(LAYERS)]
           for name in ("up", "down")}  # fmt: skip
    update = jax.jit(optimizer.update)
    rng = np.random.default_rng(2)
    for _ in range(6):
        grads = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), params)
        updates, state = update(grads, state, params)
        for layer in range(LAYERS):
            expected = ref["up"][layer].update(grads["up"][layer])
            expected = -0.1 * (expected + 0.01 * np.float64(params["up"][layer]))
            np.testing.assert_allclose(updates["up"][layer], expected, atol=1e-3)
            # The shorter side comes first.
            turned = hidden > WIDTH
            gradient = grads["down"][layer]
            expected = ref["down"][layer].update(gradient.T if turned else gradient)
            expected = expected.T if turned else expected
            expected = -0.1 * (expected + 0.01 * np.float64(params["down"][layer]))
            np.testing.assert_allclose(updates["down"][layer], expected, atol=1e-3)
        np.testing.assert_allclose(updates["norms"], -0.5 * grads["norms"], rtol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("layers", [8, 3])
def test_a_run_on_a_mesh_is_that_on_one_device(layers):
    """Matrices of one shape are decomposed together, as many on each device, with padding."""
    params = make(layers, hidden=WIDTH)
    optimizer = rc.soap(0.02, dimensions(), others=optax.sgd(0.02), frequency=2)
    assert_mesh_changes_no_result(optimizer, params, steps=4)
    # No device decomposes the matrices of others: `up` and `down` have two for each layer.
    on_each = -(-2 * layers // 8)
    assert decomposed(optimizer, params, rc.make_mesh(data=2, fsdp=4)) == {on_each}


def test_statistics_are_stored_on_the_devices_that_compute_with_them(tmp_path):
    params = {"w": jnp.zeros((16, 64, 64)), "one": jnp.zeros((32, 64)), "odd": jnp.zeros((3, 5))}
    numbers = {"w": Numbers(1, 2), "one": Numbers(0, 1), "odd": Numbers(0, 1)}
    optimizer = rc.soap(0.1, numbers, others=optax.sgd(0.1))
    make = lambda key: rc.init_state(lambda key: params, optimizer, key=key)
    state = jax.eval_shape(make, jax.random.key(0))
    fn = lambda p, x, key: jnp.mean((x @ p["w"][0]) ** 2) + jnp.sum(p["one"]) + jnp.sum(p["odd"])
    mesh = rc.make_mesh(data=2, fsdp=4)
    plan = rc.plan_shardings(state, mesh, fn=fn, args=(jnp.zeros((16, 64)), None))
    soap = plan.shardings.opt_state.inner_states["matrix"].inner_state[0]
    assert soap.left["w"].spec == soap.right["w"].spec == P(("data", "fsdp"))
    assert soap.left["one"].spec == P(None, None, ("data", "fsdp"))
    assert soap.left["odd"].spec == P()
    assert soap.nu["w"].spec == plan.shardings.model["w"].spec
    rc.save_plan(plan, path := tmp_path / "plan.json")
    assert rc.load_plan(path, state, mesh).shardings == plan.shardings


def decomposed(optimizer, params, mesh):
    """How many matrices each decomposition of a device's program has."""
    update = lambda updates, state: optimizer.update(updates, state, params)
    with traced_over(mesh), jax.numpy_dtype_promotion("standard"):
        jaxpr = jax.make_jaxpr(update)(params, optimizer.init(params))
    names = ("eigh", "geqrf", "qr")
    equations = [e for e in iter_equations(jaxpr) if e.primitive.name in names]
    return {equation.invars[0].aval.shape[0] for equation in equations}
