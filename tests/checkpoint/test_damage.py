"""Checkpoints with missing or changed files."""

import json
import shutil
import zlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problem import collate_fn, loss_fn, make_examples, make_model
from random_models import to_device

import redcoast as rc
from redcoast.checkpoint import _tree
from redcoast.checkpoint._checksums import algorithm, find_damage, write_checksums
from redcoast.checkpoint._policy import restore_newest, saved_steps
from redcoast.checkpoint._saver import Saver

# Orbax writes these at the end, and never reads them.
NOT_READ = {"_CHECKPOINT_METADATA", "commit_success.txt"}
TREE = {
    "weight": to_device(np.random.default_rng(0).normal(size=(8, 33)), np.float32),
    "zeros": jnp.zeros(64),
    "key": jax.random.key(3),
}


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory):
    path = tmp_path_factory.mktemp("undamaged") / "checkpoint"
    rc.save_checkpoint(path, TREE, metadata={"step": 1})
    return path


@pytest.fixture
def copy(undamaged, tmp_path):
    return shutil.copytree(undamaged, tmp_path / "copy")


def files(path):
    return [p for p in sorted(path.rglob("*")) if p.is_file()]


def flip(file, at):
    data = bytearray(file.read_bytes())
    data[at % len(data)] ^= 1
    file.write_bytes(data)


def assert_damaged(path, file):
    """Checks that loading raises an error that names both, or that the file is not read."""
    if str(file.relative_to(path)) in NOT_READ:
        np.testing.assert_array_equal(rc.load_checkpoint(path)["weight"], TREE["weight"])
        return
    with pytest.raises(ValueError, match="is damaged: ") as error:
        rc.load_checkpoint(path, TREE)
    assert str(path) in str(error.value)
    assert str(file) in str(error.value)


@pytest.mark.few("first", "shorter", "longer", "missing")
@pytest.mark.parametrize(
    "harm",
    [
        lambda file: flip(file, 0),
        lambda file: flip(file, file.stat().st_size // 2),
        lambda file: flip(file, -1),
        lambda file: file.write_bytes(file.read_bytes()[:-1]),
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(file.read_bytes() + b"\0"),
        lambda file: file.unlink(),
    ],
    ids=["first", "middle", "last", "shorter", "empty", "longer", "missing"],
)
def test_each_file_in_turn(copy, harm):
    assert len(files(copy)) > 12
    for file in files(copy):
        before = file.read_bytes()
        harm(file)
        assert_damaged(copy, file)
        file.write_bytes(before)
    np.testing.assert_array_equal(rc.load_checkpoint(copy, TREE)["weight"], TREE["weight"])


def test_bytes_of_the_list_of_checksums(copy):
    """A flipped bit in the list of checksums is noticed, also in the name of its algorithm, without
    which no file would be compared."""

    def check():
        _tree.check_whole(copy, part=999, parts=1000)  # reads no other file
        _tree.read_metadata(copy)

    file = copy / "checksums.json"
    before = file.read_bytes()
    for at in range(0, len(before), 5):
        flip(file, at)
        with pytest.raises(ValueError, match="is damaged: "):
            check()
        file.write_bytes(before)
    _tree.check_whole(copy)


def test_checksums_have_the_published_check_value(tmp_path):
    """CRC-32C of the digits from 1 to 9 is the value in the catalogue of CRC algorithms."""
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "digits").write_bytes(b"123456789")
    write_checksums(tmp_path)
    document = json.loads((tmp_path / "checksums.json").read_text())
    assert document["files"]["state/digits"] == [9, "e3069283"]


def test_an_algorithm_that_is_no_text_is_damage(copy):
    file = copy / "checksums.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"algorithm": 5}))
    assert "does not name an algorithm" in (find_damage(copy) or "")


def test_without_a_compiled_package_checksums_are_crc32(tmp_path, monkeypatch):
    """In Python alone, CRC-32C of a large checkpoint would take hours."""
    import google_crc32c

    monkeypatch.setattr(google_crc32c, "implementation", "python")
    algorithm.cache_clear()
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "digits").write_bytes(b"123456789")
    write_checksums(tmp_path)
    algorithm.cache_clear()
    document = json.loads((tmp_path / "checksums.json").read_text())
    assert document["algorithm"] == "crc32"
    assert document["files"]["state/digits"] == [9, "cbf43926"]
    assert find_damage(tmp_path) is None


def test_checksums_of_earlier_versions_are_compared(copy):
    file = copy / "checksums.json"
    document = json.loads(file.read_text())
    edit(copy, checksums="crc32")
    for name in document["files"]:
        data = (copy / name).read_bytes()
        document["files"][name] = [len(data), f"{zlib.crc32(data):08x}"]
    text = json.dumps(document["files"], sort_keys=True)
    document |= {"algorithm": "crc32", "of_this": f"{zlib.crc32(text.encode()):08x}"}
    file.write_text(json.dumps(document))
    np.testing.assert_array_equal(rc.load_checkpoint(copy, TREE)["weight"], TREE["weight"])
    largest = array_file(copy)
    flip(largest, 40)
    with pytest.raises(ValueError, match=f"is damaged: {largest} has changed"):
        rc.load_checkpoint(copy, TREE)


def test_each_directory_missing(copy):
    folders = [p for p in sorted(copy.rglob("*")) if p.is_dir()]
    assert len(folders) > 5
    for folder in folders:
        aside = copy.parent / "aside"
        folder.rename(aside)
        with pytest.raises(ValueError, match="missing|There is no checkpoint"):
            rc.load_checkpoint(copy, TREE)
        aside.rename(folder)
    rc.load_checkpoint(copy, TREE)


def test_an_empty_directory(tmp_path):
    with pytest.raises(ValueError, match="There is no checkpoint at"):
        rc.load_checkpoint(tmp_path)


def edit(path, **changes):
    file = path / "metadata" / "metadata"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": 2}, "format 2.*reads up to format 1"),
        ({"format": "two"}, "not written by redcoast"),
        ({"format": None}, "not written by redcoast"),
        ({"prng_keys": [1]}, "not written by redcoast"),
        ({"checksums": "blake3"}, "checksums.json is missing"),
    ],
)
def test_invalid_metadata(copy, changes, words):
    (copy / "checksums.json").unlink()
    edit(copy, **{"checksums": None, **changes})
    with pytest.raises(ValueError, match=words):
        rc.load_checkpoint(copy)


def test_arrays_are_described_once(copy, monkeypatch):
    # To read the shapes from the files of the arrays takes a sixth of a load.
    monkeypatch.setattr(_tree, "saved_arrays", None)
    np.testing.assert_array_equal(rc.load_checkpoint(copy, TREE)["weight"], TREE["weight"])


@pytest.mark.parametrize("fault", ["unreadable", "missing", "wrong"])
def test_another_description_of_the_arrays(copy, fault):
    """Checkpoints of older versions have none; one with other types is found out."""
    arrays = json.loads((copy / "metadata" / "metadata").read_text())["arrays"]
    like = TREE
    if fault == "unreadable":
        arrays = {"weight": "float32"}
    elif fault == "missing":
        arrays = None
    else:
        arrays["weight"]["dtype"] = "int32"
        like = TREE | {"weight": TREE["weight"].astype(jnp.int32)}
    edit(copy, arrays=arrays)
    write_checksums(copy)
    if fault == "wrong":
        with pytest.raises(ValueError, match="cannot be read, although its checksums are correct"):
            rc.load_checkpoint(copy, like)
    else:
        np.testing.assert_array_equal(rc.load_checkpoint(copy, like)["weight"], TREE["weight"])


def test_a_newer_format_with_other_checksums(copy):
    (copy / "checksums.json").write_text('{"algorithm": "blake3", "files": {}}')
    edit(copy, format=7, checksums="blake3")
    with pytest.raises(ValueError, match="format 7, written by redcoast"):
        rc.load_checkpoint(copy)


def test_checkpoints_of_older_versions_have_no_checksums(copy):
    (copy / "checksums.json").unlink()
    edit(copy, checksums=None)
    np.testing.assert_array_equal(rc.load_checkpoint(copy)["weight"], TREE["weight"])
    (copy / "state" / "_METADATA").unlink()
    with pytest.raises(ValueError, match="copy is damaged: FileNotFoundError"):
        rc.load_checkpoint(copy)


def test_parts_together_read_all(copy):
    file = max(files(copy), key=lambda p: p.stat().st_size)
    flip(file, 100)
    actual = [find_damage(copy, part=part, parts=3) for part in range(3)]
    assert [problem for problem in actual if problem] == [find_damage(copy)]
    file.unlink()
    assert all("missing" in (find_damage(copy, part=part, parts=3) or "") for part in range(3))


def save_run(directory, **harms):
    checkpoints = rc.Checkpoints(directory, keep=9)
    with Saver(checkpoints) as saver:
        for step in (1, 2, 3):
            saver.save(step, {"x": jnp.full(9, float(step))}, {"step": step, "metrics": {}})
    return checkpoints


def array_file(path):
    return max((path / "state").glob("ocdbt.process_0/d/*"), key=lambda p: p.stat().st_size)


@pytest.mark.few("flipped", "missing", "format")
@pytest.mark.parametrize(
    "harm",
    [
        lambda path: flip(array_file(path), 40),
        lambda path: array_file(path).unlink(),
        lambda path: shutil.rmtree(path / "state"),
        lambda path: [shutil.rmtree(p) if p.is_dir() else p.unlink() for p in path.iterdir()],
        lambda path: (path / "metadata" / "metadata").write_text('{"format": '),
        lambda path: edit(path, format=99),
    ],
    ids=["flipped", "missing", "directory", "empty", "json", "format"],
)
def test_a_run_resumes_from_the_newest_undamaged_checkpoint(tmp_path, caplog, harm):
    checkpoints = save_run(tmp_path)
    like = {"x": jnp.zeros(9)}
    for step in (2, 3):
        harm(checkpoints.path / str(step))
    actual = restore_newest(checkpoints, like, rc.infer_shardings(like, rc.make_mesh()))
    assert actual is not None
    assert actual[1]["step"] == 1
    np.testing.assert_array_equal(actual[0]["x"], np.full(9, 1.0))
    assert [r.levelname for r in caplog.records] == ["WARNING"] * 4
    for step in (2, 3):
        path = checkpoints.path / str(step)
        assert f"{path} was moved to {path}.damaged" in caplog.text
        assert f"and {checkpoints.path / '1'} is used" in caplog.text
    assert saved_steps(checkpoints) == [1]


def test_earlier_damaged_checkpoints_are_kept(tmp_path):
    checkpoints = save_run(tmp_path)
    like = {"x": jnp.zeros(9)}
    (checkpoints.path / "3.damaged").mkdir()
    flip(array_file(checkpoints.path / "3"), 40)
    actual = restore_newest(checkpoints, like, rc.infer_shardings(like, rc.make_mesh()))
    assert actual is not None
    assert actual[1]["step"] == 2
    assert not list((checkpoints.path / "3.damaged").iterdir())
    assert list((checkpoints.path / "3.damaged1").iterdir())


def test_a_missing_permission_is_not_damage(tmp_path, monkeypatch):
    checkpoints = save_run(tmp_path)
    like = {"x": jnp.zeros(9)}

    def refuse(path, extend):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("redcoast.checkpoint._checksums._measure", refuse)
    with pytest.raises(PermissionError, match="Permission denied"):
        restore_newest(checkpoints, like, rc.infer_shardings(like, rc.make_mesh()))
    assert saved_steps(checkpoints) == [1, 2, 3]


@pytest.mark.thorough
def test_fit_warns_and_repeats_the_lost_steps(tmp_path, caplog):
    def train(directory, steps):
        return rc.fit(
            make_model(),
            optax.adam(1e-3),
            make_examples(64),
            collate_fn=collate_fn,
            loss_fn=loss_fn,
            batch_size=16,
            steps=steps,
            mesh=rc.make_mesh(devices=jax.devices()[:1]),
            checkpoints=rc.Checkpoints(directory, every=2, keep=3),
            log=False,
        )

    expected = train(tmp_path / "undamaged", 8)
    train(tmp_path / "harmed", 6)
    flip(array_file(tmp_path / "harmed" / "checkpoints" / "6"), 50)
    state = train(tmp_path / "harmed", 8)
    assert f"{tmp_path}/harmed/checkpoints/6 is damaged" in caplog.text
    assert "its checksum differs" in caplog.text
    assert eqx.tree_equal(state.model, expected.model)
    assert (tmp_path / "harmed" / "checkpoints" / "6.damaged").is_dir()
