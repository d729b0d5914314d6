"""Devices that have copies of a parameter each update a part of it."""

# pyright: reportOptionalMemberAccess=false

import functools as ft
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import redcoast as rc
from redcoast.dryrun.hlo import collectives, sent_bytes

ROWS = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
ADAM = optax.adamw(1e-2)
is_up = lambda params: {name: name == "up" for name in params}
OPTIMIZERS = {
    "adamw": ADAM,
    "momentum": optax.sgd(0.1, momentum=0.9),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.lamb(1e-2)),
    "masked": optax.masked(ADAM, is_up),
    "summed": optax.MultiSteps(ADAM, 2).gradient_transformation(),
    "finite": optax.apply_if_finite(ADAM, 3),
    "two": optax.multi_transform({True: ADAM, False: optax.lion(1e-3)}, is_up),
}


def make(key):
    up, down = jax.random.normal(key, (2, 64, 128)) / 8
    return {"up": up, "down": down.T, "bias": jnp.ones(128)}


def loss_fn(model, batch, key):
    hidden = jax.nn.relu(batch @ model["up"] + model["bias"][None])
    return jnp.mean((hidden @ model["down"] - batch) ** 2)


def planned(optimizer, mesh, average=None, **options):
    create = ft.partial(rc.init_state, make, optimizer, key=jax.random.key(0), average=average)
    batch = jax.ShapeDtypeStruct(ROWS.shape, ROWS.dtype)
    state = eqx.filter_eval_shape(create)
    plan = rc.plan_step(state, loss_fn, batch, mesh, optimizer=optimizer, **options)
    step = ft.partial(rc.train_step, loss_fn=plan.constrain(loss_fn), optimizer=optimizer)
    return plan, create(shardings=plan.shardings), step


def trained(optimizer, mesh, accumulate=1):
    """The loss of the last of three steps, the state after it, and the plan."""
    plan, state, step = planned(optimizer, mesh, accumulate=accumulate)
    step = rc.compile_step(ft.partial(step, accumulate=accumulate), plan.shardings)
    state, _ = step(state, ROWS)
    state, _ = step(state, ROWS)
    state, metrics = step(state, ROWS)
    return metrics["loss"], state, plan


@pytest.mark.few("clipped-1")
@pytest.mark.parametrize(
    ("name", "accumulate"),
    [(name, 1) for name in OPTIMIZERS] + [("adamw", 2)],
)
def test_an_update_in_parts_equals_that_of_one_device(name, accumulate):
    optimizer = OPTIMIZERS[name]
    loss, state, plan = trained(optimizer, rc.make_mesh(data=8), accumulate)
    alone, expected, _ = trained(optimizer, rc.make_mesh(devices=jax.devices()[:1]), accumulate)
    np.testing.assert_allclose(loss, alone, rtol=1e-5)
    for x, y in zip(jax.tree.leaves(state.model), jax.tree.leaves(expected.model), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)
        assert x.is_fully_replicated
    specs = {array.path: array.spec for array in plan.report.arrays if array.size == 64 * 128}
    of_state = {spec for path, spec in specs.items() if path.startswith("opt_state")}
    assert of_state <= {P("data"), P(None, "data")}
    assert of_state


def test_the_norm_of_the_gradients_reads_parts():
    """The compiler for GPUs all-reduces a gradient that anything reads as a whole, and sends twice
    as much."""
    plan, state, step = planned(ADAM, rc.make_mesh(data=8))
    text = rc.compile_step(step, plan.shardings).lower(state, ROWS).compile().as_text()
    assert text is not None
    squares = re.findall(r'= f32\[([\d,]+)\]\S* multiply\(.*square"', text)
    assert set(squares) == {"64,16", "16,64", "128"}


@pytest.mark.thorough
def test_a_plan_has_the_memory_and_the_bytes_of_an_update_in_parts():
    mesh = rc.make_mesh(data=8)
    plan, state, step = planned(ADAM, mesh)
    compiled = rc.compile_step(step, plan.shardings).lower(state, ROWS).compile()
    arguments = compiled.memory_analysis().argument_size_in_bytes - ROWS.nbytes // 8
    assert plan.report.totals.all.bytes_per_device == pytest.approx(arguments, rel=0.01)
    memory = plan.report.program.memory
    assert memory.optimizer_state == plan.report.totals.optimizer_state.bytes_per_device
    assert memory.optimizer_state < memory.arrays / 3  # a replicated one has twice as much
    check_sent_bytes(plan, compiled)
    assert "all-gathers of updated parameters" in plan.table()


def check_sent_bytes(plan, compiled):
    planned = sum(line.bytes for line in plan.report.program.traffic)
    sent = sent_bytes(collectives(compiled.as_text(), plan.mesh))
    assert planned == pytest.approx(sent, rel=0.02)


@pytest.mark.thorough
@pytest.mark.few("finite")
@pytest.mark.parametrize("name", ["summed", "finite"])
def test_a_wrapped_optimizer_sends_no_more(name):
    """Sums of gradients are in parts too, and a branch that returns zeros gathers nothing."""
    plan, state, step = planned(OPTIMIZERS[name], rc.make_mesh(data=8))
    check_sent_bytes(plan, rc.compile_step(step, plan.shardings).lower(state, ROWS).compile())
    alone, _, _ = planned(ADAM, rc.make_mesh(data=8))
    assert plan.report.program.traffic == alone.report.program.traffic


@pytest.mark.thorough
def test_averages_of_updated_parameters_are_gathered_too():
    plan, state, step = planned(ADAM, rc.make_mesh(data=8), average=0.9)
    check_sent_bytes(plan, rc.compile_step(step, plan.shardings).lower(state, ROWS).compile())


@pytest.mark.thorough
def test_arrays_of_overrides_and_small_ones_are_updated_whole():
    plan, _, _ = planned(ADAM, rc.make_mesh(data=8), overrides=[("up", None)])
    specs = {array.path: array.spec for array in plan.report.arrays}
    assert specs["opt_state/0/mu/up"] == specs["opt_state/0/nu/bias"] == P()
    assert specs["opt_state/0/mu/down"] == P("data")


@pytest.mark.thorough
def test_gradients_that_are_summed_in_16_bits_are_not_scattered():
    """The new parameters would be gathered in 32 bits."""
    plan, _, _ = planned(ADAM, rc.make_mesh(data=8), compute_dtype="bf16")
    assert {array.spec for array in plan.report.arrays} == {P()}


@pytest.mark.thorough
def test_saved_states_are_loaded_into_parts_and_back(tmp_path):
    plan, _, _ = planned(ADAM, rc.make_mesh(data=8))
    whole, _, _ = planned(ADAM, rc.make_mesh(data=8), overrides=[(".", None)])
    _, state, _ = trained(ADAM, rc.make_mesh(data=8))
    expected = jax.tree.map(np.asarray, state.opt_state)
    rc.save_checkpoint(tmp_path / "parts", state)
    abstract = eqx.filter_eval_shape(lambda: state)
    between = rc.load_checkpoint(tmp_path / "parts", abstract, shardings=whole.shardings)
    assert between.opt_state[0].mu["up"].is_fully_replicated
    rc.save_checkpoint(tmp_path / "whole", between)
    loaded = rc.load_checkpoint(tmp_path / "whole", abstract, shardings=plan.shardings)
    assert not loaded.opt_state[0].mu["up"].is_fully_replicated
    jax.tree.map(np.testing.assert_array_equal, loaded.opt_state, expected)
