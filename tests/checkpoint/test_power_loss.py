"""What a disk holds after a power loss, when files that were not synced have no content."""

import os
import signal
import stat
import subprocess
import sys
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paths import HELPERS

import redcoast as rc
from redcoast.checkpoint import _saver
from redcoast.checkpoint._policy import saved_steps
from redcoast.checkpoint._saver import Saver


class Disk:
    """A disk that holds only what was synced: contents of files, and names in directories."""

    def __init__(self, monkeypatch):
        self._files, self._names = {}, {}
        fsync = os.fsync

        def recorded(descriptor):
            fsync(descriptor)
            actual = os.fstat(descriptor)
            # A new file may have the number of one that was deleted.
            self._files.pop(actual.st_ino, None)
            self._names.pop(actual.st_ino, None)
            if stat.S_ISDIR(actual.st_mode):
                names = os.listdir(descriptor)
                numbers = {x: os.stat(x, dir_fd=descriptor).st_ino for x in names}
                self._names[actual.st_ino] = numbers
            else:
                self._files[actual.st_ino] = os.pread(descriptor, actual.st_size, 0)

        monkeypatch.setattr(os, "fsync", recorded)

    def after_power_loss(self, directory, copy):
        """Copies what the disk holds of a directory."""
        self._copy(directory.stat().st_ino, copy)
        return copy

    def _copy(self, number, copy):
        copy.mkdir(parents=True)
        for name, inner in self._names.get(number, {}).items():
            if inner in self._names:
                self._copy(inner, copy / name)
            else:
                (copy / name).write_bytes(self._files.get(inner, b""))


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


def tree(step):
    return {"x": jnp.full(3, float(step)), "inner": {"y": jnp.arange(1000.0)}}


def test_an_older_checkpoint_is_deleted_only_when_the_newer_one_is_on_the_disk(
    disk, tmp_path, monkeypatch
):
    where = rc.Checkpoints(tmp_path / "runs" / "new", keep=1)
    seen = []
    delete = _saver.delete

    def delete_after_power_loss(path):
        if path.name.isdigit():
            copy = disk.after_power_loss(tmp_path, tmp_path.with_name(f"copy{path.name}"))
            steps = saved_steps(rc.Checkpoints(copy / "runs" / "new"))
            actual = rc.load_checkpoint(copy / "runs" / "new" / "checkpoints" / str(steps[-1]))
            seen.append((int(path.name), steps[-1], float(actual["x"][0])))
            assert (copy / "runs" / "new" / "metrics.jsonl").read_text() == "{}\n"
        delete(path)

    monkeypatch.setattr(_saver, "delete", delete_after_power_loss)
    with Saver(where) as saver:
        (where.path.parent / "metrics.jsonl").write_text("{}\n")
        for step in (1, 2, 3):
            saver.save(step, tree(step), {"metrics": {}})
    assert seen == [(1, 2, 2.0), (2, 3, 3.0)]


def test_what_a_function_saved_is_on_the_disk_when_it_returns(disk, tmp_path):
    """Everything that appears under its final name: checkpoints, models, adapters and plans."""
    config = rc.models.LlamaConfig(vocab=8, width=8, layers=1, heads=2, kv_heads=2, hidden=8)
    abstract = eqx.filter_eval_shape(rc.models.Llama, config, key=jax.random.key(0))
    model = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), abstract)
    saved = tmp_path / "saved"
    rc.save_checkpoint(saved / "checkpoint", tree(4))
    rc.save_pretrained(model, saved / "model")
    adapted = rc.lora.add_adapters(model, targets="wq", rank=2, key=jax.random.key(1))
    rc.lora.save_adapters(adapted, saved / "adapters")
    rc.save_plan(rc.plan_shardings(tree(0), rc.make_mesh(model=2)), saved / "plan.json")

    copy = disk.after_power_loss(tmp_path, tmp_path.with_name("copy")) / "saved"
    np.testing.assert_array_equal(rc.load_checkpoint(copy / "checkpoint")["x"], np.full(3, 4.0))
    for name in ("model", "adapters", "plan.json"):
        assert contents(copy / name) == contents(saved / name)


def contents(path):
    files = path.rglob("*") if path.is_dir() else [path]
    return {str(x.relative_to(path)): x.read_bytes() for x in files if x.is_file()}


def test_a_checkpoint_that_cannot_be_synced_is_not_saved(tmp_path, monkeypatch, caplog):
    where = rc.Checkpoints(tmp_path, keep=1)
    save(where, 1)

    def fail(descriptor):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    monkeypatch.setattr(_saver, "WAITS", ())
    with pytest.raises(rc.CheckpointNotSaved, match="Input/output error"):
        save(where, 2)
    assert saved_steps(where) == [1]
    assert "The checkpoint of step 2 could not be saved" in caplog.text


def save(where, step):
    with Saver(where) as saver:
        saver.save(step, tree(step), {"metrics": {}})


def test_a_file_system_without_syncing_is_one_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("redcoast.core._durable_files._warned", set())

    def unsupported(descriptor):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "fsync", unsupported)
    rc.save_checkpoint(tmp_path / "a", tree(1))
    rc.save_checkpoint(tmp_path / "b", tree(1))
    assert [x for x in caplog.messages if "cannot be synced" in x] == caplog.messages
    assert len(caplog.messages) == 1


SCRIPT = """
import sys
import optax
import redcoast as rc
from problem import collate_fn, loss_fn, make_examples, make_model

rc.fit(
    make_model(), optax.adam(1e-3), make_examples(64), collate_fn=collate_fn, loss_fn=loss_fn,
    batch_size=8, steps=int(sys.argv[2]), checkpoints=rc.Checkpoints(sys.argv[1], every=20, keep=1),
)
"""


def run(directory, steps):
    command = [sys.executable, "-c", SCRIPT, str(directory), str(steps)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=HELPERS, **options)


def shell(command):
    return subprocess.run(command, shell=True, capture_output=True, text=True)


@pytest.mark.faults
@pytest.mark.parametrize("saves", [2, 3, 4])
def test_a_run_resumes_from_an_image_of_the_disk(tmp_path, saves):
    """A real ext4 whose image is copied while the run is frozen, without what is in memory."""
    image, copy, disk, again = (tmp_path / x for x in ("image", "copy", "disk", "again"))
    disk.mkdir()
    again.mkdir()
    shell(f"truncate -s 100M {image}; mkfs.ext4 -q {image}")
    made = shell(f"mount -o loop {image} {disk}")
    if made.returncode:
        pytest.skip(f"A disk cannot be mounted here: {made.stderr.strip()}")
    try:
        process = run(disk / "run", 10**6)
        deadline = time.monotonic() + 300
        steps = []
        while len(steps) != 1 or steps[0] < 20 * saves:  # until the one before was deleted
            steps = saved_steps(rc.Checkpoints(disk / "run"))
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGSTOP)
        shell(f"cp {image} {copy}")
        process.kill()
        process.communicate()
        assert shell(f"mount -o loop {copy} {again}").returncode == 0
        newest = saved_steps(rc.Checkpoints(again / "run"))[-1]
        resumed = run(again / "run", newest + 5)
        output, _ = resumed.communicate(timeout=300)
        assert resumed.returncode == 0, output
        assert f"Resumed at step {newest}." in output
        assert newest >= steps[0]
    finally:
        shell(f"umount {disk}; umount {again}")
