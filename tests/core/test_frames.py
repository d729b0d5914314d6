"""Which frames of a traceback are shown, and in which order the notes of an error."""

import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import redcoast as rc
from redcoast.core._frames import LastNote, tidy
from redcoast.distributed import _mesh

SRC = str(Path(rc.__file__).parent)


@pytest.fixture
def filtered():
    """As for a user; the other tests show all frames."""
    before = jax.config.jax_traceback_filtering  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_traceback_filtering", "auto")
    yield
    jax.config.update("jax_traceback_filtering", before)


def files(error):
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def hidden(error):
    return [file for file in files(error) if file.startswith(SRC)]


def test_frames_of_redcoast_are_hidden_unless_asked_for(filtered):
    with pytest.raises(ValueError, match="16") as actual:
        rc.make_mesh(model=16)
    assert files(actual.value)[0] == __file__
    assert not hidden(actual.value)
    jax.config.update("jax_traceback_filtering", "off")
    with pytest.raises(ValueError, match="16") as actual:
        rc.make_mesh(model=16)
    assert len(hidden(actual.value)) >= 2


def test_those_of_the_cause_are_hidden_too(filtered, tmp_path):
    with pytest.raises(FileNotFoundError, match="Cannot read a plan") as actual:
        rc.load_plan(tmp_path / "none", {}, rc.make_mesh())
    cause = actual.value.__cause__
    assert isinstance(cause, FileNotFoundError)
    assert not hidden(actual.value)
    assert not hidden(cause)


def test_a_defect_of_redcoast_shows_its_frames(filtered, monkeypatch):
    monkeypatch.setattr(_mesh, "jax", None)
    with pytest.raises(AttributeError) as actual:
        rc.make_mesh(model=2)
    assert hidden(actual.value)[-1].endswith("_mesh.py")


def test_the_last_notes_come_last_and_an_error_may_be_its_own_context(filtered):
    error = ValueError("wrong")
    for note in (
        LastNote("c"),
        "a",
        "For simplicity, JAX has removed its internal frames ...",
        "b",
    ):
        error.add_note(note)
    other = KeyError()
    error.__context__, other.__context__ = other, error
    tidy(error)
    assert error.__notes__ == ["a", "b", "c"]


def test_keys_of_a_dict_that_cannot_be_sorted_are_explained():
    """JAX says "Comparator raised exception", of a model as of a batch."""
    with pytest.raises(ValueError, match="Comparator") as actual:
        rc.infer_shardings({"a": jnp.ones(3), 0: jnp.ones(3)}, rc.make_mesh())
    assert "the keys of each dict must be of one type" in actual.value.__notes__[-1]
