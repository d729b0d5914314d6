"""The estimated peak of memory against the compiled program's."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharding_helpers import array

import redcoast as rc

# As in a dry run that stands in for an accelerator.
OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
}


def norm(x):
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-5)


def pair_block(p, z):
    """What is alive inside of the block is far more than the operand that it keeps."""
    x = norm(z)
    product = jnp.einsum("bikc,bjkc->bijc", x @ p["left"], x @ p["right"])
    z = z + jax.nn.sigmoid(x @ p["gate"]) * (norm(product) @ p["out"])
    return z + jax.nn.relu(norm(z) @ p["up"]) @ p["down"]


def rematerialised(model, batch, key):
    for p in model:
        batch = jax.checkpoint(pair_block)(p, batch)
    return jnp.mean(batch**2)


def attention(model, x, key):
    for p in model:
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, p[name]) for name in "qkv")
        scores = jnp.einsum("bqhk,bthk->bhqt", q, k) / 4
        mixed = jnp.einsum("bhqt,bthk->bqhk", jax.nn.softmax(scores), v)
        x = x + jnp.einsum("bqhk,hkd->bqd", mixed, p["o"])
    return jnp.mean(x**2)


def recurrence(model, x, key):
    def step(h, x):
        h = jnp.tanh(x @ model["in"] + h @ model["h"])
        return h, h

    start = jnp.zeros((x.shape[0], model["h"].shape[0]))
    _, hs = jax.lax.scan(step, start, jnp.swapaxes(x, 0, 1))
    return jnp.mean(hs**2)


SQUARE = dict.fromkeys(("left", "right", "gate", "out"), array(16, 16))
PAIR = [SQUARE | {"up": array(16, 64), "down": array(64, 16)}] * 2
HEADS = [dict.fromkeys("qkv", array(64, 4, 16)) | {"o": array(4, 16, 64)}] * 2
CASES = {
    "remat": (rematerialised, PAIR, array(1, 48, 48, 16), {}),
    "attention": (attention, HEADS, array(16, 64, 64), {}),
    "attention, FSDP": (attention, HEADS, array(16, 64, 64), {"data": 1, "fsdp": 8}),
    "a loop": (recurrence, {"in": array(32, 64), "h": array(64, 64)}, array(16, 64, 32), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_peak_is_that_of_the_compiled_program(name):
    """Within 25 %, for values that a block, a loop and a gather need beside what is kept."""
    fn, model, batch, sizes = CASES[name]
    mesh = rc.make_mesh(**sizes)
    plan = rc.plan_shardings(model, mesh, fn=fn, args=(batch, None))
    rows = P(("data", "fsdp")) if batch.shape[0] > 1 else P()
    step = jax.jit(
        jax.value_and_grad(plan.constrain(fn)),
        in_shardings=(plan.shardings, NamedSharding(mesh, rows), None),
        out_shardings=(None, plan.shardings),
    )
    memory = step.lower(model, batch, None).compile(compiler_options=OPTIONS).memory_analysis()
    assert memory is not None
    real = sum(getattr(memory, f"{kind}_size_in_bytes") for kind in ("argument", "output", "temp"))
    assert plan.report.program.memory.total == pytest.approx(real, rel=0.25)


def test_what_is_alive_at_the_peak_belongs_to_the_block():
    """A block keeps one operand, and the plan says what runs inside of it."""
    fn, model, batch, _ = CASES["remat"]
    plan = rc.plan_shardings(model, rc.make_mesh(), fn=fn, args=(batch, None))
    memory = plan.report.program.memory
    kept = batch.size * 4
    assert memory.activations > 5 * kept
    assert sum(one.memory_bytes for one in plan.report.program.lines) == pytest.approx(
        memory.activations, rel=1e-3
    )


def doubled(x):
    return 2 * x


def summed_over_time(x):
    return jax.lax.scan(lambda total, row: (total + row, None), x[0], x)[0]


@pytest.mark.parametrize("linear", [jax.jit(doubled), summed_over_time])
def test_calls_that_a_rematerialised_block_need_not_compute_again(linear):
    """Their derivatives need none of their values."""

    def loss(model, batch, key):
        block = jax.checkpoint(lambda w, x: linear(jnp.tanh(x @ w)))
        return jnp.mean(block(model, batch) ** 2)

    mesh = rc.make_mesh(data=8)
    batch = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    plan = rc.plan_shardings(array(32, 32), mesh, fn=loss, args=(batch, None))
    assert plan.report is not None
