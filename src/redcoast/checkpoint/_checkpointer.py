"""The checkpoints of a training loop, which are restored at its start and saved in the
background."""

import contextlib
import errno
import json
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from ..core._frames import hide_frames
from ..distributed._kv_store import is_main
from ._policy import Checkpoints, as_checkpoints, restore_newest
from ._saver import Saver
from ._shared_directory import check_shared, make_directory
from ._tree import arrays_to_save


class Restored(NamedTuple):
    """A checkpoint that [`redcoast.Checkpointer`][] restored.

    **Attributes:**

    - `state`: the tree that was saved.
    - `step`: its number of training steps.
    - `data`: the state of the data, or other values that were saved as `data`.
    - `metrics`: the metrics that were saved with it.
    """

    state: PyTree
    step: int
    data: dict[str, Any]
    metrics: dict[str, float]


class Checkpointer:
    """Restores the newest checkpoint of a run and saves new ones in the background.

    It is a context manager. Only one run at a time may use a directory. On exit, it waits for the
    save in progress. A failed save raises a warning, or, if it was the last one, an error on exit.

    **Arguments:**

    - `checkpoints`: a [`redcoast.Checkpoints`][], or the path of its directory; with `None`,
        nothing is restored or saved.

    **Raises:**

    `ValueError` on entry, if another run uses the directory, or if it is not shared by all
    processes; [`redcoast.CheckpointNotSaved`][] on exit, if the last state could not be saved.

    !!! Example

        ```python
        state = rc.init_state(lambda key: model, optimizer, key=key)
        shardings = rc.infer_shardings(state, mesh)
        with rc.Checkpointer(rc.Checkpoints("runs/loop", every=100)) as checkpointer:
            restored = checkpointer.restore(state, shardings)
            state = restored.state if restored else state
            if checkpointer.wants(100):
                checkpointer.save(100, state)
        ```
    """

    @hide_frames
    def __init__(self, checkpoints: Checkpoints | str | PathLike[str] | None):
        self._checkpoints = as_checkpoints(checkpoints)
        self._entered = contextlib.ExitStack()
        self._locked = False  # whether `locked` is entered, as in `fit`, which does so early
        self._saver: Saver | None = None

    @property
    def directory(self) -> Path | None:
        """The directory of the run; `None` if nothing is saved."""
        if self._checkpoints is None:
            return None
        return self._checkpoints.path.parent

    @property
    def keeps_best(self) -> bool:
        """Whether a metric decides which checkpoints are kept."""
        return self._checkpoints is not None and self._checkpoints.best is not None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the directory against other runs, already before the first save."""
        with lock_run(self.directory):
            check_shared(self.directory)
            self._locked = True
            try:
                yield
            finally:
                self._locked = False

    @hide_frames
    def restore(self, like: PyTree, shardings: PyTree[NamedSharding | None]) -> Restored | None:
        """Restores the newest checkpoint that is not damaged; returns `None` if there is no
        checkpoint.

        **Arguments:**

        - `like`: a tree of the same structure, which may be abstract.
        - `shardings`: the shardings of its arrays.

        **Raises:**

        `TypeError` if a checkpoint cannot store the dtype of an array; it names the array.
        """
        if self._checkpoints is not None:
            arrays_to_save(like)  # raises the errors of the first save early
        restored = self._checkpoints and restore_newest(self._checkpoints, like, shardings)
        if restored is None:
            return None
        state, metadata = restored
        return Restored(state, metadata["step"], metadata["data"], metadata["metrics"])

    def wants(
        self, step: int, metrics: Mapping[str, float] | None = None, *, epoch_end: bool = False
    ) -> bool:
        """Returns whether a checkpoint is due after a step, given its evaluation."""
        saver = self._open_saver()
        return saver is not None and saver.wants(step, metrics or {}, epoch_ended=epoch_end)

    @hide_frames
    def save(
        self,
        step: int,
        state: PyTree,
        data: Mapping[str, object] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Starts to save a state. Its arrays may be donated as soon as this returns.

        A step that was just saved is not saved again.

        **Arguments:**

        - `step`: the number of training steps of the state.
        - `state`: any PyTree.
        - `data`: the state of the data, `batches.get_state()`, or other values that JSON supports.
        - `metrics`: the metrics of an evaluation of the state.

        **Raises:**

        `ValueError` outside the `with` statement.
        """
        saver = self._open_saver()
        if saver is not None:
            metadata = {"step": step, "data": dict(data or {}), "metrics": dict(metrics or {})}
            saver.save(step, state, metadata | {"mesh": _sizes_of_mesh(state)})

    def _open_saver(self) -> Saver | None:
        if self._saver is None and self._checkpoints is not None:
            raise ValueError(
                "A `Checkpointer` saves only inside its `with` statement: "
                "`with redcoast.Checkpointer(checkpoints) as checkpointer:`."
            )
        return self._saver

    @hide_frames
    def __enter__(self) -> "Checkpointer":
        with contextlib.ExitStack() as stack:
            if not self._locked:
                stack.enter_context(self.locked())
            if self._checkpoints is not None:
                self._saver = stack.enter_context(Saver(self._checkpoints))
            # From here on, `__exit__` leaves what was entered. After an error, the stack does.
            self._entered = stack.pop_all()
        return self

    @hide_frames
    def __exit__(self, *error: PyTree) -> None:
        # Waits for the save in progress, and unlocks the directory.
        self._entered.__exit__(*error)
        self._saver = None


def _sizes_of_mesh(state: PyTree) -> dict[str, int]:
    """The sizes of the mesh that the arrays of a state are on; empty without a mesh."""
    for x in jax.tree.leaves(state):
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding):
            return dict(sharding.mesh.shape)
    return {}


logger = logging.getLogger("redcoast")

FILE = "run.lock"
# What file systems answer if another process has the lock; others mean that they have no locks.
TAKEN = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


@contextlib.contextmanager
def lock_run(directory: Path | None) -> Iterator[None]:
    """Locks a run's directory, if it has one, so that no other run uses it.

    The operating system holds the lock (`flock`), and releases it when the process ends for any
    reason. Processes that were forked meanwhile do not hold it. The file only records which process
    does.

    Raises `ValueError` that names the host and the process of the run that holds the lock; an
    `OSError` of a class that says why, if the directory cannot be created or written to.
    """
    if directory is None or not is_main():
        yield
        return
    make_directory(directory)
    try:
        # Opened without being emptied, since it may say which process has the lock.
        file = (directory / FILE).open("ab+", buffering=0)
    except OSError as error:
        raise type(error)(
            f"The directory of the run, {directory}, cannot be written to: {error}. Choose one "
            "that can be written to."
        ) from None
    with file, _not_in_children(file):
        if _try_lock(file, directory):
            with contextlib.suppress(OSError):  # the lock also holds on a full disk
                file.truncate(0)
                started = time.strftime("%Y-%m-%d %H:%M:%S")
                holder = {"host": socket.gethostname(), "process": os.getpid(), "since": started}
                file.write(json.dumps(holder).encode() + b"\n")
        yield


# The open files of locks. A forked process, such as one that reads data, may outlive a run that is
# killed, and the run could not be resumed as long as it had the file.
_locked_files: list[BinaryIO] = []


@contextlib.contextmanager
def _not_in_children(file: BinaryIO) -> Iterator[None]:
    _locked_files.append(file)
    try:
        yield
    finally:
        # In a forked process, it has been removed.
        with contextlib.suppress(ValueError):
            _locked_files.remove(file)


def _close_in_child() -> None:
    # This does not unlock what another process has locked.
    for file in _locked_files:
        file.close()
    _locked_files.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def _try_lock(file: BinaryIO, directory: Path) -> bool:
    try:
        # Windows has no such module.
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError) as error:
        if isinstance(error, OSError) and error.errno in TAKEN:
            raise ValueError(f"{directory} is in use by {_read_holder(file)}") from None
        logger.warning(
            "%s cannot be locked here (%s). Make sure that no other run uses it.", directory, error
        )
        return False
    return True


def _read_holder(file: BinaryIO) -> str:
    """Which run has the lock, and what to do, as the end of a sentence and another one."""
    wait = "Wait until that run has ended, stop it, or choose another directory."
    try:
        file.seek(0)
        holder = json.loads(file.read(4096))
        host, process, since = holder["host"], holder["process"], holder["since"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return f"another run, whose host and process are unknown. {wait}"
    if (host, process) == (socket.gethostname(), os.getpid()):
        return (
            f"another run of this process, since {since}: a `fit` or a `Checkpointer` that has not "
            "ended. End it first, such as by leaving its `with` statement, or choose another "
            "directory."
        )
    return f"another run, process {process} on {host}, since {since}. {wait}"
