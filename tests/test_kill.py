"""A run that is killed goes on as if it never had been."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import redcoast as rc

SCRIPT = """
import sys, time
import equinox as eqx, jax, optax
import redcoast as rc
from problem import collate_fn, loss_fn, make_examples, make_model

directory, slow = sys.argv[1], float(sys.argv[2])

def collate(examples):
    time.sleep(slow)
    return collate_fn(examples)

rc.fit(
    make_model(width=700), optax.adamw(1e-3), make_examples(400),
    collate_fn=collate, loss_fn=loss_fn, batch_size=16, epochs=2,
    mesh=rc.make_mesh(data=2, fsdp=2, model=2), eval_examples=make_examples(40, seed=1),
    checkpoints=rc.Checkpoints(directory, every=6, keep=2),
)
"""


def start(directory, slow=0.0):
    command = [sys.executable, "-c", SCRIPT, str(directory), str(slow)]
    return subprocess.Popen(
        command, cwd=Path(__file__).parent, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def losses(directory):
    lines = rc.read_metrics(directory / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 51))
    return [(line["loss"], line.get("eval/loss")) for line in lines]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    assert start(directory).wait(300) == 0
    return losses(directory)


def kill_when(process, condition):
    deadline = time.monotonic() + 200
    while not condition():
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.0005)
    process.send_signal(signal.SIGKILL)
    process.wait()


def steps_logged(directory):
    file = directory / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def test_killed_in_the_middle_of_an_epoch(tmp_path, expected):
    process = start(tmp_path, slow=0.05)
    kill_when(process, lambda: steps_logged(tmp_path) >= 33)
    assert start(tmp_path).wait(300) == 0
    assert losses(tmp_path) == expected


def test_killed_in_the_middle_of_a_save(tmp_path, expected):
    checkpoints = tmp_path / "checkpoints"

    def unfinished():
        names = [p.name for p in checkpoints.iterdir()] if checkpoints.is_dir() else []
        return [n for n in names if "tmp" in n and n.startswith(("12", "18", "24"))]

    process = start(tmp_path, slow=0.02)
    kill_when(process, unfinished)
    assert unfinished(), "the save had ended"
    assert start(tmp_path).wait(300) == 0
    assert losses(tmp_path) == expected
    assert not unfinished()
