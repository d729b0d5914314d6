"""What is sent once, again or not at all in a step, in plans and in compiled programs."""

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import pytest
from grids import few_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from odd_vocabulary import USES
from sharding_helpers import array, mesh_of, real_mesh

import redcoast as rc
from redcoast.dryrun.hlo import collectives, sent_bytes


def planned_and_sent(fn, model, batch, mesh, **options):
    """The bytes planned and compiled for a loss and its gradients."""
    plan = rc.plan_shardings(model, mesh, fn=fn, args=(batch, None), **options)
    rows = P()
    if batch.shape[0] > 1:
        rows = P(("data", "fsdp"))
    arrays, static = eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    constrained = plan.constrain(fn)
    step = jax.jit(
        jax.value_and_grad(lambda arrays, *args: constrained(eqx.combine(arrays, static), *args)),
        in_shardings=(plan.shardings, NamedSharding(mesh, rows), None),
        out_shardings=(None, plan.shardings),
    )
    text = step.lower(arrays, batch, None).compile().as_text()
    planned = sum(row.bytes for row in plan.report.program.traffic)
    return planned, sent_bytes(collectives(text, mesh)), plan


def rematerialised(model, batch, key):
    """The parameters of a block are gathered for it, and again before its derivative."""
    block = jax.checkpoint(lambda p, x: x + jnp.tanh(x @ p["up"]) @ p["down"])
    for p in model:
        batch = block(p, batch)
    return jnp.mean(batch**2)


def frozen(model, batch, key):
    """No gradient flows into what `stop_gradient` alone reads, as a solver before a head."""
    hidden = batch
    for p in model[:-1]:
        hidden = jnp.tanh(hidden @ p["up"]) @ p["down"]
    hidden = jax.lax.stop_gradient(hidden)
    return jnp.mean((jnp.tanh(hidden @ model[-1]["up"]) @ model[-1]["down"]) ** 2)


def nearest(model, batch, key):
    """No gradient flows into distances to the vectors of a codebook, of which the least is used."""
    hidden = jnp.tanh(batch @ model["up"])
    norms = jnp.sum(model["codes"] ** 2, axis=-1)[None, :]
    distances = norms - 2 * hidden @ model["codes"].T
    codes = model["codes"][jnp.argmin(distances, axis=-1)]
    return jnp.mean((codes - hidden) ** 2)


def mixed(model, batch, key):
    """What each device mixes of all rows is gathered, and no sum over devices."""
    weights = jax.nn.softmax(batch @ batch.T)
    return jnp.mean(jnp.tanh(weights @ (weights @ jnp.tanh(batch @ model))) ** 2)


def solved(model, batch, key):
    """Each device runs such a loop alone, and gradients are summed after it."""

    def solve(x):
        step = lambda y: y + 0.1 * jnp.tanh(y @ model[0]["up"]) @ model[0]["down"]
        more = lambda y: jnp.sum(y**2) < 1e3
        return eqxi.while_loop(more, step, x, max_steps=16, kind="checkpointed")

    return jnp.mean(jax.vmap(solve)(batch) ** 2)


def residual(p, x):
    return x + jnp.tanh(x @ p["up"]) @ p["down"]


def scanned(model, batch, key, block=residual):
    return jnp.mean(jax.lax.scan(lambda x, p: (block(p, x), None), batch, model)[0] ** 2)


def unrolled(model, batch, key):
    """The compiler finds that such a block computes the same again, and gathers nothing again."""
    block = jax.checkpoint(residual, prevent_cse=False)
    for p in model:
        batch = block(p, batch)
    return jnp.mean(batch**2)


def whole(fn, policy=None, **options):
    """A loss that is rematerialised as a whole."""
    run = lambda model, batch: fn(model, batch, None, **options)
    return lambda model, batch, key: jax.checkpoint(run, policy=policy)(model, batch)


POLICIES = jax.checkpoint_policies
BLOCK = {"up": array(64, 256), "down": array(256, 64)}
LAYERS = {"up": array(4, 64, 256), "down": array(4, 256, 64)}
CASES = {
    "rematerialised": (rematerialised, [BLOCK] * 2, 1),
    "frozen": (frozen, [BLOCK] * 2, 8),
    "nearest": (nearest, {"up": array(64, 32), "codes": array(512, 32)}, 8),
    "mixed": (mixed, array(64, 64), 8),
    "solved": (solved, [BLOCK], 8),
    "solved, FSDP": (solved, [BLOCK], 1),
    # Layers are gathered for the loop, for the loop again, and for its derivative.
    "whole scan": (whole(scanned), LAYERS, 1),
    "whole scan, layers": (whole(scanned, block=jax.checkpoint(residual)), LAYERS, 1),
    "whole scan, dots": (whole(scanned, POLICIES.dots_saveable), LAYERS, 1),
    "whole scan, everything": (whole(scanned, POLICIES.everything_saveable), LAYERS, 1),
    "whole, everything": (whole(rematerialised, POLICIES.everything_saveable), [BLOCK] * 2, 1),
    "same again": (unrolled, [BLOCK] * 2, 1),
}


@pytest.mark.parametrize("name", few_of(CASES, "rematerialised", "whole scan", "nearest", "mixed"))
def test_gathers_and_gradients_are_counted_as_often_as_they_are_sent(name):
    fn, model, data = CASES[name]
    mesh = real_mesh(data, 8 // data, 1)
    planned, sent, plan = planned_and_sent(fn, model, array(64, 64), mesh)
    assert planned == pytest.approx(sent, rel=0.1), plan.table()


@pytest.mark.thorough
def test_gradients_of_kernels_are_summed_over_parts_of_an_example():
    """Each device has the gradient of its part of the space alone."""
    make = lambda key: eqx.nn.Conv2d(16, 16, 3, padding=1, key=key)
    convolve = [eqx.filter_eval_shape(make, jax.random.key(0))] * 2

    def loss(model, batch, key):
        hidden = jax.vmap(model[1])(jnp.tanh(jax.vmap(model[0])(batch)))
        return jnp.mean(hidden**2)

    hardware = rc.Hardware(memory=3e5)
    batch, mesh = array(1, 16, 64, 32), real_mesh(8, 1, 1)
    planned, sent, plan = planned_and_sent(loss, convolve, batch, mesh, hardware=hardware)
    assert plan.report.program.split_examples
    assert planned == pytest.approx(sent, rel=0.1), plan.table()


def test_what_depends_on_the_platform_is_planned():
    """The operation that chooses has no operands, which every report has to allow for."""

    def loss(model, batch, key):
        of_platform = {"cpu": jnp.sin, "default": jnp.cos}
        return jnp.mean(jax.lax.platform_dependent(batch @ model, **of_platform) ** 2)

    args = (array(16, 8), None)
    plan = rc.plan_shardings(array(8, 8), real_mesh(8, 1, 1), fn=loss, args=args)
    assert plan.report.program.batch_axes == ("data",)
    assert plan.report.program.coupled is None


@pytest.mark.parametrize("name", USES)
def test_the_gradient_of_a_tied_table_is_planned_once(name):
    """As GPUs sum it; `odd_vocabulary.check_uses` compiles that."""
    fn, *bytes_of_element = USES[name]
    model, batch = {"table": array(1024, 64)}, jax.ShapeDtypeStruct((16, 32), jnp.int32)
    for sizes, size in zip(({"data": 2}, {"fsdp": 2}), bytes_of_element, strict=True):
        plan = rc.plan_shardings(model, mesh_of(**sizes), fn=fn, args=(batch,))
        planned = sum(row.bytes for row in plan.report.program.traffic)
        assert planned == pytest.approx(1024 * 64 * size, rel=0.01), plan.table()
