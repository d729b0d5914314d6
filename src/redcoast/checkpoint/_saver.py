"""The checkpoints of a run, saved in the background."""

import contextlib
import itertools
import logging
import math
import re
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from jaxtyping import PyTree

from ..distributed._kv_store import exchange, is_main, key_value_store
from ._host_copy import can_copy, copy_to_host
from ._orbax import make_checkpointer, orbax_args
from ._policy import Checkpoints, best_metrics, is_best, metric_of, saved_steps, steps_to_delete
from ._tree import arrays_and_document

_rounds = itertools.count()


class Together:
    """The saves of all processes, which each begins as often as the others do.

    With Orbax's own barrier, the failure of one process would keep the others waiting for twenty
    minutes, since it never gets there.
    """

    def __init__(self) -> None:
        self._key = self._next()

    def _next(self) -> str:
        return f"redcoast/save/{next(_rounds)}"

    def begin(self) -> None:
        self._key = self._next()

    def fail(self, reason: str) -> None:
        """Tells the others, whose barriers then fail too."""
        if jax.process_count() > 1:
            key = f"{self._key}/failed/{jax.process_index()}"
            key_value_store().key_value_set(key, reason, allow_overwrite=True)

    def barrier(self, *, key: str, timeout_ms: int) -> None:
        """What Orbax calls in its thread where all processes have to have come."""
        store, here = key_value_store(), f"{self._key}/{key}"
        store.key_value_set(f"{here}/{jax.process_index()}", "here")
        end = time.monotonic() + timeout_ms / 1000
        for other in range(jax.process_count()):
            while not _arrived(store, f"{here}/{other}"):
                if failed := [text for _, text in store.key_value_dir_get(f"{self._key}/failed")]:
                    raise OSError(f"Another process could not save: {failed[0]}")
                if time.monotonic() > end:
                    raise TimeoutError(f"Process {other} is not done saving.")

    def outcome(self, failed: str | None) -> str | None:
        """Why the save failed, on any of the processes, if it did."""
        return next((text for text in exchange("a save", failed) if text), None)


def _arrived(store: Any, key: str) -> bool:
    try:
        store.blocking_key_value_get(key, 500)
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        return False
    return True


logger = logging.getLogger("redcoast")

DELETING = ".deleting"
UNFINISHED = re.compile(r"\d+(\.orbax-checkpoint-tmp.*|\.deleting)")


class CheckpointNotSaved(OSError):
    """Raised by [`redcoast.fit`][] at its end if the last state could not be saved.

    Its cause says why. The checkpoint before it is whole.

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


class Saver:
    """Saves in the background, deletes what the policy does not keep, and waits at the end. A save
    that fails is a warning; if it is the last, an error at the end."""

    def __init__(self, checkpoints: Checkpoints):
        self._checkpoints = checkpoints
        self._values = best_metrics(checkpoints)
        if is_main():
            checkpoints.path.mkdir(parents=True, exist_ok=True)
            remove_unfinished(checkpoints.path)
        self._together = Together()
        self._checkpointer = self._make()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="redcoast-save")
        self._pending: Future[Exception | None] | None = None
        self._failed: tuple[int, Exception] | None = None
        self._last = -1

    @property
    def keeps_best(self) -> bool:
        """Whether checkpoints are to be compared by an evaluation."""
        return self._checkpoints.best is not None

    def wants(self, step: int, metrics: Mapping[str, float], *, epoch_ended: bool) -> bool:
        """Whether the policy asks for a checkpoint at a step, and after an evaluation if any."""
        if self._checkpoints.every is None:
            return epoch_ended or bool(metrics)
        value = metric_of(self._checkpoints, metrics)
        best = is_best(self._checkpoints, value, self._values)
        return step % self._checkpoints.every == 0 or best

    def save(self, step: int, tree: PyTree, metadata: Mapping[str, Any]) -> None:
        """Begins to save a tree; its arrays may be donated as soon as this returns."""
        self._settle()
        if step == self._last and not self._failed:
            return
        arrays, document = arrays_and_document(tree, metadata)
        self._last = step
        value = metric_of(self._checkpoints, metadata["metrics"])
        if not math.isnan(value):
            self._values[step] = value
        path = self._checkpoints.path / str(step)
        if jax.process_count() == 1 and can_copy(arrays):
            args = orbax_args(copy_to_host(arrays), document)
            self._pending = self._thread.submit(self._save_alone, path, args)
        else:
            self._save_together(path, orbax_args(arrays, document))

    def _save_alone(self, path: Path, args: Any) -> Exception | None:
        """Saves copies in the background, for most of what Orbax would do first is not copying."""
        if (problem := _unwritable(path)) is not None:
            return OSError(problem)
        try:
            self._checkpointer.save(path, args=args)
        except Exception as error:
            return error
        return self._finish()

    def _save_together(self, path: Path, args: Any) -> None:
        """Lets Orbax copy the arrays, and all processes agree with it when to begin."""
        self._together.begin()
        if (problem := self._together.outcome(_unwritable(path))) is not None:
            self._fail(OSError(problem))
            return
        try:
            self._checkpointer.save(path, args=args)
        except Exception as error:
            self._together.fail(_reason(error))
            self._pending = self._thread.submit(lambda failed=error: failed)
        else:
            self._pending = self._thread.submit(self._finish)

    def _finish(self) -> Exception | None:
        """Waits until a checkpoint has its name, and only then deletes others."""
        try:
            self._checkpointer.wait_until_finished()
        except Exception as error:
            self._together.fail(_reason(error))
            return error
        if is_main():
            delete_old(self._checkpoints, self._values)
            # Threads of a save that failed may have gone on writing after it was removed.
            remove_unfinished(self._checkpoints.path)
        return None

    def _settle(self, *, alone: bool = False) -> None:
        """Waits for the save under way, of all processes if not alone."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        error = pending.result()
        if not alone:
            problem = self._together.outcome(_reason(error) if error else None)
            error = error or (OSError(problem) if problem else None)
        if error is not None:
            self._fail(error)
        else:
            self._failed = None

    def _fail(self, error: Exception) -> None:
        self._failed = self._last, error
        self._values.pop(self._last, None)
        logger.warning(
            "The checkpoint of step %d could not be saved, and training goes on: %s %s",
            self._last,
            _reason(error),
            _newest(self._checkpoints),
        )
        # What is left of it would be in the way of the next, in the directory and in Orbax.
        with contextlib.suppress(Exception):
            self._checkpointer.close()
        if is_main():
            remove_unfinished(self._checkpoints.path)
        self._checkpointer = self._make()

    def _make(self) -> Any:
        barrier = self._together.barrier if jax.process_count() > 1 else None
        return make_checkpointer(background=True, barrier=barrier)

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Waits for what is being saved."""
        # After an error the other processes may be somewhere else.
        self._settle(alone=kind is not None)
        self._thread.shutdown()
        self._checkpointer.close()
        if self._failed and kind is None:
            step, error = self._failed
            raise CheckpointNotSaved(
                f"The state after step {step}, the last, could not be saved in "
                f"{self._checkpoints.path}: {_reason(error)} "
                f"{_newest(self._checkpoints)}"
            ) from error


def delete_old(checkpoints: Checkpoints, values: Mapping[int, float]) -> None:
    """Deletes the checkpoints that the policy does not keep."""
    try:
        steps = saved_steps(checkpoints)
    except OSError as error:
        logger.warning("%s cannot be tidied up: %s", checkpoints.path, error)
        return
    for old in steps_to_delete(checkpoints, steps, values):
        delete(checkpoints.path / str(old))


def remove_unfinished(path: Path) -> None:
    """Removes what saves and deletions that were interrupted have left."""
    with contextlib.suppress(OSError):  # said when it is in the way of a save
        for entry in path.iterdir():
            if UNFINISHED.fullmatch(entry.name):
                delete(entry)


def delete(path: Path) -> None:
    """Deletes a checkpoint, which loses its name first: half of one never looks like a whole."""
    try:
        if path.is_symlink():
            path.unlink()  # and not what it leads to
            return
        if path.suffix != DELETING:
            path = path.replace(path.with_name(path.name + DELETING))
        shutil.rmtree(path)
    except OSError as error:
        logger.warning("%s could not be deleted: %s", path, error)


def _unwritable(path: Path) -> str | None:
    """Why process 0 cannot make a directory there, before all begin to wait for it."""
    if not is_main():
        return None
    probe = path.with_name(path.name + DELETING)
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        return str(error)
    return None


def _newest(checkpoints: Checkpoints) -> str:
    with contextlib.suppress(OSError):
        if steps := saved_steps(checkpoints):
            return f"The newest checkpoint is {checkpoints.path / str(steps[-1])}."
    return "There is no checkpoint yet."


def _reason(error: Exception) -> str:
    text = (str(error).splitlines() or [""])[0]
    # What failed stands at the beginning, and why at the end.
    text = text if len(text) < 500 else f"{text[:250]} ... {text[-250:]}"
    return f"{type(error).__name__}: {text}."
