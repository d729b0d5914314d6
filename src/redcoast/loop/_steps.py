"""The innermost loop, which calls a compiled step on batches."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from jaxtyping import PyTree

from ..core._errors import check_functions, noting
from ..core._frames import tidy
from ..data._batches import Batch


class Step(NamedTuple):
    """A training step that was dispatched to the devices.

    **Attributes:**

    - `number`: the number of the step; the first of a run is 1.
    - `state`: the state after it. The next step donates it.
    - `metrics`: the metrics that the step returned; reading them waits for the devices.
    - `batch`: the [`redcoast.Batch`][] that it was trained on.
    """

    number: int
    state: PyTree
    metrics: Any
    batch: Batch


def training_steps(
    state: PyTree, batches: Iterable[Batch], step: Callable[[PyTree, PyTree], tuple[PyTree, Any]]
) -> Iterator[Step]:
    """Takes a training step on each batch, and yields it before the device has finished.

    **Arguments:**

    - `state`: the state to start from; its arrays are donated.
    - `batches`: from [`redcoast.batches`][].
    - `step`: a compiled step `(state, arrays) -> (state, metrics)`, from
        [`redcoast.compile_step`][].

    **Returns:**

    An iterator over [`redcoast.Step`][]s.

    **Raises:**

    Any error of a step, with a note that names the step.

    !!! Example

        ```python
        for done in rc.training_steps(state, data, step):
            print(done.number, done.batch.rows)
        ```
    """
    check_functions(step=step)
    for batch in batches:
        try:
            with noting(f"Raised by step {batch.step}."):
                state, metrics = step(state, batch.arrays)
        except Exception as error:
            # Without the frames of JAX and of this loop, the user's own line is the last one.
            tidy(error)
            raise
        yield Step(batch.step, state, metrics, batch)
