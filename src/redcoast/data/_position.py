"""Where a run is in its data: steps, positions, epochs."""

import logging
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh
from jaxtyping import PRNGKeyArray

from ..core._errors import check_integer, listed, noting
from ._batches import Batch, CollateFn, by_epoch, is_stream, stream_batches, training_batches
from ._permutation import data_seed, shuffled
from ._stream_state import decode_stream_state

logger = logging.getLogger("redcoast")


class Course(NamedTuple):
    """From where to where a run goes, in steps and in positions of its data."""

    step: int
    position: int
    last_step: int | None  # `None`: until a stream ends
    last_position: int | None
    length: int | None  # of an epoch
    due: bool = False  # whether an evaluation is due before the first step

    def ends_epoch(self, before: int, after: int) -> bool:
        """Whether a batch between two positions reaches the end of an epoch."""
        return self.length is not None and after // self.length > before // self.length


def plan_course(
    examples: Any,
    step: int,
    saved: dict[str, Any],
    batch_size: int,
    epochs: int | None,
    steps: int | None,
) -> Course:
    """Where the run begins, and where it ends."""
    stream = is_stream(examples)
    for name, value in (("epochs", epochs), ("steps", steps)):
        if value is not None:
            check_integer(name, value)
    if epochs is not None and steps is not None:
        raise ValueError(f"Both `epochs={epochs}` and `steps={steps}` say how long; pass one.")
    if epochs is None and steps is None and not stream:
        raise ValueError("Nothing says how long to train. Pass `epochs` or `steps`.")
    if epochs is not None and stream:
        raise ValueError("A stream has no epochs. Pass `steps`, or nothing to train to its end.")
    length = None if stream else by_epoch(examples)[1]
    guess = _position(step, batch_size, length if epochs else None)
    data = saved.get("data", {"position": guess, "length": length})
    position = data["position"]
    if (data["length"] is None) != stream:
        now, before = ("a stream", "examples with an index")[:: 1 if stream else -1]
        raise ValueError(
            f"The run began with {before} and cannot go on with {now}. Pass the same kind of "
            "`examples`, or choose another directory to begin anew."
        )
    if data["length"] != length:
        logger.warning(
            "The run began with %s examples in an epoch and goes on with %s: from here on the "
            "order of the data is another one.",
            *(data["length"], length),
        )
    due = bool(data.get("due"))
    if steps is not None:
        end = position + (steps - step) * batch_size
        return Course(step, position, steps, end, length, due)
    if epochs is None or length is None:
        return Course(step, position, None, None, length, due)
    left = max(0, epochs * length - position)
    return Course(step, position, step + -(-left // batch_size), epochs * length, length, due)


def course_batches(
    examples: Any,
    collate_fn: CollateFn,
    key: PRNGKeyArray,
    saved: dict[str, Any],
    course: Course,
    batch_size: int,
    mesh: Mesh,
) -> Generator[Batch, None, None]:
    """The batches of the run, from where it begins."""
    where = {
        "batch_size": batch_size,
        "seed": data_seed(key),
        "start": course.position,
        "stop": course.last_position,
        "mesh": mesh,
    }
    if course.length is not None:
        return _numbered(training_batches(examples, collate_fn, **where), course.step)
    if saved:
        examples.set_state(decode_stream_state(saved["data"]["stream"]))
    return _numbered(stream_batches(examples, collate_fn, **where), course.step)


def _numbered(batches: Iterator[Batch], step: int) -> Generator[Batch, None, None]:
    """The batches; what making one raises says for which step it was."""
    while True:
        step += 1
        with noting(f"Raised while the batch of step {step} was made."):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def batch_examples(course: Course, batch: Batch, key: PRNGKeyArray) -> tuple[list[int], str]:
    """Which examples a batch holds: their indices, or positions in a stream; and in words."""
    positions = np.arange(batch.position - batch.rows, batch.position, dtype=np.int64)
    if course.length is None:
        at = positions.tolist()
        return at, f"The batch held the examples {at[0]} to {at[-1]} of the stream."
    epochs, indices = shuffled(positions, course.length, data_seed(key))
    which = " and ".join(map(str, sorted(set(epochs.tolist()))))
    return indices.tolist(), (
        f"The batch held the examples with indices {listed(indices.tolist())} of epoch {which}."
    )


def check_end(course: Course, step: int) -> None:
    """Says so if a stream ended before its time."""
    if course.length is not None or step == course.last_step:
        return
    if step == 0:
        raise ValueError("`examples` is a stream that gave no example. Pass one at its beginning.")
    if course.last_step is not None and step < course.last_step:
        logger.warning("The stream ended after %d of %d steps.", step, course.last_step)


def _position(step: int, batch_size: int, length: int | None) -> int:
    """Where a state stands in its data, if nothing but its step is known."""
    # Each call of `fit` with `epochs` ends with an epoch, whose last batch may have been short.
    if length is not None and step % -(-length // batch_size) == 0:
        return step // -(-length // batch_size) * length
    return step * batch_size
