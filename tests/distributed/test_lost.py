"""What a process does if another one, or the coordinator, is gone."""

import contextlib
import os
import re
import signal

import jax
import pytest
from processes import run_processes, start_processes

from redcoast.distributed import _heartbeat
from redcoast.distributed._coordinator import LINGER
from redcoast.distributed._heartbeat import DEAD, GRACE, _may_be_of_a_collective

JOINED = """
import sys, time
import redcoast as rc
from redcoast.distributed._private_jax import runtime

rc.initialize()
if runtime().service is not None:
    print("SERVICE", runtime().service._process.pid, "END", flush=True)
print("joined", flush=True)
time.sleep(600)
"""
# `fit` raises in process 0, and the script catches it.
CAUGHT = """
import equinox as eqx, jax, jax.numpy as jnp, numpy as np, optax
import redcoast as rc

rc.initialize()
calls = []

def collate_fn(rows):
    calls.append(1)
    if jax.process_index() == 0 and len(calls) > 8:
        raise KeyError("no such image")
    return np.stack(rows)

try:
    rc.fit(
        eqx.nn.Linear(8, 8, key=jax.random.key(0)), optax.sgd(0.1),
        np.zeros((400, 8), np.float32), collate_fn=collate_fn,
        loss_fn=lambda m, b, k: jnp.mean(jax.vmap(m)(b) ** 2), batch_size=16, steps=40, log=False,
    )
except (KeyError, rc.ProcessLost) as error:
    print("CAUGHT", error, flush=True)
"""


@pytest.mark.parametrize(
    "error",
    [
        # Gloo's errors are of the type that its result is converted by.
        ValueError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer [127.0.0.1]:5"),
        RuntimeError("[external/gloo/transport/tcp/pair.cc:553] Gloo: Connection reset by peer"),
        jax.errors.JaxRuntimeError("INTERNAL: collective"),
        TimeoutError("No response from process 3"),
    ],
)
def test_an_error_may_come_from_another_process(error):
    assert _may_be_of_a_collective(error)
    wrapped = OSError("could not be saved")
    wrapped.__cause__ = error
    assert _may_be_of_a_collective(wrapped)


@pytest.mark.parametrize(
    "error",
    [
        KeyError("no such image"),
        ValueError("an UNKNOWN: label"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"),
    ],
)
def test_an_error_of_this_process_is_reported_at_once(error):
    assert not _may_be_of_a_collective(error)


def test_the_coordinator_is_there_until_all_have_noticed_that_process_0_has_died():
    """It outlives process 0 by twice the time in which the others notice its death and exit."""
    assert LINGER >= 2 * (DEAD + GRACE)


@pytest.mark.integration
def test_a_script_that_catches_the_error_of_a_run_ends():
    # Process 0 would wait for the others for 300 s at exit, and they for it.
    for finished in run_processes(CAUGHT, processes=2, timeout=250):
        assert "CAUGHT" in finished.output
        assert "no such image" in finished.output
        assert finished.returncode == 0


@pytest.mark.parametrize(
    ("number", "said"),
    [
        # The connection is closed: JAX aborts the process in the same moment.
        pytest.param(
            signal.SIGKILL, "can no longer be reached (", marks=pytest.mark.integration, id="killed"
        ),
        # Nothing answers, as if the network were down.
        pytest.param(
            signal.SIGSTOP, "has not answered for 25 s", marks=pytest.mark.hosts, id="cut off"
        ),
    ],
)
def test_a_process_without_its_coordinator_says_so(number, said):
    with start_processes(JOINED, processes=2) as running:
        for process in running:
            process.wait_for("joined")
        (service,) = map(int, re.findall(r"SERVICE (\d+) END", running[0].output))
        os.kill(service, number)
        finished = [process.wait() for process in running]
        with contextlib.suppress(ProcessLookupError):
            os.kill(service, signal.SIGKILL)
    for process in finished:
        assert process.returncode == 70
        last = process.output.strip().splitlines()[-1]
        assert last.startswith("redcoast: The coordinator of this job at 127.0.0.1:")
        assert said in last


def test_streams_of_other_lengths_are_found(monkeypatch):
    """A process that is past the end of another's stream would wait for it in the next step."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(_heartbeat, "_read", {})
    monkeypatch.setattr(_heartbeat, "_ends", {})
    compare = _heartbeat._Watch()._compare
    _heartbeat.has_read("examples", 0, 16)
    assert compare(1, {"examples": {"0": 17}}) is None  # it may end there too
    _heartbeat.has_read("examples", 0, 20)
    assert "gave 17 examples on process 1, and more on" in str(compare(1, {"examples": {"0": 17}}))
    _heartbeat.has_read("examples", 0, 20, ended=True)
    _heartbeat.has_read("examples", 1, 24)
    assert compare(1, {"examples": {"0": 20}, "Evaluation.examples": {"-1": 3}}) is None
    assert "17 examples on process 1, and 20 on" in str(compare(1, {"examples": {"0": 17}}))


OF_TWO_LENGTHS = """
import jax, numpy as np, optax
import redcoast as rc
rc.initialize()
count = 20 - MISSING * jax.process_index()
loss_fn = lambda model, batch, key: ((batch @ model) ** 2).mean()
examples = lambda: iter(np.ones((count, 4), np.float32))
rc.fit(np.ones(4, np.float32), optax.sgd(0.1), examples, loss_fn=loss_fn, batch_size=4, epochs=1)
"""


@pytest.mark.integration
@pytest.mark.parametrize("missing", [3, 8], ids=["in a batch", "at its end"])
def test_a_stream_that_ends_early_on_one_process_ends_the_run_with_a_reason(missing):
    script = OF_TWO_LENGTHS.replace("MISSING", str(missing))
    for process in run_processes(script, processes=2, timeout=120):
        assert process.returncode != 0
        assert "`examples` gave" in process.output
        assert "A stream must give the same examples on all processes" in process.output
