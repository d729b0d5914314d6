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


@pytest.mark.thorough
@pytest.mark.parametrize("name", few_of(CELLS, "weights to the right"))
@pytest.mark.parametrize("sizes", few_of([{}, {"fsdp": 2, "model": 2}], {"fsdp": 2, "model": 2}))
def test_gradients_are_one_devices(name, sizes):
    loss_fn, mesh = recurrent(CELLS[name]), rc.make_mesh(**sizes)
    plan = rc.plan_shardings(PARAMS, mesh, fn=loss_fn, args=(BATCH, None))
    tolerance = 0.02 if name == "cast" else 1e-5
    errors = plan.verify(loss_fn, PARAMS, BATCH, tolerance=tolerance)
    assert len(errors) == 4


def sent(loss_fn, plan, params, batch):
    """Bytes that a device sends for a gradient."""
    return sent_bytes(step_collectives(loss_fn, plan, params, batch))


def step_collectives(loss_fn, plan, params, batch):
    """The collectives of a gradient."""
    place = jax.NamedSharding(plan.mesh, jax.P(("data", "fsdp")))
    step = jax.jit(jax.grad(loss_fn), out_shardings=plan.shardings)
    inputs = jax.device_put(params, plan.shardings), jax.device_put(batch, place), None
    return collectives(step.lower(*inputs).compile().as_text(), plan.mesh)


@pytest.mark.few("used twice")
@pytest.mark.parametrize(
    "name",
    ["weights to the right", "weights to the left", "transposed", "under vmap", "used twice"],
)
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


def test_a_weight_that_a_loop_casts_is_priced_once():
    """The plan counts its gradient once, in bfloat16. It is not compared with a compiled program,
    since the compiler for CPUs sums in float32."""
    loss_fn = recurrent(CELLS["cast"])
    plan = rc.plan_shardings(PARAMS, rc.make_mesh(), fn=loss_fn, args=(BATCH, None))
    bfloat16, float32 = 2, 4  # bytes: `into` is cast, and `hidden` is not
    once = 2 * 7 / 8 * WIDTH**2 * (bfloat16 + float32)
    priced = sum(entry.bytes for entry in plan.report.program.traffic)
    np.testing.assert_allclose(priced, once, rtol=0.01)


def rematerialised(p, h, x):
    return jax.checkpoint(lambda h: jnp.tanh(h @ p["hidden"] + x @ p["into"] + p["bias"][None]))(h)


def gradient_descent(p, h, x):
    """A step along a gradient that the body computes, as of a sampler."""
    energy = lambda h: jnp.sum(jnp.log(jnp.cosh(h @ p["hidden"] + p["bias"][None])))
    return h - 0.1 * jax.grad(energy)(h) + x


def squared(p, h, x):
    """Weights meet weights before they meet rows."""
    return jnp.tanh(x + h @ (p["hidden"] @ p["hidden"]) + p["bias"][None])


def checked(p, h, x):
    """An error that any row may raise."""
    h = jnp.tanh(h @ p["hidden"] + p["bias"][None] + x)
    return eqx.error_if(h, jnp.any(h > 2) | ~jnp.all(jnp.isfinite(h)), "It is too large.")


def rows_sum_and_shared(weight, h):
    """Rows, with a sum over them, and something that all rows share."""
    return jnp.tanh(h @ weight), jnp.sum(h @ weight), jnp.sum(weight**2)


def product_backward(saved, cotangents):
    return jax.vjp(rows_sum_and_shared, *saved)[1](cotangents)


product = jax.custom_vjp(rows_sum_and_shared)
product.defvjp(lambda weight, h: (product(weight, h), (weight, h)), product_backward)


def with_rule(p, h, x):
    h, _, shared = product(p["hidden"], h)
    return h + shared / WIDTH**2 + x


LOCAL = {
    "rule": with_rule,
    "rematerialised": rematerialised,
    "gradient": gradient_descent,
    "squared": squared,
    "checked": checked,
}
TENSOR_PARALLEL = {"data": 2, "model": 4}  # where hosts are called outside of `jax.shard_map`
ON_TENSOR_PARALLEL = ("rule", "rematerialised", "gradient", "squared")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "sizes"),
    [*((name, {}) for name in LOCAL), *((name, TENSOR_PARALLEL) for name in ON_TENSOR_PARALLEL)],
)
def test_scans_of_independent_rows_sum_gradients_after_the_loop(name, sizes):
    loss_fn, mesh = recurrent(LOCAL[name]), rc.make_mesh(**sizes)
    plan = rc.plan_shardings(PARAMS, mesh, fn=loss_fn, args=(BATCH, None))
    plan.verify(loss_fn, PARAMS, BATCH, tolerance=1e-5)
    actual = step_collectives(plan.constrain(loss_fn), plan, PARAMS, BATCH)
    over_rows = [one for one in actual if {"data", "fsdp"}.intersection(one.axes)]
    assert over_rows
    assert all(one.count == 1 and one.exact for one in over_rows)
    # A weight and its transpose count twice in the plan.
    if not sizes and name != "gradient":
        priced = sum(entry.bytes for entry in plan.report.program.traffic)
        np.testing.assert_allclose(priced, sent_bytes(actual), rtol=0.1)


@pytest.mark.thorough
def test_the_gradient_of_each_example_begins_with_a_scaled_weight():
    """In Langevin dynamics, whose noise of one key keeps the loop from running on each device."""

    def loss_fn(params, batch, key):
        energy = lambda h: jnp.log(jnp.cosh(h @ params["hidden"])) @ params["bias"]

        def step(h, key):
            noise = jax.random.normal(key, h.shape)
            return h - 0.1 * jax.vmap(jax.grad(energy))(h) + 0.1 * noise, None

        h, _ = jax.lax.scan(step, batch[:, 0], jax.random.split(KEYS[0], STEPS))
        return jnp.mean(h**2)

    plan = rc.plan_shardings(PARAMS, rc.make_mesh(), fn=loss_fn, args=(BATCH, None))
    plan.verify(loss_fn, PARAMS, BATCH, tolerance=1e-5)
    actual = step_collectives(plan.constrain(loss_fn), plan, PARAMS, BATCH)
    assert all(one.count == 1 and one.exact for one in actual)


def test_the_plan_says_where_checks_of_all_rows_wait():
    """A mean over all rows needs those of other devices, and whether any row is bad does not."""
    of_mean = lambda p, h, x: checked(p, h, x - jnp.mean(h) / 8)
    mesh = rc.make_mesh(data=2, model=4)
    waiting: list[tuple[str, ...]] = []
    for cell in (checked, of_mean):
        plan = rc.plan_shardings(PARAMS, mesh, fn=recurrent(cell), args=(BATCH, None))
        waiting.append(plan.report.program.waiting)
    assert not waiting[0]
    (sentence,) = waiting[1]
    assert "wait for each other in every iteration" in sentence


@pytest.mark.thorough
def test_a_loss_that_a_scan_adds_up_is_summed_over_devices_once():
    def loss_fn(params, batch, key):
        def step(total, x):
            return total + jnp.sum((x @ params["into"]) ** 2), None

        return jax.lax.scan(step, 0.0, jnp.swapaxes(batch, 0, 1))[0] / batch.size

    plan = rc.plan_shardings(PARAMS, rc.make_mesh(), fn=loss_fn, args=(BATCH, None))
    plan.verify(loss_fn, PARAMS, BATCH, tolerance=1e-5)
    actual = step_collectives(plan.constrain(loss_fn), plan, PARAMS, BATCH)
    assert all(one.count == 1 for one in actual)


@pytest.mark.thorough
def test_a_single_row_is_not_divided():
    def loss_fn(params, batch, key):
        def step(h, _):
            h = h + params["bias"][0] * (jnp.roll(h, 1, 1) - h)
            return h, jnp.mean(h)

        h, means = jax.lax.scan(jax.checkpoint(step), batch, None, length=3)
        return jnp.mean(h**2) + jnp.sum(means)

    batch = BATCH[:1, :, 0]
    plan = rc.plan_shardings(PARAMS, rc.make_mesh(), fn=loss_fn, args=(batch, None))
    plan.verify(loss_fn, PARAMS, batch, tolerance=1e-5)


@pytest.mark.thorough
def test_a_condition_of_all_rows_is_that_of_all_devices():
    """It may be used otherwise than to raise an error."""

    def cell(p, h, x):
        h = jnp.tanh(h @ p["hidden"] + x)
        return jnp.where(jnp.any(h > 0.99), h * 0.5, h)

    loss_fn = recurrent(cell)
    plan = rc.plan_shardings(PARAMS, rc.make_mesh(), fn=loss_fn, args=(BATCH, None))
    plan.verify(loss_fn, PARAMS, BATCH, tolerance=1e-5)


@pytest.mark.thorough
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
    actual = [can_hoist_gradient_sum(jaxpr, var) for var in jaxpr.invars[:4]]
    assert actual == [True, False, False, False]


@pytest.mark.thorough
@pytest.mark.parametrize("wrap", few_of([jax.checkpoint, jax.jit], jax.checkpoint))
def test_the_gradient_of_a_weight_that_layers_share_is_summed_once(wrap):
    """It is summed after the scan, and not for each layer, also where a layer is called through
    `jax.jit` or `jax.checkpoint`."""

    def loss_fn(params, batch, key):
        layer = lambda h, w: (jnp.tanh(h @ w + h @ params["shared"] + params["bias"][None]), None)
        h, _ = jax.lax.scan(wrap(layer), batch[:, 0], params["layers"])
        return jnp.mean(h**2)

    params = {
        "shared": PARAMS["hidden"],
        "bias": PARAMS["bias"],
        "layers": jnp.stack([PARAMS["into"]] * 4),
    }
    plan = rc.plan_shardings(params, rc.make_mesh(), fn=loss_fn, args=(BATCH, None))
    plan.verify(loss_fn, params, BATCH, tolerance=1e-5)
    whole = 4 * sum(x.size for x in jax.tree.leaves(params))
    bytes_sent = sent(plan.constrain(loss_fn), plan, params, BATCH)
    assert bytes_sent <= 1.01 * 2 * 7 / 8 * whole
    priced = sum(entry.bytes for entry in plan.report.program.traffic)
    np.testing.assert_allclose(priced, bytes_sent, rtol=0.1)
