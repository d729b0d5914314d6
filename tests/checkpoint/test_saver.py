"""Failing saves: training continues, earlier checkpoints are kept, and the end raises an error."""

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from paths import HELPERS

import redcoast as rc
from redcoast.checkpoint import _orbax, _saver
from redcoast.checkpoint._checksums import write_checksums
from redcoast.checkpoint._policy import saved_steps
from redcoast.checkpoint._saver import Saver, remove_unfinished

SCRIPT = """
import json, logging, os, pathlib, resource, sys, time
import equinox as eqx, jax, optax
import redcoast as rc
from problem import collate_fn, loss_fn, make_examples, make_model

messages = []
handler = logging.Handler()
handler.emit = lambda record: messages.append(record.getMessage())
logging.getLogger("redcoast").addHandler(handler)
optimizer = optax.adam(1e-3)

def run(name, directory, begin, end):
    messages.clear()
    where = rc.Checkpoints(directory, every=2, keep=1)

    def log(metrics, step):
        if step == 3:
            while not (where.path / "2").exists():
                time.sleep(0.01)
            begin(where.path)
        if step == 8:
            end(where.path)

    error = state = None
    try:
        state = rc.fit(
            make_model(width=64), optimizer, make_examples(64), collate_fn=collate_fn,
            loss_fn=loss_fn, batch_size=16, steps=12, checkpoints=where,
            log=[rc.progress_logger(False), log],
            mesh=rc.make_mesh(devices=jax.devices()[:1]),
        )
    except rc.CheckpointNotSaved as caught:
        error = caught
    full(resource.RLIM_INFINITY)
    (newest,) = [p for p in where.path.iterdir() if p.name.isdigit()]
    like = rc.init_state(lambda key: make_model(width=64), optimizer, key=jax.random.key(0))
    found = rc.load_checkpoint(newest, like)
    print(json.dumps({
        "name": name, "messages": messages, "error": str(error), "newest": newest.name,
        "same": state is not None and bool(eqx.tree_equal(found.model, state.model)),
        "logged": [entry["step"] for entry in rc.read_metrics(where.path.parent / "metrics.jsonl")],
    }), flush=True)

def full(most):
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))

nothing = lambda path: None
base = pathlib.Path(sys.argv[1])
run("full", base / "full", lambda path: full(500), lambda path: full(resource.RLIM_INFINITY))
run("full at the end", base / "end", lambda path: full(500), nothing)
if os.geteuid() == 0:  # root may write everywhere
    os.chown(base, 65534, 65534)
    os.seteuid(65534)
allow = lambda mode: lambda path: path.chmod(mode)
run("denied", base / "denied", allow(0o500), allow(0o700))
"""


@pytest.fixture(scope="module")
def runs():
    # Another user needs access, which tmp_path does not allow.
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        base = Path(directory) / "runs"
        base.mkdir()
        result = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(base)],
            cwd=HELPERS,
            capture_output=True,
            text=True,
            timeout=900,
        )
    assert result.returncode == 0, result.stderr
    return {run["name"]: run for run in map(json.loads, result.stdout.splitlines())}


def failures(run):
    return [m for m in run["messages"] if "could not be saved, and training continues" in m]


@pytest.mark.parametrize("name", ["full", "denied"])
@pytest.mark.integration
def test_training_continues_and_saves_again_when_possible(runs, name):
    run = runs[name]
    assert run["error"] == "None"
    assert run["newest"] == "12"
    assert run["same"]
    warned = failures(run)
    # A save that is in progress when saving becomes possible again may fail or succeed.
    steps = [m.split("step ")[1].split()[0] for m in warned]
    assert steps in (["4"], ["4", "6"], ["4", "6", "8"])
    assert all("checkpoints/2." in m for m in warned)


@pytest.mark.integration
def test_reasons_are_named(runs):
    assert all("Permission denied" in m for m in failures(runs["denied"]))
    assert all("File too large" in m or "FILE" in m.upper() for m in failures(runs["full"]))


@pytest.mark.integration
def test_metrics_are_one_warning(runs):
    for name in ("full", "full at the end"):
        assert sum("metrics of step" in m for m in runs[name]["messages"]) == 1
    assert {1, 2, 11, 12} <= set(runs["full"]["logged"])


@pytest.mark.integration
def test_an_unsaved_final_state_raises(runs):
    run = runs["full at the end"]
    assert run["newest"] == "2"
    assert "The final state, after step 12, could not be saved in" in run["error"]
    assert "The last good checkpoint is" in run["error"]
    assert len(failures(run)) == 5


def tree(step):
    return {"x": jnp.full(3, float(step))}


def test_checkpoints_are_deleted_only_after_the_next_is_complete(tmp_path, monkeypatch):
    checkpoints = rc.Checkpoints(tmp_path, keep=1)
    with Saver(checkpoints) as saver:
        saver.save(1, tree(1), {"metrics": {}})
        saver._settle()
        with monkeypatch.context() as patch:

            def fail(directory):
                assert saved_steps(checkpoints) == [1]
                raise OSError(28, "No space left on device")

            patch.setattr("redcoast.checkpoint._orbax.write_checksums", fail)
            saver.save(2, tree(2), {"metrics": {}})
            saver._settle()
        assert saved_steps(checkpoints) == [1]
        saver.save(3, tree(3), {"metrics": {}})
    assert [p.name for p in checkpoints.path.iterdir()] == ["3"]


def save(checkpoints, step):
    with Saver(checkpoints) as saver:
        saver.save(step, tree(step), {"metrics": {}})


def save_and_raise(checkpoints):
    with Saver(checkpoints) as saver:
        saver.save(1, tree(1), {"metrics": {}})
        raise KeyError("mine")


@pytest.fixture
def no_waiting(monkeypatch):
    """The final save is tried again at once."""
    monkeypatch.setattr(_saver, "WAITS", (0, 0))


def test_the_cause_is_kept_and_other_errors_take_precedence(tmp_path, monkeypatch, no_waiting):
    def fail(directory):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("redcoast.checkpoint._orbax.write_checksums", fail)
    with pytest.raises(rc.CheckpointNotSaved, match="No space left") as error:  # noqa: SIM117
        with Saver(rc.Checkpoints(tmp_path)) as saver:
            saver.save(1, tree(1), {"metrics": {}})
    assert isinstance(error.value, OSError)
    assert isinstance(error.value.__cause__, OSError)
    with pytest.raises(KeyError, match="mine"):
        save_and_raise(rc.Checkpoints(tmp_path))


def test_the_final_state_is_saved_when_there_is_space_again(
    tmp_path, monkeypatch, caplog, no_waiting
):
    """A disk that is full for a while must not cost the state that nothing follows."""
    write, calls = write_checksums, []

    def fail_twice(directory):
        calls.append(1)
        if len(calls) <= 2:
            raise OSError(28, "No space left on device")
        write(directory)

    monkeypatch.setattr(_orbax, "write_checksums", fail_twice)
    checkpoints = rc.Checkpoints(tmp_path)
    with Saver(checkpoints) as saver:
        saver.save(1, tree(1), {"metrics": {}})
    assert saved_steps(checkpoints) == [1]
    assert "It is tried again in" in caplog.text
    np.testing.assert_array_equal(rc.load_checkpoint(checkpoints.path / "1")["x"], np.ones(3))


def test_a_failed_save_is_one_line(tmp_path, monkeypatch, caplog, no_waiting):
    """Without the tracebacks of every task and thread of Orbax, and not for other errors."""

    def save_and_log(checkpoints):
        with Saver(checkpoints) as saver:
            saver.save(1, tree(1), {"metrics": {}})
            saver._settle()
            try:
                raise KeyError("mine")
            except KeyError:
                logging.getLogger("absl").exception("of another")

    monkeypatch.setattr(_orbax, "write_checksums", lambda directory: 1 / 0)
    with pytest.raises(rc.CheckpointNotSaved):
        save_and_log(rc.Checkpoints(tmp_path))
    assert [x.getMessage() for x in caplog.records if x.exc_info] == ["of another"]
    assert "division by zero" in caplog.text


def test_a_disk_that_takes_nothing_is_found_before_a_save(tmp_path, monkeypatch, no_waiting):
    """So that a full disk fails in one place, and leaves nothing behind."""

    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    monkeypatch.setattr(_orbax, "write_checksums", None)  # Orbax is not called
    with pytest.raises(rc.CheckpointNotSaved, match="No space left"):
        save(rc.Checkpoints(tmp_path), 1)
    assert not list((tmp_path / "checkpoints").iterdir())


def test_files_with_the_names_of_checkpoints_are_not_checkpoints(tmp_path, caplog):
    checkpoints = rc.Checkpoints(tmp_path, keep=1)
    checkpoints.path.mkdir()
    for name in ("36", "7.deleting"):
        (checkpoints.path / name).write_text("mine")
    with Saver(checkpoints) as saver:
        for step in (1, 2):
            saver.save(step, tree(step), {"metrics": {}})
    assert saved_steps(checkpoints) == [2]
    assert not caplog.records
    assert (checkpoints.path / "36").read_text() == (checkpoints.path / "7.deleting").read_text()


def test_an_unsaved_best_checkpoint_does_not_count(tmp_path, monkeypatch):
    with Saver(rc.Checkpoints(tmp_path, every=10, best="loss")) as saver:
        with monkeypatch.context() as patch:
            patch.setattr("redcoast.checkpoint._orbax.write_checksums", lambda directory: 1 / 0)
            saver.save(1, tree(1), {"metrics": {"loss": 0.5}})
            saver._settle()
        assert saver.wants(2, {"loss": 0.7}, epoch_ended=False)
        saver.save(2, tree(2), {"metrics": {"loss": 0.7}})
        assert not saver.wants(3, {"loss": 0.8}, epoch_ended=False)


def test_only_incomplete_checkpoints_are_removed(tmp_path):
    outside = tmp_path / "outside"
    (outside / "kept").mkdir(parents=True)
    path = tmp_path / "run"
    for name in ("3.orbax-checkpoint-tmp", "2.deleting", "1", "notes", "4.damaged"):
        (path / name / "state").mkdir(parents=True)
    (path / "5.deleting").symlink_to(outside)
    remove_unfinished(path)
    assert sorted(p.name for p in path.iterdir()) == ["1", "4.damaged", "notes"]
    assert (outside / "kept").is_dir()


def test_deleting_a_checkpoint_does_not_follow_links(tmp_path):
    checkpoints = rc.Checkpoints(tmp_path / "run", keep=1)
    with Saver(checkpoints) as saver:
        saver.save(1, tree(1), {"metrics": {}})
    (checkpoints.path / "1").rename(tmp_path / "elsewhere")
    (checkpoints.path / "1").symlink_to(tmp_path / "elsewhere")
    with Saver(checkpoints) as saver:
        saver.save(2, tree(2), {"metrics": {}})
    assert saved_steps(checkpoints) == [2]
    assert (tmp_path / "elsewhere" / "state").is_dir()


def test_an_earlier_step_is_kept_beside_a_later_one(tmp_path, caplog):
    checkpoints = rc.Checkpoints(tmp_path / "run")
    for step in (100, 50):
        with Saver(checkpoints) as saver:
            saver.save(step, tree(step), {"metrics": {}})
    assert saved_steps(checkpoints) == [50, 100]
    assert "Step 50 is saved in" in caplog.text
    assert "later checkpoint, of step 100" in caplog.text


def test_metrics_of_a_step_that_was_saved_are_not_dropped_silently(tmp_path, caplog):
    with Saver(rc.Checkpoints(tmp_path, best="loss")) as saver:
        saver.save(1, tree(1), {"metrics": {}})
        saver.save(1, tree(1), {"metrics": {}})
        assert not caplog.records
        saver.save(1, tree(1), {"metrics": {"loss": 0.5}})
    assert "these metrics are not saved: loss" in caplog.text


def test_a_checkpoint_that_no_run_saved_is_not_resumed(tmp_path):
    rc.save_checkpoint(tmp_path / "run" / "checkpoints" / "0", tree(0))
    with (
        rc.Checkpointer(rc.Checkpoints(tmp_path / "run")) as checkpointer,
        pytest.raises(
            ValueError, match="was saved by `redcoast.save_checkpoint`, and not by a run"
        ),
    ):
        checkpointer.restore(tree(0), {})


def test_an_unwritable_directory_raises_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        Saver(rc.Checkpoints(tmp_path / "file"))
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(OSError, match="checkpoints, is a file, a link to nothing, or inside"):
        Saver(rc.Checkpoints(tmp_path))


def test_a_directory_that_was_removed_is_created_again(tmp_path, caplog, no_waiting):
    """So that the final state is not lost with what was removed."""
    checkpoints = rc.Checkpoints(tmp_path / "run")
    with Saver(checkpoints) as saver:
        shutil.rmtree(tmp_path / "run")
        saver.save(1, tree(1), {"metrics": {}})
    assert saved_steps(checkpoints) == [1]
    assert "is gone, and is created again" in caplog.text
