"""Each process reads its own part of a stream, and all continue in their parts after a kill."""

import json

import jax
import numpy as np
import pytest
from paths import HELPERS
from processes import run_processes

import redcoast as rc

KEY = jax.random.key(0)


def run(directory, processes=2, **asked):
    text = json.dumps({"mesh": {"data": 2}, "directory": str(directory), "steps": 8, **asked})
    program = HELPERS / "hosts" / "split.py"
    return run_processes(program, text, processes=processes, devices=2 // processes)


def order(part, epoch):
    return np.random.default_rng(epoch).permutation(np.arange(part, 50, 2))


def results(finished):
    lines = [line for x in finished for line in x.output.splitlines()]
    assert all(x.returncode == 0 for x in finished), "\n".join(x.output for x in finished)
    return [json.loads(line[7:]) for line in lines if line.startswith("RESULT ")]


@pytest.mark.integration
def test_processes_read_apart_and_resume_bitwise_after_a_kill(tmp_path):
    whole = results(run(tmp_path / "whole"))
    for x in whole:
        assert {i % 2 for i in x["read"]} == {x["process"]}  # nothing of the other part
    # Four of each part in a batch, also where its epoch of 25 ends.
    orders = [np.concatenate([order(part, epoch) for epoch in (0, 1)]) for part in (0, 1)]
    sums = [sum(int(x[4 * k : 4 * k + 4].sum()) for x in orders) for k in range(8)]
    assert [total for _, _, total in whole[0]["metrics"]] == sums
    killed = run(tmp_path / "killed", kill_at=20)
    assert any(x.returncode != 0 for x in killed)
    resumed = results(run(tmp_path / "killed"))
    first = resumed[0]["metrics"][0][0]
    assert 2 < first < 8
    assert resumed[0]["metrics"] == whole[0]["metrics"][first - 1 :]
    (alone,) = run(tmp_path / "killed", processes=1, steps=9)
    assert "split by host into 2 parts and cannot be resumed with 1" in alone.output
    run(tmp_path / "alone", processes=1, steps=3)
    for x in run(tmp_path / "alone"):
        assert "examples in one part and cannot be resumed with 2" in x.output


@pytest.mark.integration
def test_processes_divide_the_batches_of_a_source(tmp_path):
    """A source that makes batches gives each process all of them; each uses its own rows."""
    split = results(run(tmp_path / "split", batches=True))
    (alone,) = results(run(tmp_path / "alone", processes=1, batches=True))
    np.testing.assert_allclose(split[0]["metrics"], alone["metrics"], rtol=1e-5)
    sums = [sum(range(i, min(i + 8, 50))) for i in range(0, 50, 8)]
    assert [total for _, _, total in alone["metrics"]] == [*sums, sums[0]]


def test_one_process_reads_all():
    source = rc.split_by_host(lambda part, parts: range(part, 10, parts).__iter__)
    data = rc.batches(source, np.array, batch_size=8, key=KEY, steps=2)
    assert [np.asarray(x.arrays).tolist() for x in data] == [list(range(8)), [8, 9, *range(6)]]


def test_the_state_of_a_stream_has_the_number_of_its_parts():
    """Several parts have states of the same form as one, and would continue at wrong places."""
    source = rc.split_by_host(lambda part, parts: range(part, 100, parts).__iter__)
    data = rc.batches(source, np.array, batch_size=8, key=KEY, steps=3)
    state = next(data).state
    data.set_state(state)
    with pytest.raises(ValueError, match="into 2 parts and cannot be resumed with 1"):
        data.set_state(state | {"parts": 2})


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (lambda part, parts: iter, {"epochs": 1}, "Pass `steps` instead of `epochs`"),
        (lambda part, parts: iter, {"steps": 1, "batch_size": 3}, "divisible by data x fsdp = 8"),
        (lambda part, parts: [1, 2], {"steps": 1}, "has a length and an index.*its own rows"),
    ],
)
def test_what_cannot_be_split_is_said(make, options, words):
    with pytest.raises((TypeError, ValueError), match=words):
        rc.batches(rc.split_by_host(make), np.array, **{"batch_size": 8, "key": KEY, **options})
