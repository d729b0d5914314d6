"""What a plan recomputes in the backward pass to stay within `memory`."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from random_models import to_device

import redcoast as rc
from redcoast.dryrun._flops import contractions
from redcoast.dryrun.hlo import collectives
from redcoast.models.llama import Llama, LlamaConfig
from redcoast.sharding import _plan
from redcoast.sharding._from_program import plan_program
from redcoast.sharding._memory_plan import MemoryTask, plan_within
from redcoast.sharding.constrain._recompute import Recomputed
from redcoast.sharding.memory import _recompute_solver
from redcoast.sharding.memory._recompute_solver import footprint

LAYERS, WIDTH, ROWS = 4, 32, 128
# As in a dry run that stands in for an accelerator. Without the last one, the compiler for CPUs
# undoes recomputation, and sums all gradients of a layer together.
OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
    "xla_disable_hlo_passes": "cse_barrier_expander,cpu-all-reduce-combiner",
}


def layer(x, p):
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


def in_a_loop(model, batch, key):
    for p in model:
        batch = layer(batch, p)
    return jnp.mean(batch**2)


def in_a_scan(model, batch, key):
    batch, _ = jax.lax.scan(lambda x, p: (layer(x, p), None), batch, model)
    return jnp.mean(batch**2)


def make_model(width=WIDTH):
    shapes = {"up": (width, 4 * width), "down": (4 * width, width)}
    return [{name: array(shape, i) for name, shape in shapes.items()} for i in range(LAYERS)]


def array(shape, seed=9):
    return to_device(np.random.default_rng(seed).normal(0, 0.2, shape), np.float32)


def half(loss, model, batch, mesh, *, part=0.5, **options):
    """A plan that saves a part of the memory of activations, and its limit."""
    plan = rc.plan_shardings(model, mesh, fn=loss, args=(batch, None), **options)
    memory = plan.report.program.memory
    limit = memory.total - round(part * memory.activations)
    plan = rc.plan_shardings(model, mesh, fn=loss, args=(batch, None), memory=limit, **options)
    return plan, limit


def plan_in_turn(loss, model, batch, mesh, parts):
    """The first plan for less memory in whose loop iterations in turn keep different values."""
    (before,) = loops_of(loss, model, batch)
    for part in parts:
        plan, _ = half(loss, model, batch, mesh, part=part)
        (loop,) = loops_of(plan.constrain(loss), model, batch)
        if loop["length"] < before["length"]:
            return plan
    pytest.fail("With no limit, iterations in turn keep different values.")


def compiled(loss, model, batch):
    return jax.jit(jax.grad(loss)).lower(model, batch, None).compile(compiler_options=OPTIONS)


@pytest.mark.thorough
@pytest.mark.parametrize("loss", [pytest.param(in_a_loop, marks=pytest.mark.thorough), in_a_scan])
def test_half_of_the_activations(loss):
    """Models that say nothing of rematerialisation: half of the temporaries, the same gradients."""
    model, batch = make_model(), array((ROWS, WIDTH))
    if loss is in_a_scan:
        model = stacked(model)
    plan, limit = half(loss, model, batch, rc.make_mesh(devices=jax.devices()[:1]))
    report: Any = plan.report.program
    assert report.memory.total <= limit
    # At most the products that `jax.checkpoint` of each layer would compute again: one of six.
    assert 0 <= report.recomputed.share < 0.17
    assert "test_memory_plan.py" in str(plan)
    assert "more arithmetic" in str(plan)
    plain, again = (compiled(fn, model, batch) for fn in (loss, plan.constrain(loss)))
    analyses: list[Any] = [one.memory_analysis() for one in (plain, again)]
    before, after = (one.temp_size_in_bytes for one in analyses)
    assert after < 0.65 * before
    expected, actual = plain(model, batch, None), again(model, batch, None)
    for x, y in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-5, atol=1e-6 * np.abs(x).max())


@pytest.mark.thorough
def test_over_a_mesh():
    """Sizes are those of each device, and shardings stay what they are."""
    model, batch = make_model(), array((ROWS, WIDTH))
    mesh = rc.make_mesh(data=2, fsdp=2, model=2)
    plan, limit = half(in_a_loop, model, batch, mesh, part=0.15)
    assert plan.report.program.memory.total <= limit
    expected = jax.jit(jax.grad(in_a_loop))(model, batch, None)
    actual = jax.jit(jax.grad(plan.constrain(in_a_loop)))(model, batch, None)
    for x, y in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-4, atol=1e-5 * np.abs(x).max())


@pytest.mark.thorough
def test_iterations_of_a_loop_keep_different_values():
    """Where it is too much to keep the same of all layers, and too little, layers take turns."""
    model, batch = stacked(make_model()), array((ROWS, WIDTH))
    mesh = rc.make_mesh(devices=jax.devices()[:1])
    plan = plan_in_turn(in_a_scan, model, batch, mesh, (0.76, 0.74, 0.72, 0.78, 0.7))
    # If all layers computed the product again, the share would be one of six.
    report: Any = plan.report.program
    assert 0 < report.recomputed.share < 0.1
    plain, again = (compiled(fn, model, batch) for fn in (in_a_scan, plan.constrain(in_a_scan)))
    for x, y in zip(
        *(jax.tree.leaves(one(model, batch, None)) for one in (plain, again)), strict=True
    ):
        np.testing.assert_allclose(y, x, rtol=1e-5, atol=1e-6 * np.abs(x).max())


@pytest.mark.thorough
def test_layers_that_take_turns_are_gathered_one_at_a_time():
    """The stacks stay sharded, and no gathered weights wait in the loop for the backward pass."""
    model, batch = stacked(make_model(width=64)), array((8 * ROWS, 64))
    mesh = rc.make_mesh(fsdp=8)
    plan = plan_in_turn(in_a_scan, model, batch, mesh, (0.75, 0.7, 0.72, 0.78))
    again = plan.constrain(in_a_scan)
    placed = jax.device_put(model, plan.shardings)
    rows = jax.device_put(batch, rc.batch_shardings(batch, mesh))
    lowered = jax.jit(jax.grad(again), out_shardings=plan.shardings).lower(placed, rows, None)
    program = lowered.compile(compiler_options=OPTIONS)
    layer = sum(x.nbytes for x in jax.tree.leaves(model)) / LAYERS
    report: Any = plan.report.program
    # With its weights and their gradients, which are whole while a layer runs.
    analysis: Any = program.memory_analysis()
    assert report.memory.activations == pytest.approx(analysis.temp_size_in_bytes, rel=0.1)
    # As in a loop whose layers all keep the same: twice, and the gradients once to and fro.
    assert report.traffic[0].bytes < 2.2 * LAYERS * layer
    plain = rc.plan_shardings(model, mesh, fn=in_a_scan, args=(batch, None)).constrain(in_a_scan)
    expected, actual = jax.jit(jax.grad(plain))(placed, rows, None), program(placed, rows, None)
    for x, y in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        np.testing.assert_array_equal(y, x)


@pytest.mark.thorough
def test_a_plan_counts_the_weights_of_a_layer_and_their_gradients():
    """Beside a few rows, a layer is all that a step needs, whatever is recomputed."""
    model, batch = stacked(make_model()), array((8, WIDTH))
    mesh = rc.make_mesh(fsdp=8)
    layer = sum(x.nbytes for x in jax.tree.leaves(model)) / LAYERS
    plan = rc.plan_shardings(model, mesh, fn=in_a_scan, args=(batch, None))
    memory = plan.report.program.memory
    rows = jax.device_put(batch, rc.batch_shardings(batch, mesh))
    placed = jax.device_put(model, plan.shardings)
    differentiate = jax.jit(jax.grad(plan.constrain(in_a_scan)), out_shardings=plan.shardings)
    program = differentiate.lower(placed, rows, None).compile(compiler_options=OPTIONS)
    analysis: Any = program.memory_analysis()
    assert memory.activations > layer
    assert memory.activations == pytest.approx(analysis.temp_size_in_bytes, rel=0.25)
    room = memory.total - memory.activations + layer
    with pytest.raises(ValueError, match="the step takes about"):
        rc.plan_shardings(model, mesh, fn=in_a_scan, args=(batch, None), memory=room)


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["cast", "nested"])
def test_stacks_that_the_loss_changes_stay_sharded(how):
    """Stacks that a loss casts, or divides into groups for a loop in a loop, are not gathered."""

    def loss(model, batch, key):
        if how == "cast":
            model = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model)
            return in_a_scan(model, batch.astype(jnp.bfloat16), key).astype(jnp.float32)
        groups = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), model)
        inner = lambda x, p: (layer(x, p), None)
        batch, _ = jax.lax.scan(lambda x, g: jax.lax.scan(inner, x, g), batch, groups)
        return jnp.mean(batch**2)

    model, batch = stacked(make_model(width=64)), array((ROWS, 64))
    mesh = rc.make_mesh(fsdp=8)
    plan = rc.plan_shardings(model, mesh, fn=loss, args=(batch, None))
    placed = jax.device_put(model, plan.shardings)
    rows = jax.device_put(batch, rc.batch_shardings(batch, mesh))
    program = jax.jit(plan.constrain(loss)).lower(placed, rows, None).compile()
    for collective in collectives(program.as_text(), mesh):
        if collective.kind == "all-gather":
            assert collective.count == LAYERS
    expected = jax.jit(loss)(model, batch, None)
    np.testing.assert_allclose(program(placed, rows, None), expected, rtol=1e-2)


@pytest.mark.thorough
def test_loops_that_run_backwards_take_turns_in_order():
    """A loop over time from the last to the first step, whose results are collected."""

    def loss(model, batch, key):
        def step(carry, row):
            carry = jnp.tanh(carry @ model["up"]) @ model["down"] + row
            return carry, jnp.sin(carry)

        last, seen = jax.lax.scan(step, batch[0], batch, reverse=True)
        return jnp.mean(last**2) + jnp.mean(seen * jnp.arange(12.0)[:, None, None])

    model, batch = make_model()[0], array((12, 16, WIDTH))
    mesh = rc.make_mesh(devices=jax.devices()[:1])
    parts = (0.15, 0.2, 0.25, 0.35, 0.38, 0.4, 0.45, 0.5)
    plan = plan_in_turn(loss, model, batch, mesh, parts)
    expected = jax.jit(jax.grad(loss))(model, batch, None)
    actual = jax.jit(jax.grad(plan.constrain(loss)))(model, batch, None)
    for x, y in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-5, atol=1e-6 * np.abs(x).max())


@pytest.mark.thorough
def test_more_memory_costs_less_time():
    """Between the best choices of a price there are others, which use the memory."""
    model, batch = make_model(), array((ROWS, WIDTH))
    mesh = rc.make_mesh(devices=jax.devices()[:1])
    compute = rc.plan_shardings(model, mesh, fn=in_a_loop, args=(batch, None)).compute
    _, _, solver = Recomputed(in_a_loop, mesh, compute).read(model, (batch, None), (True,) * 8)
    everything, _ = footprint(solver.flat, solver.keep_all())
    limits = np.linspace(0.31, 0.7, 14) * everything
    candidates = [solver.least_within(limit) for limit in limits]
    assert all(one.bytes <= limit for one, limit in zip(candidates, limits, strict=True))
    seconds = [one.seconds for one in candidates]
    assert seconds == sorted(seconds, reverse=True)
    # Each of the four layers has a product that may be computed again, and more cheap operations.
    assert len(set(seconds)) > 5


@pytest.mark.thorough
@pytest.mark.parametrize("part", [0.4, pytest.param(0.6, marks=pytest.mark.thorough)])
def test_products_that_are_recomputed_are_those_that_the_plan_says(part):
    """Also of operations whose derivative uses their result, as `exp` and `tanh`."""

    def loss(model, batch, key):
        def attend(x, p):
            q, k = x @ p["up"], x @ p["up"][::-1]
            y = jax.nn.softmax(q @ k.T) @ jnp.tanh(q)
            return x + jax.nn.gelu(y) @ p["down"], None

        x, _ = jax.lax.scan(attend, batch, model)
        return jnp.mean(x**2)

    model, batch = stacked(make_model()), array((ROWS, WIDTH))
    plan, _ = half(loss, model, batch, rc.make_mesh(devices=jax.devices()[:1]), part=part)
    plain, again = (products_of(fn, model, batch) for fn in (loss, plan.constrain(loss)))
    report: Any = plan.report.program.recomputed
    assert again - plain == report.flops
    expected = jax.jit(jax.grad(loss))(model, batch, None)
    actual = jax.jit(jax.grad(plan.constrain(loss)))(model, batch, None)
    for x, y in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-4, atol=1e-5 * np.abs(x).max())


def products_of(loss, model, batch):
    return contractions(jax.make_jaxpr(jax.grad(loss))(model, batch, None)).flops["float32"]


@pytest.mark.thorough
def test_remat_auto_is_the_least_that_fits():
    """Of a model of the library: less than its layers as a whole, said in the first lines."""
    config = LlamaConfig(
        vocab=64, width=64, layers=4, heads=4, kv_heads=4, hidden=256, remat="auto"
    )
    model = Llama(config, key=jax.random.key(0))
    tokens = to_device(np.random.default_rng(0).integers(0, 64, (8, 64)), np.int32)
    loss = lambda model, tokens, key: jnp.mean(model(tokens) ** 2)
    plan, limit = half(loss, model, tokens, rc.make_mesh(devices=jax.devices()[:1]))
    report: Any = plan.report.program
    assert report.memory.total <= limit
    # The forward pass is a third of a step.
    assert 0 < report.recomputed.share < 0.25
    assert "more arithmetic" in str(plan)
    expected = eqx.filter_jit(jax.grad(loss))(model, tokens, None)
    actual = eqx.filter_jit(jax.grad(plan.constrain(loss)))(model, tokens, None)
    for x, y in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-4, atol=1e-5 * np.abs(x).max())


def stacked(layers):
    return jax.tree.map(lambda *xs: to_device(np.stack(xs)), *layers)


def loops_of(loss, model, batch):
    """The parameters of the loops of a loss."""
    program = jax.make_jaxpr(loss)(model, batch, None)
    return [eqn.params for eqn in program.eqns if eqn.primitive.name == "scan"]


@pytest.mark.thorough
def test_activations_are_split_along_the_sequence_before_any_is_recomputed():
    """Sequence parallelism takes less memory on `model`, and no arithmetic."""
    config = LlamaConfig(vocab=64, width=64, layers=8, heads=4, kv_heads=4, hidden=256)
    model = eqx.filter_eval_shape(lambda key: Llama(config, key=key), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((2, 256), jnp.int32)
    loss = lambda model, tokens, key: jnp.mean(model(tokens) ** 2)
    options = {"fn": loss, "args": (tokens, None), "hardware": rc.Hardware(compiler="gpu")}
    make = partial(rc.plan_shardings, model, rc.make_mesh(data=2, model=4), **options)
    limit = make(sequence=True).report.program.memory.total
    assert limit < make().report.program.memory.total
    plan = make(memory=limit)
    assert plan.compute.sequence_parallel
    assert plan.report.program.recomputed is None


@pytest.mark.thorough
def test_a_layer_can_keep_any_of_its_products(monkeypatch):
    """The solver also finds choices that are best at no single price of a byte."""
    monkeypatch.setattr(_recompute_solver, "_PERIODS", ())  # all layers keep the same

    def centred(x):
        x = x - jnp.mean(x, -1, keepdims=True)
        return x * jax.lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5)

    def run(x, p):
        q, k, v = (centred(x) @ p[name] for name in "qkv")
        x = x + jnp.tanh(q * jnp.tanh(k) * jnp.tanh(v)) @ p["o"]
        return x + jax.nn.gelu(centred(x) @ p["up"]) @ p["down"], None

    def loss(model, x, key):
        return jnp.mean(centred(jax.lax.scan(run, x, model)[0]) ** 2)

    shapes = dict.fromkeys("qkvo", (8, WIDTH, WIDTH))
    shapes |= {"up": (8, WIDTH, 4 * WIDTH), "down": (8, 4 * WIDTH, WIDTH)}
    model = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    args = (jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32), None)
    mesh = rc.make_mesh(devices=jax.devices()[:1])
    plan = rc.plan_shardings(model, mesh, fn=loss, args=args)
    _, _, solver = Recomputed(loss, mesh, plan.compute).read(model, args, (True,) * len(shapes))
    product = 2 * 8 * ROWS * WIDTH * WIDTH  # of a width
    recomputed: set[int] = set()
    for step in range(1, 60):
        candidate = solver.least_within(step / 60 * solver.total)
        recomputed.add(round(candidate.flops / product))
    # `up` is four products.
    assert recomputed >= {8, 7, 6, 4, 3, 0}


def test_nothing_changes_where_it_fits():
    model, batch = make_model(), array((ROWS, WIDTH))
    mesh = rc.make_mesh(devices=jax.devices()[:1])
    plan = rc.plan_shardings(model, mesh, fn=in_a_loop, args=(batch, None), memory=1e9)
    assert plan.report.program.recomputed is None
    assert plan.constrain(in_a_loop) is in_a_loop


@pytest.mark.thorough
def test_auto_is_the_memory_of_the_hardware():
    model, batch = make_model(), array((ROWS, WIDTH))
    mesh = rc.make_mesh(devices=jax.devices()[:1])
    options = {"fn": in_a_loop, "args": (batch, None), "memory": "auto"}
    assert rc.plan_shardings(model, mesh, **options).report.program.recomputed is None
    total = rc.plan_shardings(model, mesh, **options).report.program.memory.total
    small = rc.Hardware(memory=total)
    plan = rc.plan_shardings(model, mesh, hardware=small, **options)
    assert plan.report.program.recomputed is not None
    assert plan.report.program.memory.total <= 0.85 * total


@pytest.mark.thorough
def test_frozen_arrays_need_less():
    """What is not trained has no gradient that needs the values that it is multiplied by."""
    model, batch = make_model(), array((ROWS, WIDTH))
    mesh = rc.make_mesh(devices=jax.devices()[:1])
    trainable = [{"up": False, "down": i == 0} for i in range(LAYERS)]
    plan, limit = half(in_a_loop, model, batch, mesh, trainable=trainable)
    assert plan.compute.recompute is not None
    assert plan.report.program.memory.total <= limit
    assert plan.compute.recompute.trained == (True, *[False] * (2 * LAYERS - 1))


@pytest.mark.thorough
def test_a_saved_plan_recomputes_the_same(tmp_path):
    model, batch = make_model(), array((ROWS, WIDTH))
    mesh = rc.make_mesh(devices=jax.devices()[:1])
    plan, _ = half(in_a_loop, model, batch, mesh)
    rc.save_plan(plan, tmp_path / "plan.json")
    loaded = rc.load_plan(tmp_path / "plan.json", model, mesh)
    assert loaded.compute == plan.compute
    assert loaded.report.program.recomputed == plan.report.program.recomputed


@pytest.mark.thorough
def test_fit_trains_within_memory():
    """The losses of a run with a limit are those of a run without one."""
    rows = list(np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32))

    def loss_fn(model, batch, key):
        return jnp.mean((jax.vmap(model)(batch) - batch) ** 2)

    def run(memory):
        losses = []
        model = eqx.nn.MLP(8, 8, 64, depth=4, key=jax.random.key(0))
        rc.fit(
            model,
            optax.sgd(0.1),
            rows,
            collate_fn=np.stack,
            loss_fn=loss_fn,
            batch_size=32,
            steps=3,
            mesh=rc.make_mesh(devices=jax.devices()[:1]),
            log=[lambda metrics, step: losses.append(metrics["loss"])],
            memory=memory,
        )
        return losses

    np.testing.assert_allclose(run(185e3), run(None), rtol=1e-6)


@pytest.mark.thorough
def test_the_state_of_an_optimizer_waits_in_the_memory_of_the_host(monkeypatch, tmp_path):
    """Where recomputation does not suffice. A run ends with the same bits as without a limit."""
    monkeypatch.setattr(_plan, "has_own_memory", lambda mesh: True)  # as of a GPU
    rows = list(np.random.default_rng(0).normal(size=(256, 8)).astype(np.float32))
    mesh = rc.make_mesh(data=1, fsdp=2, devices=jax.devices()[:2])
    model = eqx.nn.MLP(8, 8, 64, depth=4, key=jax.random.key(0))
    options = {
        "collate_fn": np.stack,
        "loss_fn": lambda model, x, key: jnp.mean((jax.vmap(model)(x) - x) ** 2),
        "batch_size": 128,
        "mesh": mesh,
        "log": [],
    }
    optimizer = optax.adam(1e-2)
    spec = jax.ShapeDtypeStruct((128, 8), jnp.float32)
    state = rc.init_state(lambda key: model, optimizer, key=jax.random.key(0))
    keeping = rc.plan_step(state, options["loss_fn"], spec, mesh).report.program.memory
    memory = keeping.total - keeping.activations + 64e3
    plan = rc.plan_step(state, options["loss_fn"], spec, mesh, memory=memory)
    assert plan.report.program.offloaded == keeping.optimizer_state
    assert plan.report.program.memory.total <= memory
    assert "of optimizer state are in the memory of the host" in str(plan)
    rc.save_plan(plan, tmp_path / "plan.json")
    assert rc.load_plan(tmp_path / "plan.json", state, mesh).shardings == plan.shardings

    def run(steps, memory, name):
        checkpoints = rc.Checkpoints(tmp_path / name)
        state = rc.fit(
            model, optimizer, rows, **options, steps=steps, memory=memory, checkpoints=checkpoints
        )
        return state

    run(2, memory, "host")
    offloaded, expected = run(4, memory, "host"), run(4, None, "device")
    states = [x for x in jax.tree.leaves(offloaded.opt_state) if x.ndim]
    assert {x.sharding.memory_kind for x in states} == {"pinned_host"}
    same = [eqx.filter(one, eqx.is_inexact_array) for one in (offloaded, expected)]
    for x, y in zip(*map(jax.tree.leaves, same), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("memory", "error", "match"),
    [
        (1000, ValueError, "too small: with all that can be recomputed"),
        (0, ValueError, "must be a positive number of bytes"),
        (float("nan"), ValueError, "must be a positive number of bytes"),
        ("16GB", TypeError, "memory"),
        (True, TypeError, "must be the bytes of each device"),
    ],
)
def test_bad_memory(memory, error, match):
    model, batch = make_model(), array((ROWS, WIDTH))
    mesh = rc.make_mesh(devices=jax.devices()[:1])
    with pytest.raises(error, match=match):
        rc.plan_shardings(model, mesh, fn=in_a_loop, args=(batch, None), memory=memory)


def test_a_model_of_one_array_has_no_state_to_keep_on_the_host(monkeypatch):
    """Its path is empty, and a dict may have a key like a field of a training state."""
    monkeypatch.setattr(_plan, "has_own_memory", lambda mesh: True)  # as of a GPU
    mesh = rc.make_mesh(devices=jax.devices()[:1])
    for wrap in (lambda w: w, lambda w: {"opt_state": w}):
        loss = lambda model, x, key: jnp.mean(jnp.tanh(x @ jax.tree.leaves(model)[0]))
        args = (array((8, WIDTH)), None)
        plan = rc.plan_shardings(wrap(array((WIDTH, 8))), mesh, fn=loss, args=args, memory=1e9)
        assert plan.report.program.offloaded == 0


@pytest.mark.thorough
def test_values_are_kept_as_the_step_is_divided_in_the_end():
    """If the plan with recomputation has other shardings, its kept values are chosen for these."""
    model, batch = stacked(make_model()), array((ROWS, WIDTH))
    mesh = rc.make_mesh(data=1, fsdp=4, model=2)
    seen = []

    def plan(fn, sequence):
        overrides = []
        if isinstance(fn, Recomputed):
            overrides = [("up", P(None, "model", "fsdp")), ("down", P(None, "fsdp", "model"))]
            seen.append(fn.compute)
        return plan_program(
            model, mesh, fn, (batch, None), overrides=overrides, trainable=eqx.is_inexact_array,
            hardware=rc.Hardware(), budget=None, state_bytes=0, updated={}, sequence=sequence,
        )  # fmt: skip

    memory = plan(in_a_scan, False)[2].memory
    task = MemoryTask(in_a_scan, model, (batch, None), mesh, eqx.is_inexact_array, plan, True)
    limit = memory.total - 0.3 * memory.activations
    _, compute, report = plan_within(task, limit, must_fit=True)
    assert seen[0].dims == (1, 2)
    assert seen[-1].dims == compute.dims == (2, 1)
    assert report.memory.total <= limit
    _, _, solver = Recomputed(in_a_scan, mesh, compute).read(model, (batch, None), (True, True))
    recompute: Any = compute.recompute
    most, _ = footprint(solver.flat, solver.solve(recompute))
    assert most <= 1.01 * report.memory.activations


def test_memory_needs_a_loss():
    model, batch = make_model(), array((ROWS, WIDTH))
    mesh = rc.make_mesh(devices=jax.devices()[:1])
    with pytest.raises(ValueError, match="`memory` needs a function"):
        rc.plan_shardings(model, mesh, memory=1e9)
    predict = lambda model, batch: layer(batch, model[0])
    with pytest.raises(ValueError, match="not a floating point scalar"):
        rc.plan_shardings(model, mesh, fn=predict, args=(batch,), memory=1000)
