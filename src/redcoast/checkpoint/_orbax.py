"""Saves and restores nested dicts of arrays with Orbax.

It depends on undocumented file names and on the order of calls in Orbax, as in orbax-checkpoint
0.12.8. `tests/checkpoint/test_private_apis_orbax.py` fails if another version differs.
"""

import asyncio
import contextlib
import functools as ft
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike
from jaxtyping import PyTree

from ..core._durable_files import sync_tree
from ..core._read_json import JSONObject, read_json
from ..sharding.tree._leaves import ArrayLike
from ._checksums import write_checksums

ARRAYS = "state"
METADATA = "metadata"
TEMPORARY = ".orbax-checkpoint-tmp"  # in the names of unfinished checkpoints
Names = tuple[str, ...]
Place = tuple[ArrayLike, Sharding | None]  # the array to read, and its sharding
# Arrays that claim more memory than this factor times their bytes on disk, plus one gigabyte, were
# not saved by redcoast: zstd compresses even zeros by no more than this factor.
MOST_COMPRESSED, SPARE_BYTES = 2**16, 2**30


@runtime_checkable
class Described(Protocol):
    """An array, or a description of one."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> DTypeLike: ...


class CheckpointDamaged(ValueError):
    """Raised if a file of a checkpoint is missing, or has changed since it was saved.

    !!! Example

        ```python
        try:
            rc.load_checkpoint(".")
        except rc.CheckpointDamaged as error:
            print(error)
        ```
    """

    __module__ = "redcoast"


def make_checkpointer(*, background: bool, barrier: Callable[..., None] | None = None) -> Any:
    """Creates an Orbax checkpointer that adds checksums to each checkpoint and syncs its files.

    `barrier(key=..., timeout_ms=...)` replaces Orbax's barrier between processes in the background.
    """
    import orbax.checkpoint as ocp
    from orbax.checkpoint import future

    # If Orbax cannot create a directory in the background, its threads wait for that directory for
    # twenty minutes and keep the process from exiting.
    how = ocp.AsyncOptions(create_directories_asynchronously=False, barrier_sync_fn=barrier)
    handler = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(async_options=how)
    )
    start, finish = handler.async_save, handler.finalize

    async def async_save(directory: Any, args: Any) -> list[Any]:
        # Each process syncs its own files, which may only be in the memory of its host. The barrier
        # between the processes comes after these futures.
        written = await start(directory, args=args) or []
        return [future.ChainedFuture(written, lambda: sync_tree(Path(directory)))]

    def finalize(directory: Any) -> None:
        # Only process 0 runs this, after all processes have written their files and before the
        # checkpoint is renamed to its final name.
        finish(directory)
        write_checksums(Path(directory))
        sync_tree(Path(directory))

    # A subclass would have to be registered with Orbax, which writes its name into checkpoints.
    handler.async_save, handler.finalize = async_save, finalize
    if background:
        return ocp.AsyncCheckpointer(handler, async_options=how)
    return ocp.Checkpointer(handler)


def orbax_args(flat: Mapping[Names, ArrayLike], document: JSONObject) -> Any:
    """The Orbax arguments that save the arrays as a nested dict, and the JSON metadata."""
    import orbax.checkpoint as ocp

    return ocp.args.Composite(
        **{ARRAYS: ocp.args.PyTreeSave(nest(flat)), METADATA: ocp.args.JsonSave(document)}
    )


def can_store(dtype: np.dtype) -> bool:
    """Whether TensorStore, which writes the arrays, has a dtype."""
    import tensorstore

    # The dtypes of TensorStore have the byte order of this machine.
    native = np.dtype(dtype).newbyteorder("=")
    try:
        return tensorstore.dtype(native).numpy_dtype == native
    except ValueError:
        return False


def saved_arrays(path: Path) -> dict[Names, Described]:
    """The shapes and dtypes of all arrays in a checkpoint, whose names were checked."""
    import orbax.checkpoint as ocp
    from etils import epath

    tree = ocp.PyTreeCheckpointHandler().metadata(epath.Path(path / ARRAYS)).tree
    arrays: dict[Names, Described] = {}
    for keys, x in jax.tree_util.tree_leaves_with_path(tree):
        names = tuple(jax.tree_util.keystr((key,), simple=True) for key in keys)
        if not hasattr(x, "shape"):  # Orbax does not know the type
            raise CheckpointDamaged(f"{path / ARRAYS} has no shape for {'/'.join(names)}.")
        arrays[names] = x
    return arrays


def read_arrays(path: Path, wanted: Mapping[Names, Place | None]) -> dict[str, PyTree]:
    """Reads arrays, each with the given sharding, or as a NumPy array without one."""
    import orbax.checkpoint as ocp
    from etils import epath

    def how(place: Place | None) -> ocp.RestoreArgs:
        if place is None or place[1] is None:
            return ocp.RestoreArgs(restore_type=np.ndarray)
        return ocp.ArrayRestoreArgs(sharding=place[1], global_shape=place[0].shape)

    # Orbax reads those arrays that `item` has, whatever their values there.
    args = ocp.args.PyTreeRestore(
        item=nest(dict.fromkeys(wanted, 0)),
        restore_args=nest({names: how(place) for names, place in wanted.items()}),
        partial_restore=True,
    )
    return ocp.PyTreeCheckpointHandler().restore(epath.Path(path / ARRAYS), args=args)


@contextlib.contextmanager
def reading(path: Path, *, verified: bool) -> Iterator[None]:
    """Adds the path of the checkpoint to errors that Orbax raises on unexpected files.

    If the checksums of the files are correct (`verified`), the checkpoint does not count as
    damaged, so that `fit` does not fall back to the checkpoint before it.
    """
    try:
        yield
    except (CheckpointDamaged, MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:500]
        if verified:
            raise ValueError(
                f"{path} cannot be read, although its checksums are correct: {reason}"
            ) from error
        raise CheckpointDamaged(f"{path} is damaged: {reason}") from error


def check_size(path: Path, arrays: Mapping[Names, Described]) -> None:
    """Rejects arrays that claim more memory than their files can hold."""
    stored = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    claimed = sum(prod(x.shape) * np.dtype(x.dtype).itemsize for x in arrays.values())
    if claimed > stored * MOST_COMPRESSED + SPARE_BYTES:
        raise CheckpointDamaged(
            f"{path / ARRAYS} claims to hold arrays of {claimed:,} bytes in files of {stored:,}."
        )


def check_names(path: Path) -> None:
    """Bounds the JSON files that Orbax reads without limits, and rejects names that are paths."""
    file = path / ARRAYS / "_METADATA"
    for other in (path / ARRAYS).glob("array_metadatas/*"):
        read_json(other)
    if (path / ARRAYS / "_sharding").exists():
        read_json(path / ARRAYS / "_sharding")
    for entry in read_json(file)["tree_metadata"].values():
        for key in entry["key_metadata"]:
            if {"/", "\0"} & set(str(key["key"])):  # redcoast writes "%2F" for a slash
                raise ValueError(
                    f"{file} names an array {key['key']!r}, which is a path to another directory"
                )


def nest(flat: Mapping[Names, object]) -> dict[str, PyTree]:
    nested: dict[str, PyTree] = {}
    for names, x in flat.items():
        inner = nested
        for name in names[:-1]:
            inner = inner.setdefault(name, {})
        inner[names[-1]] = x
    return nested


def get(nested: PyTree, names: Names) -> PyTree:
    return ft.reduce(lambda inner, name: inner[name], names, nested)


@ft.cache
def _directory_of_orbax() -> str:
    import orbax.checkpoint as ocp

    return str(Path(ocp.__file__).parent)


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    """Whether a record has no error that files of Orbax logged or raised."""
    # Messages without an error are not about a failed save.
    if not record.exc_info:
        return True
    files = _directory_of_orbax()
    frames = traceback.extract_tb(record.exc_info[2])
    names = [record.pathname, *(frame.filename for frame in frames)]
    return not any(name.startswith(files) for name in names)


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """Suppresses the errors that Orbax and TensorStore print. The save raises the first of them.

    On a full disk, each of their failed tasks and threads prints a traceback.
    """
    _directory_of_orbax()  # a late message may come when nothing can be imported any more
    before = sys.unraisablehook

    def hook(error: "sys.UnraisableHookArgs") -> None:
        if not _is_late_result(error.exc_value, error.exc_traceback):
            before(error)

    # Failed tasks whose results are never read are reported when they are collected as garbage,
    # which may be after the end of this context.
    logging.getLogger("asyncio").addFilter(_is_not_of_orbax)
    logger, own = logging.getLogger("absl"), lambda record: _is_not_of_orbax(record)
    logger.addFilter(own)
    sys.unraisablehook = hook
    try:
        yield
    finally:
        logger.removeFilter(own)
        if sys.unraisablehook is hook:  # something else may have replaced it meanwhile
            sys.unraisablehook = before


def _is_late_result(error: BaseException | None, trace: TracebackType | None) -> bool:
    """Whether a thread of TensorStore had a result for an event loop that is closed after an
    error."""
    if threading.current_thread() is threading.main_thread() or trace is None:
        return False
    *_, (frame, _) = traceback.walk_tb(trace)
    check_closed = asyncio.BaseEventLoop._check_closed  # pyright: ignore[reportAttributeAccessIssue]
    return isinstance(error, RuntimeError) and frame.f_code is check_closed.__code__
