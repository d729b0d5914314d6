"""Emulated devices get enough threads, and a program that hangs for want of them says so."""

import logging
import os
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest

import redcoast as rc
from redcoast.distributed import _emulation
from redcoast.distributed._emulation import OVERDUE, Overdue

# Each is the beginning of a script; printed are the threads and what was logged.
SCRIPTS = {
    "imported before JAX is used": "import redcoast as rc; rc.make_mesh()",
    "emulated by JAX's configuration": (
        "import jax, redcoast as rc; jax.config.update('jax_num_cpu_devices', 6); rc.make_mesh()"
    ),
    "emulated by redcoast": "import redcoast as rc; rc.emulate_devices(7); rc.make_mesh()",
    "set by the user": "os.environ['NPROC'] = '64'; import redcoast as rc; rc.make_mesh()",
    "imported too late": "import jax; jax.devices(); import redcoast as rc; rc.make_mesh()",
}


@pytest.fixture(scope="module")
def printed():
    """What each script logged, and NPROC at its end; in processes at the same time."""
    begin = "import os; os.cpu_count = lambda: 2\n"
    env = {k: v for k, v in os.environ.items() if k not in ("NPROC", "XLA_FLAGS")}
    flag = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    running = {}
    for name, script in SCRIPTS.items():
        own = env if "emulated" in name else env | flag
        program = f"{begin}{script}\nprint(os.environ.get('NPROC'))"
        running[name] = subprocess.Popen(
            [sys.executable, "-c", program], env=own, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
    return {name: process.communicate(timeout=900) for name, process in running.items()}


@pytest.mark.integration
@pytest.mark.parametrize(
    ("name", "threads"),
    [
        ("imported before JAX is used", "32"),
        ("emulated by JAX's configuration", "24"),
        ("emulated by redcoast", "28"),
        ("set by the user", "64"),
    ],
)
def test_there_are_enough_threads(printed, name, threads):
    output, logged = printed[name]
    assert output.split() == [threads], logged
    assert "threads" not in logged


@pytest.mark.integration
def test_a_process_in_which_it_is_too_late_is_told_so(printed):
    output, logged = printed["imported too late"]
    assert output.split() == ["None"], logged
    assert logged.count("8 emulated devices share 8 threads") == 1
    assert "Set the environment variable NPROC=32 before JAX is first used" in logged


class Result:
    """An array that is computed when a test says so."""

    ready = False

    def is_ready(self):
        return self.ready

    def is_deleted(self):
        return False


@pytest.fixture
def overdue(monkeypatch, caplog):
    """What watches, with a clock that the test sets; its thread does not run."""
    caplog.set_level(logging.WARNING, "redcoast")
    monkeypatch.setattr(_emulation, "_warned", set())
    monkeypatch.setattr(Overdue, "_watch", lambda self: None)
    clock = [0.0]
    return Overdue(lambda: clock[0]), clock


def test_a_call_that_does_not_return_is_reported_once(overdue, caplog):
    watch, clock = overdue
    watch.begin()
    for seconds in (OVERDUE - 1, OVERDUE + 1, OVERDUE + 2):
        clock[0] = seconds
        watch.look()
    assert caplog.text.count("8 emulated devices has not returned for 121 s.") == 1
    assert "XLA has 32 threads. Set the environment variable NPROC=32" in caplog.text


def test_a_result_that_does_not_come_is_reported(overdue, caplog):
    watch, clock = overdue
    result = Result()
    watch.begin()
    watch.end(result)
    clock[0] = OVERDUE + 1
    watch.look()
    assert "has not returned" in caplog.text


def test_what_goes_on_is_not_reported(overdue, caplog):
    watch, clock = overdue
    result = Result()
    for _ in range(5):  # each call is shorter than the limit, and none is waited for
        watch.begin()
        watch.end(result)
        clock[0] += OVERDUE - 1
        watch.look()
    result.ready = True
    clock[0] += 10 * OVERDUE
    watch.look()
    watch.begin()
    watch.end(None)  # it has raised
    clock[0] += 10 * OVERDUE
    watch.look()
    watch.begin()
    watch.end(Result())  # nobody waits for it
    clock[0] += 10 * OVERDUE
    watch.look()
    assert caplog.text == ""


@pytest.mark.thorough
def test_steps_on_emulated_devices_are_watched(monkeypatch):
    seen = []
    monkeypatch.setattr(Overdue, "begin", lambda self: seen.append("begin"))
    monkeypatch.setattr(Overdue, "end", lambda self, result: seen.append(type(result).__name__))

    def fit(mesh):
        rc.fit(
            {"w": np.ones(4, np.float32)}, optax.sgd(0.1), np.ones((16, 4), np.float32),
            collate_fn=np.stack, loss_fn=lambda m, b, k: ((b @ m["w"]) ** 2).mean(),
            batch_size=8, steps=2, log=False, mesh=mesh,
        )  # fmt: skip

    fit(rc.make_mesh(data=1, devices=jax.devices()[:1]))
    assert seen == []
    fit(rc.make_mesh())
    assert seen == ["begin", "ArrayImpl"] * 2
