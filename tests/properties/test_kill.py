"""A run that is killed goes on as if it never had been."""

import random
import re
import signal
import subprocess
import sys
import time

import pytest
from paths import HELPERS

import redcoast as rc

# Steps of a few milliseconds, so that it is saving, deleting or evaluating most of the time.
SCRIPT = """
import sys, time
import equinox as eqx, jax, optax
import redcoast as rc
from redcoast.checkpoint import _orbax
from problem import collate_fn, loss_fn, make_examples, make_model

directory, steps, slow = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])

def collate(examples):
    time.sleep(slow)
    return collate_fn(examples)

if len(sys.argv) > 4:  # the save of this step never comes to its end
    def write_checksums(directory, *args, write=_orbax.write_checksums):
        while f"/{sys.argv[4]}." in str(directory):
            time.sleep(1)
        return write(directory, *args)
    _orbax.write_checksums = write_checksums

rc.fit(
    make_model(width=300), optax.adamw(1e-3), make_examples(400),
    collate_fn=collate, loss_fn=loss_fn, batch_size=16, steps=steps,
    mesh=rc.make_mesh(data=1, fsdp=2, devices=jax.devices()[:2]),
    evaluation=rc.Evaluation(make_examples(40, seed=1), every=5), log=False,
    checkpoints=rc.Checkpoints(directory, every=3, keep=2, best="loss"),
)
"""
WHOLE: dict[int, list[tuple[float, float | None]]] = {}


def start(directory, steps, slow=0.0, *stuck):
    command = [sys.executable, "-c", SCRIPT, *map(str, (directory, steps, slow, *stuck))]
    with (directory / "printed").open("ab") as printed:
        return subprocess.Popen(command, cwd=HELPERS, stdout=printed, stderr=subprocess.STDOUT)


def finish(directory, steps):
    assert start(directory, steps).wait(900) == 0, (directory / "printed").read_text()
    return losses(directory, steps)


def losses(directory, steps):
    lines = rc.read_metrics(directory / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    return [(line["loss"], line.get("eval/loss")) for line in lines]


@pytest.fixture
def expected(tmp_path_factory):
    def of(steps):
        if steps not in WHOLE:
            WHOLE[steps] = finish(tmp_path_factory.mktemp("whole"), steps)
        return WHOLE[steps]

    return of


def kill_when(process, condition):
    """Kills a process as soon as something is so, or says that it came to its end before."""
    deadline = time.monotonic() + 900
    while not condition():
        if process.poll() is not None:
            return False
        assert time.monotonic() < deadline
        time.sleep(0.0005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return True


def steps_logged(directory):
    """The steps in the order in which they were logged: those after a kill come twice."""
    file = directory / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return [int(step) for step in re.findall(r'^{"step": (\d+), .*"loss"', text, re.MULTILINE)]


def saved(directory):
    path = directory / "checkpoints"
    names = [p.name for p in path.iterdir()] if path.is_dir() else []
    return [int(name) for name in names if name.isdigit()]


@pytest.mark.integration
def test_killed_in_the_middle_of_a_save(tmp_path, expected):
    checkpoints = tmp_path / "checkpoints"

    def unfinished():
        names = [p.name for p in checkpoints.iterdir()] if checkpoints.is_dir() else []
        return [n for n in names if "tmp" in n and n.startswith("12")]

    assert kill_when(start(tmp_path, 48, 0.02, 12), unfinished)
    assert unfinished(), "the save had ended"
    assert finish(tmp_path, 48) == expected(48)
    assert not unfinished()


@pytest.mark.parametrize(("kills", "steps"), [pytest.param(30, 700, marks=pytest.mark.faults)])
def test_killed_at_random_instants(tmp_path, expected, kills, steps):
    draw = random.Random(kills)
    resumed = {}
    for kill in range(kills):
        before = size(tmp_path)
        process = start(tmp_path, steps, slow=0.003)
        if kill % 6 == 2:  # while it starts, and restores
            condition = seconds_after(lambda: True, draw.uniform(0, 6))
        else:
            condition = seconds_after(lambda: size(tmp_path) > before, draw.uniform(0, 0.3))  # noqa: B023
        assert kill_when(process, condition), (tmp_path / "printed").read_text()
        resumed[len(steps_logged(tmp_path))] = max(saved(tmp_path), default=0) + 1
    assert finish(tmp_path, steps) == expected(steps)
    # Each life began where the last checkpoint was, and nowhere else.
    logged = steps_logged(tmp_path)
    assert {line: logged[line] for line in resumed} == resumed
    assert len(logged) > steps
    text = (tmp_path / "printed").read_text()
    assert "damaged" not in text
    assert "could not be" not in text


def size(directory):
    file = directory / "metrics.jsonl"
    return file.stat().st_size if file.exists() else 0


def seconds_after(event, seconds):
    """Whether so many seconds have gone by since an event was first seen."""
    since = []

    def condition():
        if not since and event():
            since.append(time.monotonic())
        return bool(since) and time.monotonic() - since[0] >= seconds

    return condition
