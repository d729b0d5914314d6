"""One run at a time in a directory."""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import optax
import pytest
from problem import collate_fn, loss_fn, make_examples, make_model

import redcoast as rc
from redcoast.checkpoint._run_lock import lock_run

HOLDER = """
import sys, time, pathlib
from redcoast.checkpoint._run_lock import lock_run
with lock_run(pathlib.Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(100)
"""


def hold(directory):
    command = [sys.executable, "-c", HOLDER, str(directory)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    return process


def end(process, number):
    process.send_signal(number)
    process.wait()
    process.stdout.close()


def test_the_second_run_is_refused_and_told_of_the_first(tmp_path):
    process = hold(tmp_path)
    checkpoints = rc.Checkpoints(tmp_path)
    words = f"in use by another run, process {process.pid} on {socket.gethostname()}, since 20"
    with pytest.raises(ValueError, match=words):
        rc.fit(
            make_model(),
            optax.adam(1e-3),
            make_examples(16),
            collate_fn=collate_fn,
            loss_fn=loss_fn,
            batch_size=16,
            steps=1,
            mesh=rc.make_mesh(devices=jax.devices()[:1]),
            checkpoints=checkpoints,
            progress=False,
        )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.holder", "run.lock"]
    end(process, signal.SIGKILL)
    with lock_run(tmp_path):  # a kill leaves nothing in the way
        assert json.loads((tmp_path / "run.lock").read_text())["process"] == os.getpid()


def test_in_one_process_too_and_an_error_frees_it(tmp_path):
    with lock_run(tmp_path):
        refused = pytest.raises(ValueError, match=f"process {os.getpid()} on")
        with refused, lock_run(tmp_path):
            pass
    with pytest.raises(KeyError), lock_run(tmp_path):
        raise KeyError
    with lock_run(tmp_path), lock_run(tmp_path / "another"), lock_run(None):
        pass


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b'{"host": 1}', b"[" * 4096, b"\xff"])
def test_a_holder_that_says_nothing(tmp_path, text):
    with lock_run(tmp_path):
        (tmp_path / "run.lock").write_bytes(text)
        refused = pytest.raises(ValueError, match="which has not said")
        with refused, lock_run(tmp_path):
            pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_where_nothing_can_be_locked_it_is_a_warning(tmp_path, monkeypatch, caplog, number):
    """Another run is refused all the same."""

    def refuse(file, how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    refused = pytest.raises(ValueError, match=f"in use by another run, process {os.getpid()} on")
    with lock_run(tmp_path), refused, lock_run(tmp_path):
        pass
    assert f"{tmp_path} cannot be locked here" in caplog.text
    with lock_run(tmp_path):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["run.lock"]


@pytest.fixture
def elsewhere(monkeypatch):
    """As if each run were on a machine of its own, which knows nothing of the locks of others."""
    monkeypatch.setattr(fcntl, "flock", lambda file, how: None)
    machines = iter(range(10**6))
    monkeypatch.setattr(
        "redcoast.checkpoint._run_lock._kernel", lambda: f"machine {next(machines)}"
    )
    monkeypatch.setattr("redcoast.checkpoint._run_lock.BEAT", 0.01)
    monkeypatch.setattr("redcoast.checkpoint._run_lock.DEAD", 30.0)
    return monkeypatch


def test_a_run_of_another_machine_is_refused_while_it_lives(tmp_path, elsewhere, caplog):
    with lock_run(tmp_path):
        refused = pytest.raises(ValueError, match=f"in use by another run, process {os.getpid()}")
        with refused, lock_run(tmp_path):
            pass
    assert "waiting 30 s for a sign of life" in caplog.text
    with lock_run(tmp_path):
        pass


@pytest.mark.parametrize("cut", [None, 0, 5])
def test_a_run_that_died_on_another_machine_is_in_nobodys_way(tmp_path, elsewhere, cut):
    elsewhere.setattr("redcoast.checkpoint._run_lock.DEAD", 0.2)
    holder = tmp_path / "run.holder"
    left = json.dumps({"host": "another", "process": 1, "token": "0", "kernel": "?", "beat": 7})
    holder.write_text(left[:cut])
    with lock_run(tmp_path):
        assert json.loads(holder.read_text())["process"] == os.getpid()
    assert [p.name for p in tmp_path.iterdir()] == ["run.lock"]


def test_of_many_that_begin_at_once_one_is_let_in(tmp_path, elsewhere):
    """As all the pods of a job do, each of which thinks that it is alone."""
    came = threading.Barrier(8)
    outcomes = []

    def run():
        came.wait()
        try:
            with lock_run(tmp_path):
                outcomes.append("in")
                came.wait()
        except ValueError as error:
            outcomes.append(str(error).split(",")[0])
            came.wait()

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == [f"{tmp_path} is in use by another run"] * 7 + ["in"]


def test_a_run_that_was_taken_for_dead_says_so(tmp_path, elsewhere, caplog):
    with lock_run(tmp_path):
        other = tmp_path / "other"
        other.write_text(json.dumps({"token": "another"}))
        other.rename(tmp_path / "run.holder")
        while "Another run has begun" not in caplog.text:
            time.sleep(0.01)
    assert json.loads((tmp_path / "run.holder").read_text()) == {"token": "another"}


def test_processes_that_each_think_they_are_alone_are_refused(tmp_path):
    """Two real ones at one directory, as a launcher that nobody knows starts them."""
    first = hold(tmp_path)
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    second = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert second.returncode == 1
    assert f"in use by another run, process {first.pid} on" in second.stderr
    end(first, signal.SIGKILL)
    end(hold(tmp_path), signal.SIGKILL)  # a kill leaves nothing in the way


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"), lock_run(Path(tmp_path / "file")):
        pass
