"""Weights that loops close over: their gradients are summed over the batch once."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import few_of

import redcoast as rc
from redcoast.dryrun.hlo import collectives, sent_bytes
from redcoast.sharding.program._loop_weights import can_hoist_gradient_sum

KEYS = jax.random.split(jax.random.key(0), 4)
WIDTH, STEPS = 32, 12
PARAMS = {
    "into": jax.random.normal(KEYS[0], (WIDTH, WIDTH)) / 6,
    "hidden": jax.random.normal(KEYS[1], (WIDTH, WIDTH)) / 6,
    "bias": jax.random.normal(KEYS[2], (WIDTH,)) / 6,
}
BATCH = jax.random.normal(KEYS[3], (16, STEPS, WIDTH))


def recurrent(cell):
    """The loss of a network that goes through the steps with `cell(params, hidden, x)`."""

    def loss_fn(params, batch, key):
        step = lambda hidden, x: (cell(params, hidden, x), None)
        start = jnp.zeros((batch.shape[0], WIDTH))
        hidden, _ = jax.lax.scan(step, start, jnp.swapaxes(batch, 0, 1))
        return jnp.mean((hidden - 1) ** 2)

    return loss_fn


CELLS = {
    "weights to the right": lambda p, h, x: jnp.tanh(
        x @ p["into"] + h @ p["hidden"] + p["bias"][None]
    ),
    "weights to the left": lambda p, h, x: jnp.tanh(
        (p["into"] @ x.T + p["hidden"] @ h.T + p["bias"][:, None]).T
    ),
    "transposed": lambda p, h, x: jnp.tanh(x @ p["into"].T + h @ p["hidden"].T),
    "under vmap": jax.vmap(
        lambda p, h, x: jnp.tanh(p["into"] @ x + p["hidden"] @ h + p["bias"]), (None, 0, 0)
    ),
    "cast": lambda p, h, x: jnp.tanh(
        (x.astype(jnp.bfloat16) @ p["into"].astype(jnp.bfloat16)).astype(jnp.float32)
        + h @ p["hidden"]
    ),
    "used otherwise too": lambda p, h, x: jnp.tanh(h @ p["hidden"] + x @ jnp.sin(p["into"])),
    "used twice": lambda p, h, x: jnp.tanh(jnp.tanh(h @ p["hidden"]) @ p["hidden"] + x),
    "squared": lambda p, h, x: jnp.tanh(x + h @ (p["hidden"] @ p["hidden"])),
    "loop in a loop": lambda p, h, x: jax.lax.scan(
        lambda h, _: (jnp.tanh(h @ p["hidden"] + x), None), h, None, length=2
    )[0],
}


@pytest.mark.parametrize("name", few_of(CELLS, *list(CELLS)[::3]))
@pytest.mark.parametrize("sizes", few_of([{}, {"fsdp": 2, "model": 2}], {"fsdp": 2, "model": 2}))
def test_gradients_are_one_devices(name, sizes):
    loss_fn, mesh = recurrent(CELLS[name]), rc.make_mesh(**sizes)
    plan = rc.plan_shardings(PARAMS, mesh, fn=loss_fn, args=(BATCH, None))
    tolerance = 0.02 if name == "cast" else 1e-5
    errors = plan.verify(loss_fn, PARAMS, BATCH, tolerance=tolerance)
    assert len(errors) == 4


def sent(loss_fn, plan, params, batch):
    """Bytes that a device sends for a gradient."""
    place = jax.NamedSharding(plan.mesh, jax.P(("data", "fsdp")))
    step = jax.jit(jax.grad(loss_fn), out_shardings=plan.shardings)
    given = jax.device_put(params, plan.shardings), jax.device_put(batch, place), None
    return sent_bytes(collectives(step.lower(*given).compile().as_text(), plan.mesh))


@pytest.mark.parametrize(
    "name",
    ["weights to the right", "weights to the left", "transposed", "under vmap", "used twice"],
)
@pytest.mark.few("weights to the left", "used twice")
def test_one_reduction_after_the_loop(name):
    loss_fn, mesh = recurrent(CELLS[name]), rc.make_mesh()
    plan = rc.plan_shardings(PARAMS, mesh, fn=loss_fn, args=(BATCH, None))
    used = 4 * (WIDTH**2 * (1 if name == "used twice" else 2) + WIDTH)
    once = 2 * 7 / 8 * used
    assert sent(plan.constrain(loss_fn), plan, PARAMS, BATCH) <= 1.05 * once
    # Left to the compiler, it is one in every step.
    assert sent(loss_fn, plan, PARAMS, BATCH) >= STEPS / 2 * once
    priced = sum(entry.bytes for entry in plan.report.program.traffic)
    np.testing.assert_allclose(priced, once, rtol=0.1)


def test_stock_equinox_cells():
    class Network(eqx.Module):
        cell: eqx.nn.LSTMCell

        def __call__(self, x):
            start = (jnp.zeros(WIDTH), jnp.zeros(WIDTH))
            step = lambda state, x: (self.cell(x, state), None)
            return jax.lax.scan(step, start, x)[0][0]

    loss_fn = lambda model, batch, key: jnp.mean(jax.vmap(model)(batch) ** 2)
    model = Network(eqx.nn.LSTMCell(WIDTH, WIDTH, key=KEYS[0]))
    plan = rc.plan_shardings(model, rc.make_mesh(), fn=loss_fn, args=(BATCH, None))
    plan.verify(loss_fn, model, BATCH, tolerance=1e-5)
    params, static = eqx.partition(model, eqx.is_array)
    planned = plan.constrain(loss_fn)
    of_params = lambda params, batch, key: planned(eqx.combine(params, static), batch, key)
    jaxpr = str(jax.make_jaxpr(of_params)(params, BATCH, None))
    assert f"f32[8,{4 * WIDTH},{WIDTH}]" in jaxpr


def test_which_gradient_sums_can_be_hoisted():
    def body(weight, elementwise, returned, batched, x):
        y = x @ weight + jnp.sum(jnp.sin(elementwise))
        return y, returned, jnp.einsum("bi,bio->bo", x, batched)

    shapes = [(4, 4), (4, 4), (4, 4), (8, 4, 4), (8, 4)]
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    jaxpr = jax.make_jaxpr(body)(*given).jaxpr
    found = [can_hoist_gradient_sum(jaxpr, var) for var in jaxpr.invars[:4]]
    assert found == [True, False, False, False]
