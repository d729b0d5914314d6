import math

import jax.numpy as jnp
import numpy as np
import pytest

import redcoast as rc
from redcoast.checkpoint._policy import restore_newest, saved_steps
from redcoast.checkpoint._saver import Saver


def tree(step):
    return {"x": jnp.full(3, float(step))}


SHARDINGS = rc.infer_shardings(tree(0), rc.make_mesh())


def restore(checkpoints):
    actual = restore_newest(checkpoints, tree(0), SHARDINGS)
    assert actual is not None
    return actual


def save(checkpoints, values):
    with Saver(checkpoints) as saver:
        for step, value in values.items():
            metrics = {} if value is None else {"loss": value}
            saver.save(step, tree(step), {"step": step, "metrics": metrics})


@pytest.mark.few("options0-kept0", "options2-kept2", "options5-kept5")
@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [4, 5]),
        ({"keep": 1}, [5]),
        ({"keep": 3}, [3, 4, 5]),
        ({"keep": 9}, [1, 2, 3, 4, 5]),
        ({"best": "loss", "keep": 1}, [2, 5]),
        ({"best": "eval/loss", "keep": 2, "mode": "max"}, [1, 4, 5]),
    ],
)
def test_retention(tmp_path, options, kept):
    checkpoints = rc.Checkpoints(tmp_path, **options)
    save(checkpoints, {1: 9.0, 2: 1.0, 3: math.nan, 4: None, 5: 4.0})
    assert saved_steps(checkpoints) == kept


def test_the_best_metric_is_kept_across_runs(tmp_path):
    checkpoints = rc.Checkpoints(tmp_path, every=10, keep=1, best="loss")
    save(checkpoints, {1: 3.0, 2: 1.0, 3: 2.0})
    with Saver(checkpoints) as saver:
        assert saver.wants(4, {"loss": 0.5}, epoch_ended=False)
        for metrics in ({"loss": 1.5}, {"loss": math.nan}, {"other": 0.5}, {}):
            assert not saver.wants(4, metrics, epoch_ended=True)
        assert saver.wants(10, {}, epoch_ended=False)
    save(checkpoints, {4: 5.0})
    assert saved_steps(checkpoints) == [2, 4]


def test_without_a_number_of_steps_evaluations_and_epochs_are_saved(tmp_path):
    with Saver(rc.Checkpoints(tmp_path)) as saver:
        assert saver.wants(4, {}, epoch_ended=True)
        assert saver.wants(4, {"loss": 1.0}, epoch_ended=False)
        assert not saver.wants(4, {}, epoch_ended=False)


def test_the_newest_is_restored_with_its_metadata(tmp_path):
    checkpoints = rc.Checkpoints(tmp_path, keep=2)
    assert restore_newest(checkpoints, tree(0), SHARDINGS) is None
    save(checkpoints, {1: 3.0, 2: 1.0})
    actual, metadata = restore(checkpoints)
    np.testing.assert_array_equal(actual["x"], np.full(3, 2.0))
    assert metadata == {"step": 2, "metrics": {"loss": 1.0}}


def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_used(tmp_path, caplog):
    checkpoints = rc.Checkpoints(tmp_path, keep=3)
    save(checkpoints, {1: None, 2: None, 3: None})
    (checkpoints.path / "3" / "metadata" / "metadata").write_text("{")
    (checkpoints.path / "2" / "state" / "_METADATA").unlink()
    actual, metadata = restore(checkpoints)
    assert metadata["step"] == 1
    np.testing.assert_array_equal(actual["x"], np.full(3, 1.0))
    assert "3 is damaged" in caplog.text
    assert (checkpoints.path / "3.damaged").is_dir()
    save(checkpoints, {2: None, 3: None})  # these steps can be saved again
    assert restore(checkpoints)[1]["step"] == 3


def test_nothing_is_moved_if_all_are_damaged(tmp_path):
    checkpoints = rc.Checkpoints(tmp_path)
    save(checkpoints, {1: None})
    (checkpoints.path / "1" / "metadata" / "metadata").unlink()
    with pytest.raises(ValueError, match="All checkpoints in .* are damaged"):
        restore_newest(checkpoints, tree(0), SHARDINGS)
    assert saved_steps(checkpoints) == [1]


def test_a_different_structure_is_not_damage(tmp_path):
    checkpoints = rc.Checkpoints(tmp_path, keep=2)
    save(checkpoints, {1: None, 2: None})
    other = {"y": jnp.ones(3)}
    with pytest.raises(ValueError, match="another model or optimizer. Only in this run: y"):
        restore_newest(checkpoints, other, rc.infer_shardings(other, rc.make_mesh()))
    assert saved_steps(checkpoints) == [1, 2]


def test_a_new_run_needs_an_empty_directory(tmp_path):
    save(rc.Checkpoints(tmp_path), {1: None})
    with pytest.raises(ValueError, match="resume=False"):
        restore_newest(rc.Checkpoints(tmp_path, resume=False), tree(0), SHARDINGS)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 0}, "`Checkpoints.every` is 0"),
        ({"keep": 0}, "`Checkpoints.keep` is 0"),
        ({"keep": None}, "keep"),
        ({"mode": "most"}, "'most'"),
    ],
)
def test_bad_policies(options, words):
    with pytest.raises((ValueError, TypeError), match=words):
        rc.Checkpoints("x", **options)


def test_directories_that_nothing_can_be_saved_in_are_refused_before_the_run(tmp_path):
    """An empty name was the working directory, and in the other one the last save failed."""
    with pytest.raises(ValueError, match="`directory` is empty"):
        rc.Checkpoints("")
    with pytest.raises(ValueError, match="not encoded as UTF-8"):
        rc.Checkpoints(tmp_path / "r\udcff")
    with pytest.raises(ValueError, match="takes '.', '.' and '.' in a path for a pattern"):
        rc.Checkpoints(tmp_path / "rates=[0.1]" / "run")
    with pytest.raises(ValueError, match="not encoded as UTF-8"):
        rc.save_checkpoint(tmp_path / "r\udcff", tree(0))


def test_relative_paths_need_a_working_directory(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(FileNotFoundError, match="`directory` is 'run', relative to the working"):
        rc.Checkpoints("run")
    assert rc.Checkpoints(tmp_path / "run").path == tmp_path / "run" / "checkpoints"
