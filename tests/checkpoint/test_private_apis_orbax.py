"""Whether the installed Orbax has what `checkpoint/_orbax.py` depends on without documentation."""

import importlib.metadata
import inspect
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

from redcoast.checkpoint._orbax import ARRAYS, METADATA, TEMPORARY, make_checkpointer, orbax_args

TRIED = "0.12.8"


def require(found, what):
    if not found:
        version = importlib.metadata.version("orbax-checkpoint")
        pytest.fail(
            f"orbax-checkpoint {version} has changed: {what}. redcoast/checkpoint/_orbax.py was "
            f"tried with {TRIED}: adapt that file to this version."
        )


def save(path):
    flat = {("a", "b"): jnp.zeros(3), ("c",): jnp.ones((2, 2))}
    with make_checkpointer(background=False) as checkpointer:
        checkpointer.save(path, args=orbax_args(flat, {"format": 1}))


def test_files_of_a_checkpoint(tmp_path):
    path = tmp_path / "1"
    save(path)
    require((path / METADATA / METADATA).is_file(), "the file of the JSON metadata")
    entries = json.loads((path / ARRAYS / "_METADATA").read_text()).get("tree_metadata", {})
    keys = {tuple(x["key"] for x in e.get("key_metadata", [])) for e in entries.values()}
    require(keys == {("a", "b"), ("c",)}, "the names of the arrays in `_METADATA`")


def test_finalize_comes_after_all_files_and_before_the_final_name(tmp_path, monkeypatch):
    seen = []

    def look(directory):
        directory = Path(directory)
        seen.append((directory.name, (directory / ARRAYS / "_METADATA").is_file()))

    monkeypatch.setattr("redcoast.checkpoint._orbax.write_checksums", look)
    save(tmp_path / "1")
    require(len(seen) == 1, "`finalize` of an instance of `CompositeCheckpointHandler`, as a call")
    name, complete = seen[0]
    require(name.startswith("1" + TEMPORARY), f"the name of an unfinished checkpoint, {name}")
    require(complete, "the order of `finalize` and of the files of the arrays")


def test_async_save_of_an_instance_gives_futures_that_the_barrier_waits_for():
    module: Any = inspect.getmodule(ocp.AsyncCheckpointer)
    text = inspect.getsource(module)
    require("await self._handler.async_save(path, args=" in text, "the call of `async_save`")
    waits, barrier = map(text.find, ("ChainedFuture(commit_futures", "'async_write_complete'"))
    require(0 < waits < barrier, "the order of the futures and of the barrier")


def test_options():
    names = ("create_directories_asynchronously", "barrier_sync_fn")
    for name in names:
        require(hasattr(ocp.AsyncOptions(), name), f"`AsyncOptions.{name}`")


def test_barrier_is_called_with_a_key_and_a_timeout():
    module: Any = inspect.getmodule(ocp.AsyncCheckpointer)
    text = inspect.getsource(module)
    require("barrier_sync_fn(key=key, timeout_ms=timeout_ms)" in text, "the call of its barrier")
