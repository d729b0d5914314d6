"""A run of several processes is the run of one, and all of them hear of what goes wrong in one."""

import json
import re

import jax
import numpy as np
import pytest
from paths import HELPERS
from processes import Finished, run_processes

import redcoast as rc
from redcoast.models import Llama, LlamaConfig

PROGRAMS = HELPERS / "hosts"
EXAMPLES = 50


def run(processes, devices, **asked):
    text = json.dumps({"mesh": {"data": 2, "model": 2}, **asked})
    program = PROGRAMS / "run.py"
    return run_processes(program, text, processes=processes, devices=devices)


def results(finished: list[Finished]) -> list[dict]:
    assert all(x.returncode == 0 for x in finished), "\n".join(x.output for x in finished)
    lines = [line for x in finished for line in x.output.splitlines()]
    return [json.loads(line[7:]) for line in lines if line.startswith("RESULT ")]


def check_same_metrics(found, expected):
    assert [step for step, _ in found] == [step for step, _ in expected]
    for (_, x), (_, y) in zip(found, expected, strict=True):
        assert x.keys() == y.keys()
        np.testing.assert_allclose(list(x.values()), list(y.values()), rtol=1e-5, atol=1e-5)


def check_same_run(split, alone, *, shared):
    """That processes did together what one did."""
    check_same_metrics(split[0]["metrics"], alone["metrics"])
    total = [row for x in split for row in x["collated"]]
    assert set(total) == set(alone["collated"])
    assert len(total) == shared * len(alone["collated"])
    for x in split:
        assert x["evaluation"] == pytest.approx(alone["evaluation"], rel=1e-5)
        np.testing.assert_allclose(x["all"], alone["all"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(split[0]["first"], alone["first"], rtol=1e-5, atol=1e-6)
    assert all(x["first"] == [] for x in split[1:])
    kept = {i: entry for x in split for i, entry in x["none"]}
    assert sorted(kept) == list(range(EXAMPLES))
    np.testing.assert_allclose([kept[i] for i in sorted(kept)], alone["all"], rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def alone():
    """What one process with the same mesh does."""
    return results(run(1, 4, gather=["all", "first", "none"]))[0]


@pytest.mark.integration
def test_a_signal_to_one_stops_all_and_one_process_goes_on(alone, tmp_path):
    stopped = results(run(2, 2, fault="signal", who=1, at=40, directory=str(tmp_path)))
    (step,) = {x["step"] for x in stopped}
    assert 0 < step < 12
    resumed = results(run(1, 4, directory=str(tmp_path)))[0]
    check_same_metrics(stopped[0]["metrics"] + resumed["metrics"], alone["metrics"])


@pytest.mark.integration
def test_an_error_of_one_is_told_to_all(tmp_path):
    other, faulty = run(2, 1, fault="raise", who=1, at=30, mesh={"fsdp": 2})
    assert faulty.returncode == other.returncode == 1
    assert "Raised by `collate_fn` for the examples with indices" in faulty.output
    last = other.output.strip().splitlines()[-1]
    assert "ProcessLost: Process 1" in last
    assert "KeyError: 'no such image'" in last


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        pytest.param(
            "batch",
            "`batch_size`: 16 on process 0; 8 on process 1.",
            marks=pytest.mark.integration,
        ),
        pytest.param("other code", "the code of `loss_fn`: ", marks=pytest.mark.hosts),
        pytest.param(
            "fewer examples",
            "the number of `examples`: 50 on process 0; 49 on process 1.",
            marks=pytest.mark.hosts,
        ),
        pytest.param(
            "other values",
            "the values of the initial model: layers/0/weight: float32[32, 8] with checksum ",
            marks=pytest.mark.integration,
        ),
        pytest.param("learning rate", "the program of the step: ", marks=pytest.mark.integration),
        pytest.param("other constant", " = mul (2.0:float32, ", marks=pytest.mark.integration),
        pytest.param("callback", "debug_callback ", marks=pytest.mark.hosts),
        pytest.param(
            "other data",
            "the first examples: example 0, batch[0]: float32[8] ",
            marks=pytest.mark.hosts,
        ),
        pytest.param(
            "other collate", "the first examples: example 0, batch[0]: ", marks=pytest.mark.hosts
        ),
        pytest.param(
            "other evaluation",
            "the first examples of the evaluation: example 0, batch[0]: ",
            marks=pytest.mark.hosts,
        ),
        pytest.param(
            "other prediction",
            "the program of the evaluation's prediction: ",
            marks=pytest.mark.hosts,
        ),
    ],
)
def test_processes_that_disagree_are_told_so(fault, named):
    for finished in run(2, 1, fault=fault, who=1, mesh={}):
        assert finished.returncode == 1
        *_, error = [x for x in finished.output.splitlines() if x.startswith("ValueError: ")]
        assert error.startswith("ValueError: The processes of this run disagree.")
        assert named in error


@pytest.mark.hosts
def test_generation(tmp_path):
    config = LlamaConfig(vocab=64, width=32, layers=2, heads=4, kv_heads=4, hidden=64)
    model = Llama(config, key=jax.random.key(0))
    rc.save_pretrained(model, tmp_path / "model")
    prompts = np.random.default_rng(0).integers(1, 64, (4, 6))
    expected = rc.generate(model, prompts, max_new_tokens=5).tolist()
    searched = rc.generate(model, prompts, max_new_tokens=5, beams=2).tolist()
    arguments = (json.dumps({"data": 2, "model": 2}), tmp_path / "model")
    finished = run_processes(PROGRAMS / "decode.py", *arguments, processes=2, devices=2)
    for found in results(finished):
        assert found["generated"] == found["streamed"] == expected
        assert found["predicted"] == searched
        assert "`tokens`: tokens[0]: int64[6] " in found["differing"]
        assert '`repetition_penalty`: "1.5:float32" on process 0' in found["other option"]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    """Weights that split into up to 16 parts, and what one device makes of them."""
    config = LlamaConfig(vocab=64, width=64, layers=1, heads=16, kv_heads=16, hidden=64)
    model = Llama(config, key=jax.random.key(0))
    path = tmp_path_factory.mktemp("weights") / "model"
    rc.save_pretrained(model, path)
    prompts = np.random.default_rng(0).integers(1, 64, (16, 6))
    decode = lambda beams: rc.generate(model, prompts, max_new_tokens=4, beams=beams).tolist()
    return str(path), [decode(1), decode(2)]


@pytest.mark.hosts
@pytest.mark.parametrize("mesh", [{"data": -1}, {"fsdp": -1, "data": 1}, {"model": -1, "data": 1}])
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_several_processes_are_one_run(mesh, processes, devices, decoder, tmp_path):
    asked = {"mesh": mesh, "gather": ["all", "first", "none"]}
    if "model" in mesh or processes == devices == 2:  # compiling it again takes minutes
        asked["weights"] = decoder[0]
    one, many = tmp_path / "one", tmp_path / "many"
    alone = results(run(1, processes * devices, directory=str(one), **asked))[0]
    split = results(run(processes, devices, directory=str(many), **asked))
    check_same_run(split, alone, shared=processes if "model" in mesh else 1)
    check_same_checkpoints(many / "checkpoints", one / "checkpoints")
    if "weights" in asked:
        assert all(x["decoded"] == decoder[1] for x in [alone, *split])


def check_same_checkpoints(found, expected):
    assert sorted(p.name for p in found.iterdir()) == sorted(p.name for p in expected.iterdir())
    for path in expected.iterdir():
        one, many = rc.load_checkpoint(path), rc.load_checkpoint(found / path.name)
        assert jax.tree.structure(one) == jax.tree.structure(many)
        for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.hosts
@pytest.mark.parametrize(("processes", "who"), [(2, 0), (2, 1), (4, 0), (4, 2)])
def test_a_process_that_dies_is_named_and_all_resume(processes, who, tmp_path):
    shared = {"mesh": {"data": 1, "fsdp": -1}, "directory": str(tmp_path)}
    expected = results(run(processes, 1, mesh=shared["mesh"]))[0]
    # Each process reads its part of the examples.
    finished = run(processes, 1, fault="kill", who=who, at=200 // processes, **shared)
    for left in finished[:who] + finished[who + 1 :]:
        assert left.returncode in (1, 70)  # by itself, or from a wait that nothing else would end
        assert f"Process {who} on " in left.output.strip().splitlines()[-1]
        # On a busy machine the process that watches comes a few seconds late.
        assert re.search(r"has died: no heartbeat for 2\d s\.", left.output)
    resumed = results(run(processes, 1, **shared))[0]
    began = resumed["metrics"][0][0]
    assert began > 1
    check_same_metrics(resumed["metrics"], [x for x in expected["metrics"] if x[0] >= began])


@pytest.mark.hosts
@pytest.mark.parametrize("counts", [(4, 2), (2, 1), (1, 4)])
def test_a_checkpoint_resumes_on_any_number_of_processes(counts, alone, tmp_path):
    first, then = counts
    run(first, 4 // first, steps=6, directory=str(tmp_path))
    resumed = results(run(then, 4 // then, directory=str(tmp_path)))[0]
    check_same_metrics(resumed["metrics"], [x for x in alone["metrics"] if x[0] > 6])


@pytest.mark.hosts
@pytest.mark.parametrize("counts", [[(4, 1), (2, 4)], [(1, 2), (4, 4)]])
def test_a_checkpoint_resumes_on_another_mesh_of_other_processes(counts, alone, tmp_path):
    (first, few), (then, many) = counts
    run(first, few, mesh={"fsdp": -1, "data": 1}, steps=6, directory=str(tmp_path))
    mesh = {"data": 2, "fsdp": 2, "model": -1}
    resumed = results(run(then, many, mesh=mesh, directory=str(tmp_path)))
    check_same_metrics(resumed[0]["metrics"], [x for x in alone["metrics"] if x[0] > 6])


@pytest.mark.hosts
def test_a_process_that_hangs_is_named():
    asked = {"fault": "hang", "who": 1, "at": 20, "seconds": 70, "mesh": {"fsdp": 2}}
    finished = run(2, 1, **asked)
    results(finished)
    assert "Process 1 on " in finished[0].output
    assert "has been in `collate_fn` for 6" in finished[0].output


@pytest.mark.hosts
def test_all_say_why_steps_were_skipped():
    for finished in run(2, 2, nan=list(range(EXAMPLES // 2)), max_skipped=3, gather=[]):
        assert finished.returncode == 1
        assert "ValueError: `loss_fn` returned nan for the first batch." in finished.output
        assert "The batch's array batch[0] holds NaN or infinite values for the" in finished.output


@pytest.mark.hosts
def test_an_error_that_all_survive_is_over():
    survived = results(run(2, 1, mesh={}, twice="bad loss"))
    alone = results(run(1, 2, mesh={}))[0]
    check_same_metrics(survived[0]["metrics"], alone["metrics"])


@pytest.mark.hosts
def test_time_is_up_for_all_at_the_same_step():
    stopped = results(run(2, 2, max_seconds=0.001))
    # The all-reduce of a step is read after the next one was dispatched.
    assert {x["step"] for x in stopped} == {2}
