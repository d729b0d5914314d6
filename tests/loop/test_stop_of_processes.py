"""Loggers that look at the state or stop the run, and early stopping, with two processes."""

import json

import pytest
from paths import HELPERS
from processes import run_processes


def run(stop, directory=None):
    """What each process returns: its last state's step, what its logger saw, and sums of arrays."""
    text = json.dumps({"stop": stop, "directory": directory})
    program = HELPERS / "hosts" / "looks.py"
    finished = run_processes(program, text, processes=2, devices=2)
    assert all(x.returncode == 0 for x in finished), "\n".join(x.output for x in finished)
    lines = [line for x in finished for line in x.output.splitlines()]
    actual = [json.loads(line[7:]) for line in lines if line.startswith("RESULT ")]
    assert actual[0] == actual[1]
    return actual[0]


@pytest.mark.integration
def test_logger_of_one_process_stops_all_after_the_same_step():
    assert run("state")["step"] == 4  # one step later


@pytest.mark.integration
def test_logger_of_process_0_stops_all_with_the_state_saved(tmp_path):
    actual = run("plain", str(tmp_path))
    assert actual["step"] < 12
    assert (tmp_path / "checkpoints" / str(actual["step"])).is_dir()


@pytest.mark.integration
@pytest.mark.parametrize("saved", [False, True])
def test_processes_stop_early_together_and_return_the_best_state(saved, tmp_path):
    actual = run("early", str(tmp_path) if saved else None)
    assert (actual["step"], actual["seen"]) == (4, 8)
