"""`suggest_mesh`: estimated and compiled meshes, and the choice among them."""

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from problem import collate_fn, loss_fn, make_examples, make_model
from processes import run_processes

import redcoast as rc
from redcoast import CHIPS
from redcoast.dryrun import _job
from redcoast.dryrun._devices import (
    Place,
    attached_place,
    planner_hardware,
    target_hardware,
    target_place,
)
from redcoast.dryrun._job import make_job, plan_job
from redcoast.dryrun._mesh_search import choose_mesh, estimate_mesh, promising, suggest
from redcoast.dryrun._mesh_table import Candidate
from redcoast.dryrun._target_name import parse_target
from redcoast.sharding.solver._hardware import gradient_sum

OPTIMIZER = optax.sgd(1e-3)


def make_mlp(width, hidden):
    """A model, its loss, and a batch with this number of rows."""
    init_fn = lambda key: {"up": jnp.zeros((width, hidden)), "down": jnp.zeros((hidden, width))}
    loss = lambda p, x, key: jnp.mean((jax.nn.relu(x @ p["up"]) @ p["down"]) ** 2)
    return lambda rows: (init_fn, loss, jax.ShapeDtypeStruct((rows, width), jnp.float32), OPTIMIZER)


SMALL, WIDE = make_mlp(64, 128)(2048), make_mlp(256, 1024)(8)


@pytest.fixture(scope="module")
def wide():
    """All compiled meshes of four devices, for large matrices and few rows."""
    return suggest(make_job(*WIDE), target_place("cpu:4"), 6)


@pytest.fixture(scope="module")
def every(wide):
    """All compiled meshes of four devices, for few and for many rows."""
    return {"small": suggest(make_job(*SMALL), target_place("cpu:4"), 6), "wide": wide}


def cases():
    return [("small", SMALL), ("wide", WIDE)]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "case"), cases())
def test_as_good_as_the_best_of_all_meshes(every, name, case):
    actual = rc.suggest_mesh(*case, target="cpu:4", compiled=2)
    compiled = {tuple(one.mesh.values()): one for one in every[name].candidates}
    assert len(compiled) == 6  # all of them
    mine = compiled[tuple(actual.values())]
    assert mine.sent_bytes <= 1.1 * min(one.sent_bytes for one in compiled.values())
    assert mine.seconds <= 1.1 * min(one.seconds for one in compiled.values())


@pytest.mark.thorough
def test_large_batches_and_large_matrices_are_sharded(every):
    assert dict(every["small"]) == {"data": 4, "fsdp": 1, "model": 1}
    assert every["wide"]["model"] == 4


def test_a_suggestion_is_a_mapping_and_a_table(wide):
    assert list(wide) == ["data", "fsdp", "model"]
    assert dict(rc.make_mesh(**wide, devices=target_place("cpu:4").devices).shape) == dict(wide)
    assert wide == {"data": 1, "fsdp": 1, "model": 4}
    assert isinstance(wide, rc.MeshSuggestion)
    head, *lines = str(wide).splitlines()
    groups, columns, *rows = lines[lines.index("") + 1 :]
    assert head == "Meshes for cpu:4: data=1, fsdp=1, model=4 is the best of 6"
    assert columns.split()[:3] == ["data", "fsdp", "model"]
    assert rows[0].split()[:3] == ["1", "1", "4"]
    assert "fits" in rows[0]
    # Each column of figures ends below the group that it belongs to.
    assert groups.split() == ["planned", "compiled"]
    ends = [match.end() for match in re.finditer(r"\S+ sent|\S+", columns)]
    assert groups.index("planned") + len("planned") == ends[4]
    assert len(groups) == ends[-1]


def candidate(data, model, planned, compiled=None, **more):
    """A mesh with these estimates, and those of its compiled program if it has been compiled."""
    figures = {"priced_seconds": planned, "estimated_memory": 10**9}
    if compiled is not None:
        figures |= {"seconds": compiled, "sent_bytes": 10**6, "peak_memory": 10**9, "fits": True}
    return Candidate({"data": data, "fsdp": 1, "model": model}, **figures, **more)


def test_meshes_with_the_same_figures_share_a_line():
    first, other = candidate(1, 8, 0.002, 0.003), candidate(4, 2, 0.002, 0.0031)
    like_first, uncompiled = candidate(2, 4, 0.002, 0.0030000001), candidate(8, 1, 0.002)
    worse = candidate(8, 1, 0.02)
    actual = rc.MeshSuggestion(
        *(first.mesh, True, "8 x cpu", None, (first, like_first, other, uncompiled, worse)),
        speeds_assumed=True,
    )
    text = str(actual)
    rows = text.splitlines()[-3:]
    sizes = [row.split()[:3] for row in rows]
    assert sizes == [["1", "1", "8"], ["4", "1", "2"], ["8", "1", "1"]]
    assert rows[0].endswith("fits, 2 more with these figures")
    assert rows[2].split()[5:] == ["-", "-", "-"]
    assert "the estimates are for an A100" in " ".join(text.split())
    assert "No time is measured." in " ".join(text.split())
    assert "too small" not in text
    assert len(actual.candidates) == 5  # as data, all of them


@pytest.mark.thorough
def test_a_step_that_is_too_small_to_be_divided():
    """Otherwise a user would take the best mesh for one that makes the step faster."""

    # 63 does not divide, and the gradients of the weights are far larger than the batch.
    loss = lambda w, x, key: jnp.mean(jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]) ** 2)
    batch = jax.ShapeDtypeStruct((8, 63), jnp.float32)
    job = make_job(lambda key: [jnp.eye(63), -jnp.eye(63)], loss, batch, OPTIMIZER)
    place = attached_place()
    actual = suggest(job, place, 1)
    best = actual.candidates[0]
    assert best.repeated
    assert "too small to be divided" in " ".join(str(actual).split())
    mesh = place.mesh(best.mesh)
    (not_done,) = plan_job(job, mesh, planner_hardware(place, mesh)).report.not_done
    assert not_done.asked == "dividing the step over 8 devices"
    assert not any(one.repeated for one in suggest(make_job(*SMALL), place, 1).candidates[:1])


@pytest.mark.thorough
def test_estimates_agree_with_compiled_programs(every):
    """Compares the planner's estimates with the compiled programs."""
    for name, _ in cases():
        for one in every[name].candidates:
            assert one.priced_seconds == pytest.approx(one.seconds, rel=0.1)


# Sizes, estimated memory, memory.
FOUR = [
    ((4, 1, 1), 90, 120),
    ((2, 2, 1), 80, 110),
    ((2, 1, 2), 70, 105),
    ((1, 4, 1), 60, 70),
    ((1, 2, 2), 50, 60),
    ((1, 1, 4), 55, 65),
]


def choose_from(meshes, usable, compiled):
    """The choice among meshes with increasing estimated costs, and the meshes that are compiled."""
    tried = []

    def compiling(one):
        tried.append(tuple(one.mesh.values()))
        peak = next(peak for mesh, _, peak in meshes if mesh == tried[-1])
        return replace(one, seconds=one.priced_seconds, peak_memory=peak, fits=peak <= usable)

    estimated = [
        Candidate(dict(zip(("data", "fsdp", "model"), mesh, strict=True)), place, estimated)
        for place, (mesh, estimated, _) in enumerate(meshes)
    ]
    return choose_mesh(
        estimated, compiling, Place("made up", range(4), None, usable), compiled
    ), tried


def test_the_cheapest_mesh_that_fits_is_chosen():
    actual, tried = choose_from(FOUR, 110, 3)
    assert tried == [(4, 1, 1), (2, 2, 1), (2, 1, 2)]
    assert (tuple(actual.values()), actual.fits) == ((2, 2, 1), True)
    assert [one.fits for one in actual.candidates] == [True, True, False, None, None, None]


def test_if_none_fits_the_smallest_are_compiled_too():
    actual, tried = choose_from(FOUR, 100, 1)
    assert tried == [(4, 1, 1), (1, 2, 2)]
    assert (tuple(actual.values()), actual.fits) == ((1, 2, 2), True)


def test_compiled_meshes_correct_the_estimates_of_others():
    """The first needs 4/3 of its estimate, so the next would need 107 of 100 bytes."""
    actual, tried = choose_from(FOUR, 100, 2)
    assert tried == [(4, 1, 1), (2, 1, 2), (1, 2, 2)]
    assert (tuple(actual.values()), actual.fits) == ((1, 2, 2), True)


def test_if_none_fits_the_missing_memory_is_reported():
    actual, tried = choose_from(FOUR, 30, 2)
    assert len(tried) == 4
    assert (tuple(actual.values()), actual.fits) == ((1, 2, 2), False)
    assert "WARNING: none" in str(actual)
    assert "3e-08 GB too much" in str(actual)


def test_meshes_estimated_far_too_large_are_not_compiled_first():
    actual, tried = choose_from([((4, 1, 1), 900, 120), *FOUR[1:]], 110, 1)
    assert tried == [(2, 2, 1)]
    assert tuple(actual.values()) == (2, 2, 1)


def test_a_mesh_on_which_the_compiler_fails_is_shown_but_not_chosen():
    estimated = [
        Candidate(dict(zip(("data", "fsdp", "model"), mesh, strict=True)), place, 10)
        for place, (mesh, *_) in enumerate(FOUR)
    ]

    def compiling(one):
        if one.mesh["data"] == 4:
            return replace(one, error="its compiler failed: INTERNAL")
        return replace(one, seconds=1.0, peak_memory=10, fits=True)

    actual = choose_mesh(estimated, compiling, Place("made up", range(4), None, None), 2)
    assert tuple(actual.values()) == (2, 2, 1)
    assert sum(one.fits is True for one in actual.candidates) == 2
    assert str(actual).splitlines()[-1].endswith("cannot be run: its compiler failed: INTERNAL")
    failing = lambda one: replace(one, error="its compiler failed: INTERNAL")
    with pytest.raises(ValueError, match="on any mesh.*compiler failed"):
        choose_mesh(estimated, failing, Place("made up", range(4), None, None), 2)


def test_the_cheapest_mesh_without_compiling():
    """For large matrices and few rows, also if a replicated model does not fit."""
    place = target_place("cpu:4")
    assert promising(make_job(*SMALL), place) == [{"data": 4, "fsdp": 1, "model": 1}]
    assert promising(make_job(*WIDE), place)[0]["model"] == 4
    # With so many rows `model` would be used as `fsdp` is, and with so few `fsdp` as `model` is.
    cramped = replace(place, usable=10**5)
    assert promising(make_job(*SMALL), cramped)[0] == {"data": 1, "fsdp": 4, "model": 1}
    job = make_job(*SMALL)
    estimates = [estimate_mesh(job, place, {"fsdp": 4}), estimate_mesh(job, place, {"model": 4})]
    assert estimates[0].priced_seconds == estimates[1].priced_seconds
    assert [estimate.usual for estimate in estimates] == [True, False]


def test_meshes_that_are_compared_share_the_trace_of_an_update():
    calls: list[None] = []

    def update(updates, state, params=None):
        calls.append(None)
        return OPTIMIZER.update(updates, state, params)

    optimizer = optax.GradientTransformation(OPTIMIZER.init, update)
    promising(make_job(*SMALL[:-1], optimizer), target_place("cpu:4"))
    assert len(calls) == 1


@pytest.mark.thorough
def test_a_mesh_that_a_memory_plan_makes_fit():
    """Recomputation takes longer, and less than the meshes on which the step fits without it."""

    def init_fn(key):
        return [{"up": jnp.zeros((64, 256)), "down": jnp.zeros((256, 64))} for _ in range(4)]

    def loss(model, x, key):
        for p in model:
            x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
        return jnp.mean(x**2)

    case = (init_fn, loss, jax.ShapeDtypeStruct((1024, 64), jnp.float32), OPTIMIZER)
    place = target_place("cpu:4")
    keeping: Any = estimate_mesh(make_job(*case), place, {"data": 4})
    job: Any = make_job(*case, memory=0.6 * keeping.estimated_memory)
    place = replace(place, usable=round(0.6 * keeping.estimated_memory / 0.85))
    actual: Any = estimate_mesh(job, place, {"data": 4})
    assert actual.estimated_memory <= job.memory
    assert 0 < actual.recomputed < 0.2
    assert actual.priced_seconds > keeping.priced_seconds
    # Without recomputation, the step fits on no mesh.
    chosen: Any = estimate_mesh(job, place, promising(job, place)[0])
    assert chosen.estimated_memory <= job.memory < keeping.estimated_memory


def test_estimates_use_the_figures_of_the_target():
    place = replace(target_place("cpu:16"), target=parse_target("h100:2x8"))
    mesh = rc.make_mesh(data=2, model=8, devices=place.devices)
    chip = CHIPS["h100"]
    actual = target_hardware(place, mesh, "bfloat16")
    assert actual.flops == chip.flops["bfloat16"] > target_hardware(place, mesh).flops
    assert actual.memory == chip.usable
    assert actual.model_bandwidth > 4 * actual.batch_bandwidth > 0  # between hosts


def test_gradients_are_priced_as_compilers_sum_them():
    """`scatter_ahead.py` prints these figures for TPUs: over all chips of a three-dimensional slice
    by all-reduces, and over some of them in two steps."""
    place = replace(target_place("cpu:8"), target=parse_target("v4:2x2x2"))
    mesh = rc.make_mesh(data=8, devices=place.devices)

    def sent(target, shards):
        hardware = planner_hardware(replace(place, target=parse_target(target)), mesh)
        return gradient_sum(hardware, 8, shards, 8.0)

    whole, scattered = 2 * 7 / 8 * 8, 7 / 8 * 8
    assert sent("v4:2x2x2", 8) == whole
    assert sent("v5e:2x4", 8) == scattered
    assert sent("h100:8", 8) == scattered
    in_two_steps = 3 / 4 * 8 + 2 * 1 / 2 * 8 / 4
    assert sent("v4:2x2x2", 4) == in_two_steps
    assert sent("v5e:2x4", 4) == in_two_steps
    assert sent("h100:8", 4) == in_two_steps
    assert sent("cpu:8", 4) == whole


@pytest.mark.thorough
def test_attached_devices_are_the_default():
    actual = rc.suggest_mesh(*SMALL, compiled=1)
    assert actual.target == "8 x cpu"
    assert dict(rc.make_mesh(**actual).shape) == dict(actual)
    assert actual.usable_memory is None


@pytest.mark.thorough
def test_meshes_that_an_override_rules_out_are_not_chosen():
    actual = rc.suggest_mesh(
        *make_mlp(6, 8)(8), target="cpu:4", compiled=1, overrides=[("up", jax.P("model"))]
    )
    errors = {one.mesh["model"]: one.error for one in actual.candidates}
    assert errors[1] is errors[2] is None
    assert "multiple" in str(errors[4])
    assert "cannot be run" in str(actual)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"target": "v4:3x5"}, ValueError, "v4"),
        ({"target": "z80:4"}, ValueError, "z80"),
        ({"compiled": 0}, ValueError, "`compiled`"),
        ({"overrides": [("none", None)]}, ValueError, "cannot be run on any mesh.*none"),
        # Of the mesh that needs the least.
        ({"memory": 1000}, ValueError, "On .*'model': 4}: `memory=1,000` is too small"),
        (
            {"compiler_options": {"xla_backend_optimization_level": "x"}},
            ValueError,
            "^The compiler for cpu refuses xla_backend_optimization_level='x'",
        ),
        ({"compiler_options": {"xla_flag": "true"}}, ValueError, "boolean True"),
    ],
)
def test_bad_input(changes, error, message):
    with pytest.raises(error, match=message):
        rc.suggest_mesh(*SMALL, **{"target": "cpu:4"} | changes)


@pytest.mark.parametrize("command", [rc.suggest_mesh, rc.dry_run])
def test_unknown_options_of_the_compiler_are_named_once(command, monkeypatch):
    """The others reach the compiler, for each mesh that is compiled."""
    reached, compile_step = [], _job.compile_step

    def recorded(*args, compiler_options):
        reached.append(compiler_options)
        return compile_step(*args, compiler_options=compiler_options)

    monkeypatch.setattr(_job, "compile_step", recorded)
    known = {"xla_backend_optimization_level": 0}
    options = known | {"xla_of_another_version": True}
    with pytest.warns(UserWarning, match="xla_of_another_version") as warned:
        command(*WIDE, target="cpu:4", compiler_options=options)
    assert len(warned) == 1
    assert reached
    assert reached == [known] * len(reached)


def fit(**options):
    return rc.fit(
        make_model(),
        OPTIMIZER,
        make_examples(64),
        collate_fn=collate_fn,
        loss_fn=loss_fn,
        batch_size=16,
        steps=2,
        **options,
    )


@pytest.mark.thorough
def test_fit_uses_the_best_mesh(capfd):
    state = fit(mesh="auto", log=rc.progress_logger())
    shown = capfd.readouterr().out
    assert "Meshes for 8 x cpu" in shown
    sizes = dict(jax.tree.leaves(state.model)[0].sharding.mesh.shape)
    assert "(mesh " + ", ".join(f"{k}={v}" for k, v in sizes.items() if v > 1) + ")" in shown


def test_fit_accepts_no_other_string():
    with pytest.raises(TypeError, match="mesh"):
        fit(mesh="automatic")


PROGRAM = """
import redcoast as rc
rc.initialize()
import jax
from problem import collate_fn, loss_fn, make_examples, make_model
from processes import run_processes
import optax
options = {"collate_fn": collate_fn, "loss_fn": loss_fn, "batch_size": 16, "steps": 2}
state = rc.fit(make_model(), optax.sgd(0.1), make_examples(64), mesh="auto", **options)
print("MESH", dict(jax.tree.leaves(state.model)[0].sharding.mesh.shape))
"""


@pytest.mark.hosts
def test_processes_choose_the_same_mesh():
    finished = run_processes(PROGRAM, processes=2, devices=2)
    assert all(process.returncode == 0 for process in finished), finished
    lines = [line for process in finished for line in process.output.splitlines()]
    first, second = (line for line in lines if line.startswith("MESH"))
    assert first == second
    assert sum(line.startswith("Meshes for 4 x cpu") for line in lines) == 1
