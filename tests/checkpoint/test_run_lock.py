"""A directory is locked by one run at a time."""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import optax
import pytest
from problem import collate_fn, loss_fn, make_examples, make_model

import redcoast as rc
from redcoast.checkpoint._checkpointer import lock_run

# A child that reads data may not notice that its parent is killed.
HOLDER = """
import os, sys, time, pathlib
from redcoast.checkpoint._checkpointer import lock_run
with lock_run(pathlib.Path(sys.argv[1])):
    child = os.fork()
    if child:
        print(child, flush=True)
    time.sleep(100)
"""


def hold(directory):
    """A process that has locked a directory, and the number of its child."""
    command = [sys.executable, "-c", HOLDER, str(directory)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as lines:
        return process, int(lines.readline())


def test_a_second_run_raises_an_error_that_names_the_first(tmp_path):
    process, child = hold(tmp_path)
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
            log=False,
        )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.lock"]
    process.kill()
    process.wait()
    with lock_run(tmp_path):  # a kill releases the lock
        assert json.loads((tmp_path / "run.lock").read_text())["process"] == os.getpid()
    os.kill(child, signal.SIGKILL)


def test_the_lock_works_in_one_process_and_an_error_releases_it(tmp_path):
    with lock_run(tmp_path):
        refused = pytest.raises(ValueError, match="in use by another run of this process, since")
        with refused, lock_run(tmp_path):
            pass
    with pytest.raises(KeyError), lock_run(tmp_path):
        raise KeyError
    with lock_run(tmp_path), lock_run(tmp_path / "another"), lock_run(None):
        pass


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b'{"host": 1}', b"[" * 4096, b"\xff"])
def test_a_lock_file_without_information(tmp_path, text):
    with lock_run(tmp_path):
        (tmp_path / "run.lock").write_bytes(text)
        refused = pytest.raises(ValueError, match="whose host and process are unknown")
        with refused, lock_run(tmp_path):
            pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_warns(tmp_path, monkeypatch, caplog, number):
    def refuse(file, how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with lock_run(tmp_path), lock_run(tmp_path):
        pass
    assert f"{tmp_path} cannot be locked here" in caplog.text


def test_a_directory_that_cannot_be_created(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"), lock_run(Path(tmp_path / "file")):
        pass


def test_a_directory_that_cannot_be_written_to(tmp_path):
    (tmp_path / "run.lock").mkdir()
    words = r"The directory of the run, .* cannot be written to: .*\. Choose one that can"
    with pytest.raises(IsADirectoryError, match=words), lock_run(tmp_path):
        pass
