"""Dry runs with the CPU compiler: the figures, the report, suggested changes, and errors."""

import functools as ft
import gc
import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.core import Tracer

import redcoast as rc
from redcoast.core._target import target
from redcoast.dryrun import _devices as devices
from redcoast.dryrun import _dry_run
from redcoast.dryrun._changes import can_rematerialise, find_changes, rematerialised
from redcoast.dryrun._compile_job import Compiled, cause, needed_bytes
from redcoast.dryrun._job import make_job
from redcoast.dryrun.hlo import collectives, peak_bytes, temporary_bytes
from redcoast.models import GPT2, GPT2Config

CONFIG = GPT2Config(256, 64, 2, 4, 256, positions=32)
TOKENS = jax.ShapeDtypeStruct((16, 32), np.int32)
OPTIMIZER = optax.adamw(1e-3)


def init_fn(key):
    return GPT2(CONFIG, key=key)


def loss_fn(model, tokens, key):
    logits = model(tokens, key=key)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    return losses.mean()


def init_wide(key):
    return {"up": jnp.zeros((2**14, 2**15)), "down": jnp.zeros((2**15, 2**14))}


def wide_loss(model, x, key):
    return jnp.mean((jnp.tanh(x @ model["up"]) @ model["down"]) ** 2)


WIDE = jax.ShapeDtypeStruct((8, 2**14), np.float32)
SIZES = {"data": 2, "fsdp": 2, "model": 2}


@pytest.fixture(scope="module")
def run():
    return rc.dry_run(init_fn, loss_fn, TOKENS, OPTIMIZER, target="cpu:8", mesh=SIZES)


@pytest.mark.thorough
def test_the_step_is_the_one_that_fit_compiles(run):
    mesh = rc.make_mesh(data=2, fsdp=2, model=2)
    state = eqx.filter_eval_shape(rc.init_state, init_fn, OPTIMIZER, key=jax.random.key(0))
    plan = rc.plan_shardings(state, mesh, fn=loss_fn, args=(TOKENS, jax.random.key(0)))
    step = ft.partial(rc.train_step, loss_fn=plan.constrain(loss_fn), optimizer=OPTIMIZER)
    sharding = jax.NamedSharding(mesh, jax.P(("data", "fsdp")))
    batch = jax.ShapeDtypeStruct(TOKENS.shape, TOKENS.dtype, sharding=sharding)
    compiled = rc.compile_step(step, plan.shardings).lower(state, batch).compile()
    memory: Any = compiled.memory_analysis()
    peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    assert run.memory["peak"] == pytest.approx(peak, rel=0.01)
    sent = sum(
        collective.count * collective.sent_bytes
        for collective in collectives(compiled.as_text(), mesh)
    )
    assert run.sent_bytes == pytest.approx(sent, rel=0.01)
    assert str(run.plan) == str(plan)


@pytest.mark.parametrize(("name", "platform"), [("h100:2", "gpu"), ("v4:2x2x1", "tpu")])
def test_the_step_is_traced_for_the_target(name, platform):
    """With or without the target's compiler."""
    seen = []

    def loss_fn(model, x, key):
        seen.append(target().platform)
        return jnp.mean((x @ model) ** 2)

    x = jax.ShapeDtypeStruct((8, 4), np.float32)
    rc.dry_run(lambda key: jnp.ones((4, 4)), loss_fn, x, optax.sgd(0.1), target=name)
    assert set(seen) == {platform}
    assert target().platform == jax.default_backend()


def test_no_arrays_are_created():
    def traced(key):
        assert isinstance(key, Tracer)
        return init_wide(key)

    gc.collect()  # what earlier tests left may go at any time
    before = len(jax.live_arrays())
    rc.dry_run(traced, wide_loss, WIDE, OPTIMIZER, target="cpu:8", mesh={"model": 8})
    assert len(jax.live_arrays()) <= before


@pytest.mark.thorough
def test_memory_adds_up(run):
    memory = run.memory
    weights = sum(
        x.size for x in jax.tree.leaves(eqx.filter(init_fn(jax.random.key(0)), eqx.is_array))
    )
    # Large arrays are split over all of fsdp x model, and a few small ones are whole.
    assert weights * 4 / 4 < memory["parameters"] < weights * 4 / 3
    assert memory["optimizer_state"] == pytest.approx(2 * memory["parameters"], abs=64)
    assert memory["gradients"] == memory["parameters"]
    assert memory["batch"] == 16 * 32 * 4 / 4
    parts = sum(memory[key] for key in ("parameters", "optimizer_state", "other", "batch"))
    assert memory["peak"] == pytest.approx(parts + memory["temporaries"], rel=0.01)
    assert run.fits
    assert memory["peak"] < memory["usable"] == 16 * 2**30


def test_traffic_and_bounds_follow_from_the_program(run):
    assert run.sent_bytes == sum(one["bytes"] for one in run.traffic) > 0
    assert {one["axis"] for one in run.traffic} <= {
        "data",
        "fsdp",
        "model",
        "data+fsdp",
        "data+fsdp+model",
        "fsdp+model",
        "data+model",
    }
    parts = {one["cause"].partition(":")[0] for one in run.traffic}
    assert {"forward", "backward"} <= parts
    per_axis = sum(one["bytes"] for one in run.traffic if one["axis"] == "model")
    assert run.bounds.network["model"] == pytest.approx(per_axis / 1e10)
    # 6 operations for each weight of a product and token, and attention's; on each of 8 devices.
    weights = 2 * 12 * 64 * 64 + 256 * 64
    tokens = 16 * 32
    exact = 6 * weights * tokens + 2 * 12 * tokens * 32 * 64
    assert sum(run.arithmetic.values()) == pytest.approx(exact / 8, rel=0.01)
    assert run.bounds.arithmetic == pytest.approx(exact / 8 / 1e11, rel=0.01)


def test_a_batch_that_every_device_computes_halves_the_bound():
    loss_fn = lambda model, x, key: jnp.mean((x @ model) ** 2)
    batch = jax.ShapeDtypeStruct((3, 128), jnp.float32)  # does not divide over 2 devices
    inputs = (lambda key: jnp.zeros((128, 128)), loss_fn, batch, optax.sgd(0.1))
    run: Any = rc.dry_run(*inputs, target="cpu:2", mesh={"data": 2})
    assert 0 < run.bounds.utilisation <= 0.5
    assert "50% of the arithmetic is repeated by several devices" in str(run)


def test_what_is_sent_belongs_to_lines_of_code(run):
    """In a constrained program too, whose operations are bound again by redcoast."""
    assert sum(one["bytes"] for one in run.lines) == run.sent_bytes
    own = [one for one in run.lines if one["file"] == __file__ or "/models/" in one["file"]]
    assert sum(one["bytes"] for one in own) >= 0.95 * run.sent_bytes
    text = run.by_line()
    assert all(len(line) <= 80 for line in text.splitlines())
    for words in ("as compiled, by line of code", "As planned", "memory MB"):
        assert words in text


def test_temporaries_at_the_peak_belong_to_lines_of_code(run):
    """Their sum is about what the compiler reports, and nearly all have a line."""
    total = sum(one["memory_bytes"] for one in run.lines)
    assert total == pytest.approx(run.memory["temporaries"], rel=0.25)
    own = [one for one in run.lines if one["file"] == __file__ or "/models/" in one["file"]]
    assert sum(one["memory_bytes"] for one in own) >= 0.75 * total


def test_what_the_compiler_adds_is_said(run):
    added = [one for one in run.lines if one["bytes"] and not one["planned_bytes"]]
    planned = [one for one in run.lines if one["bytes"] and one["planned_bytes"]]
    assert sum(one["bytes"] for one in planned) >= 0.8 * run.sent_bytes
    assert ("added by the compiler" in run.by_line()) == bool(added)


def test_report_is_plain_data(run):
    report = json.loads(json.dumps(run.report))
    assert report["memory"] == run.memory
    assert report["mesh"] == SIZES
    assert report["bounds"]["binding"] == run.bounds.binding
    assert report["plan"]["mesh"] == SIZES
    assert report["changes"] == []


def test_table(run):
    text = str(run)
    assert all(len(line) <= 80 for line in text.splitlines())
    for words in ("It fits: ", "Memory per device", "temporaries"):
        assert words in text
    for words in ("Communication per device and step: ", "model: all-reduce, forward: dot_general"):
        assert words in text
    for words in ("Upper bound on utilisation: ", "<- the bottleneck", "rough guesses"):
        assert words in text


def test_table_says_where_the_plan_has_less_communication(run):
    """Nothing else compares the sums; `by_line` compares lines."""
    planned = sum(one.bytes for one in run.plan.report.program.traffic)
    unplanned = [line for line in run.lines if not line["planned_bytes"]]
    assert "The plan has" not in str(replace(run, sent_bytes=planned))
    text = " ".join(str(replace(run, sent_bytes=2 * planned)).split())
    assert "The plan has" in text
    assert ("on lines where it has none" in text) == any(line["bytes"] for line in unplanned)


@pytest.mark.thorough
def test_mesh_is_chosen_by_estimated_cost():
    inputs = (init_wide, wide_loss, WIDE, OPTIMIZER)
    # Copies of the model do not fit, and there are few examples for its size.
    assert rc.dry_run(*inputs, target="cpu:2").mesh["data"] == 1
    alone = rc.dry_run(*inputs, target="cpu:1", suggest=False)
    assert "Devices do not communicate" in str(alone)
    assert alone.sent_bytes == 0
    # Two products forward, and three backward: the batch has no gradient.
    assert alone.arithmetic == {"float32": 5 * 2 * 8 * 2**14 * 2**15}


def test_where_no_plan_fits_the_smallest_compiled_mesh_is_shown(monkeypatch):
    """Plans are off by more than such meshes differ."""
    place = replace(devices.target_place("cpu:4"), usable=10**5)
    monkeypatch.setattr(_dry_run, "target_place", lambda name: place)
    make = lambda key: {"up": jnp.zeros((64, 256)), "down": jnp.zeros((256, 64))}
    batch = jax.ShapeDtypeStruct((512, 64), jnp.float32)
    run = rc.dry_run(make, wide_loss, batch, OPTIMIZER, target="cpu:4", suggest=False)
    needed = re.findall(r"model=\d needs (\S+) GB", run.notes[-1])
    assert len(set(needed)) == 3
    assert needed[0] != min(needed, key=float)  # that of the smallest plan
    assert f"{run.memory['peak'] / 1e9:.4g}" == min(needed, key=float)


@pytest.mark.thorough
def test_a_step_that_is_too_large():
    mesh = rc.make_mesh(data=8)
    run = rc.dry_run(init_wide, wide_loss, WIDE, OPTIMIZER, target="cpu:8", mesh=mesh)
    assert not run.fits
    assert run.memory["peak"] >= 4 * 4 * 2**30  # weights, two moments and gradients
    assert [change.what.partition(" ")[0] for change in run.changes] == ["mesh"]
    assert run.changes[0].peak <= run.memory["usable"]
    assert "It does not fit: " in str(run)
    assert "Each of these changes makes it fit" in str(run)
    again = rc.dry_run(
        init_wide, wide_loss, WIDE, OPTIMIZER, target="cpu:8", mesh=run.changes[0].mesh
    )
    assert again.fits
    assert again.memory["peak"] == run.changes[0].peak
    quick = rc.dry_run(
        init_wide, wide_loss, WIDE, OPTIMIZER, target="cpu:8", mesh={"data": 8}, suggest=False
    )
    assert quick.changes == ()


class Peaks:
    """A compiler whose peaks are known."""

    def __init__(self, peak):
        self._peak, self.seen = peak, []

    def __call__(self, job, mesh):
        training = job.training
        rows = job.rows // training.accumulate
        remat = not can_rematerialise(job.state.model)
        split = mesh["fsdp"] * mesh["model"]
        is_narrow = training.compute_dtype is not None
        self.seen.append((split, remat, training.accumulate, is_narrow))
        peak = self._peak(split, rows, remat, is_narrow)
        return Compiled(peak, 0, 0, (), 0.0)


def changes_for(run, peak, usable):
    make = ft.partial(make_job, loss_fn=loss_fn, batch=TOKENS, optimizer=OPTIMIZER)
    job, compiler = make(init_fn), Peaks(peak)
    small = type(run)(**{**vars(run), "mesh": {"data": 4, "fsdp": 1, "model": 1},
                         "memory": {"usable": usable}})  # fmt: skip
    others = [{"data": 2, "fsdp": 2, "model": 1}, {"data": 1, "fsdp": 4, "model": 1}]
    actual = find_changes(make, init_fn, job, small, others, compiler)
    return [one.what for one in actual], compiler.seen


def test_changes_are_the_smallest_of_their_kind(run):
    peak = lambda split, rows, remat, low: 100 // split + 8 * rows // (1 + remat) // (1 + low)
    actual, _ = changes_for(run, peak, 180)
    assert actual == [
        "mesh data=2, fsdp=2, model=1",
        'remat="full" in the model',
        "accumulate=2",
        "compute_dtype=bfloat16",
    ]


@pytest.mark.thorough
def test_changes_are_combined_if_none_is_enough(run):
    peak = lambda split, rows, remat, low: 100 // split + 8 * rows // (1 + remat) // (1 + low)
    actual, seen = changes_for(run, peak, 70)
    assert actual == ['mesh data=2, fsdp=2, model=1 and remat="full" in the model and accumulate=4']
    assert (2, True, 2, False) in seen  # not enough
    # What turns out not to be needed is left out again.
    peak = lambda split, rows, remat, low: 100 - 40 * remat - 40 * (rows < 8)
    assert changes_for(run, peak, 30)[0] == ['remat="full" in the model and accumulate=4']
    assert changes_for(run, peak, 10)[0] == []


def test_a_change_that_cannot_be_compiled_is_skipped(run):
    def peak(split, rows, remat, low):
        if split > 1:
            raise RuntimeError("The compiler failed.")
        return 100 - 50 * remat

    assert changes_for(run, peak, 60)[0] == ['remat="full" in the model']


def failing(message):
    def compile(self, compiler_options):
        raise jax.errors.JaxRuntimeError(message)

    return compile


@pytest.mark.thorough
def test_a_step_that_the_compiler_rejects(monkeypatch):
    message = (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (57.50G) exceeds available HBM (30.75G)."
    )
    monkeypatch.setattr(jax.stages.Lowered, "compile", failing(message))
    inputs = (init_wide, wide_loss, WIDE, OPTIMIZER)
    run = rc.dry_run(*inputs, target="cpu:2", mesh={"model": 2})
    assert run.refused
    assert not run.fits
    assert run.memory["peak"] == 57.5 * 2**30
    assert run.sent_bytes is run.bounds is run.report["bounds"] is None
    text = str(run)
    for words in (
        "at least 57.50 of 16.00 GiB",
        "The communication is not known",
        "None of the compiled changes",
        "GFLOP in float32",
    ):
        assert words in text
    assert "utilis" not in text
    assert json.dumps(run.report)


def test_a_compiler_failure_is_reported(monkeypatch):
    monkeypatch.setattr(jax.stages.Lowered, "compile", failing("INTERNAL: no tile sizes"))
    with pytest.raises(RuntimeError, match="another mesh or another batch.*no tile sizes"):
        rc.dry_run(init_wide, wide_loss, WIDE, OPTIMIZER, target="cpu:2", mesh={"model": 2})


def test_the_cpu_compiler_replaces_a_missing_one(monkeypatch):
    monkeypatch.setattr(devices, "_installed", lambda compiler: False)
    inputs = (init_wide, wide_loss, WIDE, OPTIMIZER)
    run = rc.dry_run(*inputs, target="v4:2x2x1", mesh={"model": 4})
    assert run.compiler == "cpu"
    assert "pip install 'redcoast[tpu]'" in str(run).replace("\n", " ")
    assert run.memory["usable"] == 30.75 * 2**30
    assert run.report["notes"] == list(run.notes)


def init_odd(key):
    """A model with counters, a frozen array in 8 bits, and a key."""
    model, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(8, "batch", mode="batch")
    more = {"w": jnp.zeros((8, 8)), "steps": jnp.zeros((), jnp.int32), "key": jax.random.key(0)}
    return more | {"norm": model, "state": state, "frozen": jnp.zeros((8, 8), jnp.int8)}


def odd_loss(model, x, key):
    x = x @ model["w"] @ model["frozen"].astype(jnp.float32)
    norm = jax.vmap(model["norm"], axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    x, state = norm(x, model["state"])
    return jnp.mean(x**2), {}, model | {"state": state}


@pytest.mark.thorough
def test_models_with_other_arrays_than_weights():
    batch = np.zeros((8, 8), np.float32)
    inputs = (init_odd, odd_loss, batch, OPTIMIZER)
    for mesh in ({"data": 2}, {"model": 2}):
        run = rc.dry_run(*inputs, target="cpu:2", mesh=mesh)
        assert run.fits
    # The matrix, scale and shift; not the running averages.
    assert run.memory["gradients"] == 4 * (64 + 8 + 8)


def test_a_loop_whose_length_depends_on_data_is_named():
    """Without a product in it, only the time of a step depends on it."""

    def halving_loss(model, x, key):
        small = jax.lax.while_loop(lambda x: jnp.max(x) > 1, lambda x: x / 2, x)
        return jnp.mean((jax.lax.stop_gradient(small) @ model["w"]) ** 2)

    model = {"w": jnp.zeros((8, 8))}
    run = rc.dry_run(model, halving_loss, np.zeros((8, 8), np.float32), OPTIMIZER, target="cpu:1")
    assert any(note.startswith("A loop has a trip count") for note in run.notes)


def test_an_ambient_mesh_of_other_devices_is_ignored():
    with jax.set_mesh(rc.make_mesh(model=2)):
        run = rc.dry_run(init_wide, wide_loss, WIDE, OPTIMIZER, target="cpu:2", mesh={"model": 2})
        assert run.mesh == {"data": 1, "fsdp": 1, "model": 2}
        assert not jax.sharding.get_mesh().empty


def test_errors_of_the_loss_are_not_changed():
    def wrong(model, x, key):
        raise ValueError("my own error")

    with pytest.raises(ValueError, match=r"^my own error"):
        rc.dry_run(init_wide, wrong, WIDE, OPTIMIZER, target="cpu:2")
    with pytest.raises(ValueError, match=r"^my own error"):
        rc.suggest_mesh(init_wide, wrong, WIDE, OPTIMIZER, target="cpu:2")


@pytest.mark.thorough
def test_rematerialised_models_compute_the_same():
    model = init_fn(jax.random.key(0))
    again = rematerialised(init_fn)(jax.random.key(0))
    assert (model.config.remat, again.config.remat) == ("none", "full")
    assert not can_rematerialise(again)
    assert can_rematerialise({"inside": [model]})
    assert not can_rematerialise(eqx.nn.MLP(2, 2, 2, 1, key=jax.random.key(0)))
    tokens = jnp.arange(32)[None]
    np.testing.assert_allclose(model(tokens), again(tokens), rtol=1e-5)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("jit(f)/jvp()/while/body/dot_general", "forward: dot_general"),
        ("jit(f)/transpose(jvp())/while/body/checkpoint/(mul:add:mul)", "backward: add, mul"),
        ("jit(f)/transpose(jvp())/rematted_computation/exp", "rematerialised: exp"),
        ("jit(f)/reduce_sum", "outside the gradient: reduce_sum"),
        (None, "not named by the compiler"),
    ],
)
def test_causes_in_words(source, words):
    assert cause(source) == words


def test_out_of_memory_messages_of_the_tpu_compiler():
    used = "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Used 139.02G of 30.75G hbm."
    assert needed_bytes(used) == round(139.02 * 2**30)
    temporaries = "the total memory required for HLO temporaries (57.5G) exceeds available HBM"
    assert needed_bytes(temporaries) == round(57.5 * 2**30)
    assert needed_bytes("something else") is None


@pytest.mark.parametrize(
    ("sizes", "reported", "peak"),
    [
        ((16_965_632, 16_964_608, 5_741_568), 76_002_816, 39_671_808),
        ((34_619_392, 1_065_984, 146_907_136), 170_690_560, 170_690_560),
    ],
    ids=["GPT-2 beside copies on the chip", "pair matrix with fragments"],
)
def test_memory_of_a_tpu_is_neither_on_the_chip_nor_counted_twice(sizes, reported, peak):
    """Figures of libtpu for TPU v4. The optimizer's state of the second is on the host too."""
    arguments, results, temporaries = sizes
    on_host = 2**20
    memory = SimpleNamespace(
        argument_size_in_bytes=arguments,
        output_size_in_bytes=results,
        alias_size_in_bytes=0,
        temp_size_in_bytes=temporaries,
        peak_memory_in_bytes=reported + on_host,
        host_argument_size_in_bytes=on_host,
    )
    assert peak_bytes(memory, "tpu") == peak
    assert temporary_bytes(memory, "tpu") == peak - arguments - results
    assert temporary_bytes(memory, "cuda") == temporaries


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"target": "cpu:6x2"}, ValueError, "too many sizes"),
        ({"target": "v9:2"}, ValueError, "There is no target 'v9:2'"),
        ({"mesh": {"model": 3}}, ValueError, "does not match the target 'cpu:8'.*model in"),
        ({"mesh": {"tensor": 8}}, TypeError, "sizes of `data`, `fsdp`, `model` and `pipe`"),
        ({"batch": {}}, ValueError, "`batch` has no arrays"),
        ({"batch": {"x": 3}}, TypeError, "int at x"),
        ({"batch": {"x": jnp.zeros(())}}, ValueError, "x in the batch is a scalar"),
        ({"batch": {"x": TOKENS, "y": WIDE}}, ValueError, "16 at x, 8 at y"),
        ({"batch": {"x": np.zeros((0, 4))}}, ValueError, "x in the batch has no rows"),
        (
            {"batch": jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8))},
            TypeError,
            "key",
        ),
        (
            {"mesh": jax.make_mesh((8,), ("x",))},
            TypeError,
            "sizes of `data`, `fsdp`, `model` and `pipe`",
        ),
        ({"accumulate": 0}, ValueError, "`accumulate`"),
        pytest.param(
            *({"accumulate": 3}, ValueError, "`accumulate=3` does not divide"),
            marks=pytest.mark.thorough,
        ),
        ({"overrides": [("nothing", None)]}, ValueError, "nothing"),
        ({"compute_dtype": "int32"}, (TypeError, ValueError), "compute_dtype"),
    ],
)
def test_bad_input(changes, kind, words):
    options = {"init_fn": init_fn, "loss_fn": loss_fn, "batch": TOKENS, "optimizer": OPTIMIZER}
    options |= {"target": "cpu:8", "mesh": SIZES} | changes
    with pytest.raises(kind, match=f"(?s){words}"):
        rc.dry_run(**options)
