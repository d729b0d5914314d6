"""A run directory that other processes do not see is refused at the start, not at a save."""

import functools as ft

import pytest

from redcoast.checkpoint import _shared_directory as _shared
from redcoast.checkpoint._shared_directory import check_shared


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(_shared, "_PATIENCE", 0.1)


def test_a_shared_directory_is_accepted_and_left_as_it_was(together, tmp_path):
    path = tmp_path / "runs" / "lm"
    assert together(*[ft.partial(check_shared, path)] * 2) == ["", ""]
    assert list(path.iterdir()) == []


def test_a_directory_that_is_not_shared_is_refused_by_all(
    together, tmp_path, monkeypatch, impatient
):
    # Two machines have other directories at the same path.
    monkeypatch.setattr(_shared, "agree", lambda values: None)
    errors = together(*(ft.partial(check_shared, tmp_path / name) for name in "ab"))
    assert errors[0].startswith(f"{tmp_path / 'a'} is not shared by all processes: process 0 on ")
    assert "which process 1 on " in errors[0]
    assert errors[1].removeprefix(str(tmp_path / "b")) == errors[0].removeprefix(
        str(tmp_path / "a")
    )
    assert list((tmp_path / "a").iterdir()) == []


def test_different_directories_are_named(together, tmp_path):
    errors = together(*(ft.partial(check_shared, path) for path in (tmp_path, None)))
    assert errors[0] == errors[1]
    assert f'the directory of the run: "{tmp_path}" on process 0; null on process 1.' in errors[0]


def test_a_directory_that_cannot_be_written_is_not_blamed_on_the_others(together, tmp_path):
    # Process 0 then raises the error of the file system, which says what is wrong.
    (tmp_path / "file").write_text("")
    assert together(*[ft.partial(check_shared, tmp_path / "file" / "run")] * 2) == ["", ""]
