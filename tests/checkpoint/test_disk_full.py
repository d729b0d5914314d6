"""A full disk: a small file system that the tests mount, as root."""

import contextlib
import gc
import logging
import subprocess
import time

import equinox as eqx
import jax
import optax
import pytest
from problem import collate_fn, loss_fn, make_examples, make_model, quiet

import redcoast as rc

pytestmark = [
    pytest.mark.faults,
    # Many of Orbax's writes fail. The first error is raised, and the others are never retrieved.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
OPTIMIZER = optax.adam(1e-3)


@pytest.fixture
def disk(tmp_path):
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("There is no `mount` here.")
    if done.returncode:
        pytest.skip(f"A small file system cannot be mounted here: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def fill(path):
    """Fills the disk completely."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def train(disk, *, free_at=None):
    """Trains for twelve steps and saves every second one; the disk is full from the third on."""
    where = rc.Checkpoints(disk, every=2, keep=1)

    def log(metrics, step):
        if step == 3:
            while not (where.path / "2").exists():
                time.sleep(0.01)
            fill(disk / "others")
        if step == free_at:
            (disk / "others").unlink()

    return rc.fit(
        make_model(width=64),
        OPTIMIZER,
        make_examples(64),
        collate_fn=collate_fn,
        loss_fn=loss_fn,
        batch_size=16,
        steps=12,
        checkpoints=where,
        log=quiet(log),
        mesh=rc.make_mesh(devices=jax.devices()[:1]),
    )


def failures(caplog):
    text = "could not be saved, and training continues"
    return [message for message in caplog.messages if text in message]


def newest(disk):
    (actual,) = [p for p in (disk / "checkpoints").iterdir() if p.name.isdigit()]
    like = rc.init_state(lambda key: make_model(width=64), OPTIMIZER, key=jax.random.key(0))
    return actual.name, rc.load_checkpoint(actual, like)


def test_saving_resumes_when_there_is_space(disk, caplog):
    with caplog.at_level(logging.WARNING, "redcoast"):
        state = train(disk, free_at=8)
    step, saved = newest(disk)
    assert step == "12"
    assert eqx.tree_equal(saved.model, state.model)
    assert failures(caplog)
    assert all("checkpoints/2." in message for message in failures(caplog))


def test_a_disk_that_stays_full_raises_at_the_end(disk, caplog):
    with caplog.at_level(logging.WARNING, "redcoast"), pytest.raises(rc.CheckpointNotSaved) as end:
        train(disk)
    assert "The final state, after step 12, could not be saved in" in str(end.value)
    assert "No space left" in str(end.value)
    assert len(failures(caplog)) == 5
    (disk / "others").unlink()
    step, saved = newest(disk)
    assert step == "2"
    assert saved.step == 2


def test_a_checkpoint_that_does_not_fit_is_one_error_without_tracebacks(disk, caplog, capfd):
    with pytest.raises(ValueError, match="No space left"):
        rc.save_checkpoint(disk / "large", jax.random.normal(jax.random.key(0), (2**21,)))
    gc.collect()  # reports tasks whose errors nobody has read
    assert "Traceback" not in capfd.readouterr().err
    assert not [record for record in caplog.records if record.exc_info]
