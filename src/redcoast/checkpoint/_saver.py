"""Saves the checkpoints of a run in the background."""

import contextlib
import functools as ft
import itertools
import logging
import math
import re
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from jaxtyping import PyTree

from ..core._durable_files import sync_files_in, sync_name
from ..distributed._kv_store import exchange, get_within, is_main
from ..distributed._private_jax import key_value_store
from ._host_copy import can_copy, copy_to_host
from ._orbax import TEMPORARY, make_checkpointer, orbax_args, quiet_orbax
from ._policy import (
    Checkpoints,
    best_metrics,
    is_best,
    metric_of,
    newest_checkpoint,
    saved_steps,
    steps_to_delete,
)
from ._shared_directory import make_directory
from ._tree import arrays_and_document

# The saves of this process. All processes save together, so they count alike.
_rounds = itertools.count()


class Together:
    """Coordinates a save between all processes, each of which takes part in every save.

    With Orbax's own barrier, the other processes would wait twenty minutes for a process whose save
    failed.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._key = f"redcoast/save/{next(_rounds)}"

    def fail(self, reason: str) -> None:
        """Reports a failed save to the other processes, whose barriers then fail too."""
        if jax.process_count() > 1:
            key = f"{self._key}/failed/{jax.process_index()}"
            key_value_store().key_value_set(key, reason, allow_overwrite=True)

    def barrier(self, *, key: str, timeout_ms: int) -> None:
        """Waits for all processes; Orbax calls it in its own thread."""
        store, here = key_value_store(), f"{self._key}/{key}"
        store.key_value_set(f"{here}/{jax.process_index()}", "here")
        end = time.monotonic() + timeout_ms / 1000
        for other in range(jax.process_count()):
            # Every half a second, it looks whether a process has failed.
            while get_within(store, f"{here}/{other}", 500) is None:
                if failed := [text for _, text in store.key_value_dir_get(f"{self._key}/failed")]:
                    raise OSError(f"Another process could not save: {failed[0]}")
                if time.monotonic() > end:
                    raise TimeoutError(f"Timed out waiting for process {other} to finish saving.")

    def outcome(self, failed: str | None) -> str | None:
        """The reason why a process failed to save; `None` if all succeeded."""
        return next((text for text in exchange("the result of a save", failed) if text), None)


logger = logging.getLogger("redcoast")

DELETING = ".deleting"
# The seconds between attempts to save the final state, in case a disk is full temporarily.
WAITS = (1, 2, 4, 8, 15)
# Less than any checkpoint takes.
PROBE_BYTES = 4096
UNFINISHED = re.compile(rf"\d+({re.escape(TEMPORARY)}.*|{re.escape(DELETING)})")


class CheckpointNotSaved(OSError):
    """Raised at the end of [`redcoast.fit`][] if the final state could not be saved.

    Its `__cause__` is the error of the save. The previous checkpoint is complete.

    !!! Example

        ```python
        options = {"collate_fn": collate_fn, "loss_fn": loss_fn, "batch_size": 4, "steps": 2}
        run = rc.Checkpoints("runs/lm")
        try:
            state = rc.fit(model, optimizer, examples, checkpoints=run, **options)
        except rc.CheckpointNotSaved as error:
            print(f"{error} It failed for {error.__cause__!r}.")
        ```
    """

    __module__ = "redcoast"


class Saver:
    """Saves checkpoints in the background and deletes those that the policy does not keep.

    On exit, it waits for the save in progress. A failed save is a warning, or, if it was the last
    one, `CheckpointNotSaved` on exit.
    """

    def __init__(self, checkpoints: Checkpoints):
        self._checkpoints = checkpoints
        self._values = best_metrics(checkpoints)
        if is_main():
            make_directory(checkpoints.path)
            remove_unfinished(checkpoints.path)
        self._together = Together()
        self._checkpointer = self._make()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="redcoast-save")
        self._pending: Future[Exception | None] | None = None
        self._failed: tuple[int, Exception] | None = None
        self._save_again: Callable[[], None] | None = None  # until the save has succeeded
        self._is_final = False
        self._quiet = contextlib.ExitStack()
        self._last, self._metrics = -1, {}  # the step that was saved last, and its metrics
        self._later = 0  # the newest step that was there before, in process 0
        if is_main():
            self._later = max(saved_steps(checkpoints), default=0)

    def wants(self, step: int, metrics: Mapping[str, float], *, epoch_ended: bool) -> bool:
        """Whether the policy asks for a checkpoint at a step, given its evaluation metrics."""
        # After each evaluation and each epoch.
        if self._checkpoints.every is None:
            return epoch_ended or bool(metrics)
        value = metric_of(self._checkpoints, metrics)
        best = is_best(self._checkpoints, value, self._values)
        return step % self._checkpoints.every == 0 or best

    def save(self, step: int, tree: PyTree, metadata: Mapping[str, Any]) -> None:
        """Starts saving a tree; its arrays may be donated as soon as this returns."""
        self._settle()
        if step == self._last and not self._failed:
            if metadata["metrics"] and metadata["metrics"] != self._metrics:
                logger.warning(
                    "Step %d has been saved already, so these metrics are not saved: %s. Evaluate "
                    "a state before it is saved.",
                    *(step, ", ".join(metadata["metrics"])),
                )
            return
        if self._later > step:
            logger.warning(
                "Step %d is saved in %s, which holds a later checkpoint, of step %d. A run resumes "
                "from that one.",
                *(step, self._checkpoints.path, self._later),
            )
        self._later = 0  # one warning is enough
        arrays, document = arrays_and_document(tree, metadata)
        self._last, self._metrics = step, metadata["metrics"]
        value = metric_of(self._checkpoints, metadata["metrics"])
        if not math.isnan(value):
            self._values[step] = value
        path = self._checkpoints.path / str(step)
        if jax.process_count() == 1 and can_copy(arrays):
            args = orbax_args(copy_to_host(arrays), document)
            self._save_again = ft.partial(self._submit, path, args)
        else:
            args = orbax_args(arrays, document)
            self._save_again = ft.partial(self._save_together, path, args)
        self._save_again()

    def _submit(self, path: Path, args: object) -> None:
        self._pending = self._thread.submit(self._save_alone, path, args)

    def _save_alone(self, path: Path, args: object) -> Exception | None:
        """Saves host copies in the background, since Orbax's preparation is slower than copying."""
        if (problem := _unwritable(path)) is not None:
            return OSError(problem)
        try:
            self._checkpointer.save(path, args=args)
        except Exception as error:
            return error
        return self._finish()

    def _save_together(self, path: Path, args: object) -> None:
        """Starts a save by Orbax, which copies the arrays, in all processes at once."""
        self._together.begin()
        if (problem := self._together.outcome(_unwritable(path))) is not None:
            self._fail(OSError(problem))
            return
        try:
            self._checkpointer.save(path, args=args)
        except Exception as error:
            self._together.fail(_reason(error))
            # The result of this save, which the next `_settle` compares with that of the others.
            self._pending = self._thread.submit(lambda failed=error: failed)
        else:
            self._pending = self._thread.submit(self._finish)

    def _finish(self) -> Exception | None:
        """Waits until a checkpoint is on the disk under its final name, then deletes others."""
        try:
            self._checkpointer.wait_until_finished()
            if is_main():
                sync_name(self._checkpoints.path / str(self._last))
        except Exception as error:
            self._together.fail(_reason(error))
            return error
        if is_main():
            path = self._checkpoints.path
            with contextlib.suppress(OSError):  # metrics are no reason for a save to fail
                sync_files_in(path.parent)
            try:
                steps = saved_steps(self._checkpoints)
            except OSError as error:
                logger.warning("Old checkpoints in %s cannot be deleted: %s", path, error)
                # The new checkpoint is complete, so this is no reason for the save to fail.
                steps = []
            for old in steps_to_delete(self._checkpoints, steps, self._values):
                if old != self._last:  # a loop may have gone back to an earlier step
                    delete(path / str(old))
            # Threads of an earlier failed save may have written files after its removal.
            remove_unfinished(path)
        return None

    def _settle(self, *, alone: bool = False) -> None:
        """Waits for the save in progress, and unless `alone`, for its result in all processes."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        error = pending.result()
        if not alone:
            own_problem = None
            if error is not None:
                own_problem = _reason(error)
            problem = self._together.outcome(own_problem)
            if error is None and problem:
                error = OSError(problem)
        if error is not None:
            self._fail(error)
        else:
            self._failed = self._save_again = None

    def _save_final_again(self) -> None:
        """Tries again to save the last state, which would be lost otherwise."""
        self._is_final = True
        # All processes have the same `_failed`, so they try equally often.
        for seconds in WAITS:
            if self._failed is None or self._save_again is None:
                return
            logger.warning(
                "The final state, after step %d, could not be saved. It is tried again in %d s.",
                *(self._last, seconds),
            )
            time.sleep(seconds)
            self._save_again()
            self._settle()

    def _fail(self, error: Exception) -> None:
        self._failed = self._last, error
        # It was counted as an evaluated checkpoint before it was saved.
        self._values.pop(self._last, None)
        if not self._is_final:
            logger.warning(
                "The checkpoint of step %d could not be saved, and training continues: %s %s",
                *(self._last, _reason(error), newest_checkpoint(self._checkpoints)),
            )
        logger.debug("The error of this save:", exc_info=error)
        # Its remains on disk and in Orbax would make the next save fail.
        with contextlib.suppress(Exception):
            self._checkpointer.close()
        if is_main():
            remove_unfinished(self._checkpoints.path)
        self._checkpointer = self._make()

    def _make(self) -> Any:
        barrier = None
        if jax.process_count() > 1:
            barrier = self._together.barrier
        return make_checkpointer(background=True, barrier=barrier)

    def __enter__(self) -> "Saver":
        self._quiet.enter_context(quiet_orbax())
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Waits for the save in progress."""
        with self._quiet:
            # After an error, the other processes may not be waiting here.
            self._settle(alone=kind is not None)
            if kind is None:
                self._save_final_again()
            self._thread.shutdown()
            self._checkpointer.close()
        if self._failed and kind is None:
            step, error = self._failed
            raise CheckpointNotSaved(
                f"The final state, after step {step}, could not be saved in "
                f"{self._checkpoints.path}: {_reason(error)} "
                f"{newest_checkpoint(self._checkpoints)}"
            ) from error


def remove_unfinished(path: Path) -> None:
    """Removes the remains of interrupted saves and deletions."""
    with contextlib.suppress(OSError):  # if it matters, the next save reports it
        for entry in path.iterdir():
            # A file of this name is not the remains of a checkpoint.
            if UNFINISHED.fullmatch(entry.name) and (entry.is_dir() or entry.is_symlink()):
                delete(entry)


def delete(path: Path) -> None:
    """Deletes a checkpoint; it is renamed first, so that no partial one has a valid name."""
    try:
        if path.is_symlink():
            path.unlink()  # only the link, not its target
            return
        if path.suffix != DELETING:
            path = path.replace(path.with_name(path.name + DELETING))
        shutil.rmtree(path)
    except OSError as error:
        logger.warning("%s could not be deleted: %s", path, error)


def _unwritable(path: Path) -> str | None:
    """The reason why process 0 cannot create a directory, checked before all processes wait for
    it."""
    if not is_main():
        return None
    # A name that `remove_unfinished` would remove.
    probe = path.with_name(path.name + DELETING)
    try:
        if not path.parent.is_dir():
            logger.warning("%s is gone, and is created again.", path.parent)
        probe.mkdir(parents=True)
        (probe / "probe").write_bytes(bytes(PROBE_BYTES))
    except OSError as error:
        return str(error)
    finally:
        shutil.rmtree(probe, ignore_errors=True)
    return None


def _reason(error: Exception) -> str:
    text = (str(error).splitlines() or [""])[0]
    # The operation is named at the beginning of the message, and the reason at its end.
    if len(text) >= 500:
        text = f"{text[:250]} ... {text[-250:]}"
    return f"{type(error).__name__}: {text.removesuffix('.')}."
