"""What a plan says an optimizer sends, against the compiled program."""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redcoast as rc
from redcoast.dryrun.hlo import collectives, sent_bytes

Numbers = optax.contrib.MuonDimensionNumbers
WIDTH, HIDDEN, LAYERS = 32, 64, 3
NUMBERS = {"up": Numbers(1, 2), "down": Numbers(1, 2), "norms": None}
OTHERS = optax.adamw(1e-3)
OPTIMIZERS = {
    "muon": rc.muon(0.1, NUMBERS, others=OTHERS),
    "soap": rc.soap(0.1, NUMBERS, others=OTHERS),
    "shampoo": rc.shampoo(0.1, NUMBERS, others=OTHERS),
    "in others": optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(1.0), rc.muon(0.1, NUMBERS, others=OTHERS)), 2
    ).gradient_transformation(),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=8),
}
MESHES = {
    "data": {"data": 8},
    "fsdp": {"fsdp": 8},
    "model": {"data": 2, "model": 4},
    "all": {"data": 2, "fsdp": 2, "model": 2},
}
ROWS = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)


def make(key):
    ups, downs = jax.random.split(key)
    return {
        "up": jax.random.normal(ups, (LAYERS, WIDTH, HIDDEN)) / 8,
        "down": jax.random.normal(downs, (LAYERS, HIDDEN, WIDTH)) / 8,
        "norms": jnp.ones((LAYERS, WIDTH)),
    }


def loss_fn(model, batch, key):
    x = batch
    for i in range(LAYERS):
        layer = jax.tree.map(lambda a, i=i: a[i], model)
        x = x + jax.nn.relu(x * layer["norms"][None] @ layer["up"]) @ layer["down"]
    return jnp.mean(x**2)


def scanned_loss_fn(model, batch, key):
    def layer(x, weights):
        return x + jax.nn.relu(x * weights["norms"][None] @ weights["up"]) @ weights["down"], None

    return jnp.mean(jax.lax.scan(layer, batch, model)[0] ** 2)


@ft.cache
def sent(name, mesh, loss_fn=loss_fn, accumulate=1):
    """The bytes of the compiled program, of the plan, and those of the plan for the optimizer."""
    optimizer, mesh = OPTIMIZERS[name], rc.make_mesh(**MESHES[mesh])
    create = ft.partial(rc.init_state, make, optimizer, key=jax.random.key(0))
    state = eqx.filter_eval_shape(create)
    overrides = [("up", (None, *overridden(mesh))), ("down", (None, *overridden(mesh)[::-1]))]
    batch = jax.ShapeDtypeStruct(ROWS.shape, ROWS.dtype)
    plan = rc.plan_step(
        state,
        loss_fn,
        batch,
        mesh,
        overrides=overrides,
        optimizer=optimizer,
        accumulate=accumulate,
    )
    step = ft.partial(
        rc.train_step,
        loss_fn=plan.constrain(loss_fn),
        optimizer=optimizer,
        accumulate=accumulate,
    )
    compiled = rc.compile_step(step, plan.shardings).lower(state, batch)
    options = {"xla_backend_optimization_level": 0}
    text = compiled.compile(compiler_options=options).as_text()
    traffic = plan.report.program.traffic
    of_optimizer = [line.bytes for line in traffic if line.kind == "optimizer"]
    planned = sum(line.bytes for line in traffic)
    return sent_bytes(collectives(text, mesh)), planned, sum(of_optimizer)


def overridden(mesh):
    """The axes of the inputs and of the outputs: these arrays are small."""
    return [axis if mesh.shape[axis] > 1 else None for axis in ("fsdp", "model")]


CASES = [(name, mesh) for name in OPTIMIZERS for mesh in MESHES]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "mesh"), CASES)
@pytest.mark.few("muon-data")
def test_the_plan_says_what_the_compiled_update_sends(name, mesh):
    compiled, planned, of_optimizer = sent(name, mesh)
    assert abs(planned - compiled) < 0.1 * compiled
    # The rest of the step sends the same with every optimizer.
    assert of_optimizer > 0 or name == "adafactor"


@pytest.mark.thorough
@pytest.mark.parametrize("loss_fn", [loss_fn, scanned_loss_fn])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.few("fsdp-scanned_loss_fn")
def test_the_plan_of_several_microbatches_says_what_all_of_them_send(loss_fn, mesh):
    """Gradients are summed in each, and layers in a loop are gathered in each."""
    compiled, planned, _ = sent("adafactor", mesh, loss_fn, accumulate=2)
    assert abs(planned - compiled) < 0.1 * compiled


def test_an_optimizer_that_computes_element_by_element_sends_nothing():
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    mesh = rc.make_mesh(**MESHES["fsdp"])
    state = eqx.filter_eval_shape(ft.partial(rc.init_state, make, optimizer, key=jax.random.key(0)))
    plan = ft.partial(rc.plan_step, state, loss_fn, ROWS, mesh)
    assert plan(optimizer=optimizer).report == plan().report


@pytest.mark.thorough
def test_each_device_sends_only_the_updates_of_its_matrices():
    """Six matrices are one for each of six devices, and zeros of the other two."""
    _, _, of_optimizer = sent("muon", "data")
    assert of_optimizer == 7 * WIDTH * HIDDEN * 4
