"""Lookups in rows that are addressed by their own numbers, as in `x[jnp.arange(len(x)), i]`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sharding_helpers import real_mesh

import redcoast as rc
from redcoast.dryrun.hlo import collectives, sent_bytes
from redcoast.sharding.program._own_rows import batch_own_rows

ROWS, TOKENS, WIDTH, FEW = 16, 8, 32, 4


def own():
    return jnp.arange(ROWS)


def in_a_loop(x, batch):
    """A memory that each iteration writes into, in a function of its own and rematerialised."""

    @jax.jit
    @jax.checkpoint
    def write(x, row):
        return x.at[own(), row].add(0.1 * x[own(), 0]), None

    return jax.lax.scan(write, x, batch["many"].T)[0]


INDEXED = {
    "read": lambda x, batch: x[own(), batch["one"]],
    "several": lambda x, batch: x[np.arange(ROWS)[:, None], batch["many"]],
    "along two dimensions": lambda x, batch: x[own()[:, None], batch["many"], batch["places"]],
    "features first": lambda x, batch: x[own().reshape(-1, 1), :, batch["places"]],
    "added": lambda x, batch: x.at[own()[:, None], batch["many"]].add(x[:, :FEW] ** 2),
    "overwritten": lambda x, batch: x.at[own(), batch["one"]].set(jnp.sin(x[:, 0])),
    "largest": lambda x, batch: x.at[own()[:, None], batch["many"]].max(x[:, :FEW]),
    "in a loop": in_a_loop,
}


def make_loss(index):
    def loss(model, batch, key):
        return jnp.mean(jnp.tanh(index(jnp.tanh(batch["x"] @ model), batch)) ** 2)

    return loss


def make_inputs():
    rng = np.random.default_rng(0)
    model = jnp.asarray(rng.normal(size=(WIDTH, WIDTH)), jnp.float32) / 6
    batch = {
        "x": rng.normal(size=(ROWS, TOKENS, WIDTH)).astype(np.float32),
        "one": rng.integers(-TOKENS, TOKENS, ROWS).astype(np.int32),
        "many": np.argsort(rng.random((ROWS, TOKENS)))[:, :FEW].astype(np.int32),
        "places": rng.integers(0, WIDTH, (ROWS, FEW)).astype(np.int32),
    }
    return model, jax.tree.map(jnp.asarray, batch)


@pytest.mark.few("several", "added", "in a loop")
@pytest.mark.parametrize("name", INDEXED)
def test_rows_stay_on_their_devices(name):
    """Gradients and the loss alone are summed, as planned. XLA gathered what is written into rows,
    and summed what is read from them: up to fifty times as many bytes, of which plans knew none."""
    loss, mesh = make_loss(INDEXED[name]), real_mesh(8, 1, 1)
    model, batch = make_inputs()
    plan = rc.plan_shardings(model, mesh, fn=loss, args=(batch, None))
    step = jax.jit(
        jax.value_and_grad(plan.constrain(loss)),
        in_shardings=(plan.shardings, rc.batch_shardings(batch, mesh), None),
        out_shardings=(None, plan.shardings),
    )
    compiled = step.lower(model, batch, None).compile()
    sent = sent_bytes(collectives(compiled.as_text(), mesh))
    # An all-reduce over eight devices sends 2 * 7 / 8 of its bytes.
    assert sent == pytest.approx(1.75 * (model.nbytes + 4), rel=0.01)
    planned = sum(traffic.bytes for traffic in plan.report.program.traffic)
    assert planned == pytest.approx(sent, rel=0.01)
    expected = jax.value_and_grad(loss)(model, batch, None)
    placed = jax.device_put((model, batch), (plan.shardings, rc.batch_shardings(batch, mesh)))
    actual = compiled(*placed, None)
    for value, right in zip(actual, expected, strict=True):
        np.testing.assert_allclose(value, right, rtol=2e-5, atol=1e-7)


OTHERS = {
    "another order": lambda x, batch: x[own()[::-1], batch["one"]],
    "shifted": lambda x, batch: x[own() + 1, batch["one"]],
    "fewer": lambda x, batch: x[jnp.arange(FEW)[:, None], batch["one"][:FEW, None]],
    "rounded": lambda x, batch: x[own().astype(bool).astype(jnp.int32), batch["one"]],
    "computed": lambda x, batch: x[batch["one"], batch["one"]],
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_rows_are_looked_up_as_they_were(name):
    """Such a program is the same object."""
    program = jax.make_jaxpr(make_loss(OTHERS[name]))(*make_inputs(), None)
    assert batch_own_rows(program) is program
