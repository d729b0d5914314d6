"""The calls of a run: a step in each, or several short steps together.

To call a program takes about 0.1 ms, whatever it computes, and more than the whole step of a small
model. So `fit` takes several short steps in one call (`train/_training.py`):

- The program is a loop over a fixed number of rows, each a batch, of which a call fills as many as
  it takes steps. All of a run's calls use this one program, so their lengths change no result.
- The first steps of a run are taken alone and measured. After them, a call takes 5 ms or less.
- A call ends where the run evaluates, saves or ends, and before a batch of another shape.
- The metrics of a call are read while the next one runs. If a logger then asks to stop, or the loss
  has been NaN too often, the state after that step is computed again from the one before the call.
"""

import functools as ft
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..core._control_flow import is_callback
from ..core._errors import noting
from ..core._frames import tidy
from ..core._iterate import until_error
from ..core._jaxpr import iter_equations
from ..core._pytree import ARRAYS, join
from ..data._batches import Batch, Batches
from ..distributed._arrays import copy_tree, place_batch
from ..sharding import Plan
from ..tracking._loggers import all_loggers, takes_state
from ..tracking._metrics import Log, PackedMetrics, StackedMetrics
from ..train._compile import CompiledStep
from ..train._debug_settings import is_debugged
from ..train._last_state import FlatState, as_tree
from ..train._state import TrainState
from ..train._training import Training

ARRAYS_OF_BATCH = (np.ndarray, jax.Array)
SECONDS = 5e-3  # of a call with several steps
MOST = 32  # steps in a call
ALONE = 4  # steps of a run that are taken alone


class Small(NamedTuple):
    """What a step may have to be taken together with others, so that it costs nothing if the step
    proves to be long.

    The bytes are those of the state, which is copied in each call, and of all batches of a call.
    """

    flops: float
    state_bytes: float
    batch_bytes: float


ON_CPU = Small(flops=2e8, state_bytes=4e6, batch_bytes=1e6)
ON_ACCELERATOR = Small(flops=1e11, state_bytes=2.5e8, batch_bytes=1.6e7)


@dataclass(frozen=True)
class StepCall:
    """Steps that were dispatched together.

    - `batches`: the batches, one for each step.
    - `flat`: the state after the last step. The next call donates it.
    - `metrics`: those of the only step, as the compiled step returned them; or of all steps.
    - `recompute`: a function that computes the state after the first `count` of the steps again;
        `None` for a step that is taken alone.
    """

    batches: Sequence[Batch]
    flat: FlatState
    metrics: PackedMetrics | StackedMetrics
    recompute: Callable[[int], FlatState] | None = None

    @property
    def last(self) -> "StepTaken":
        return StepTaken(self.batches[-1], self.flat, self.metrics)

    @property
    def numbers(self) -> range:
        """The numbers of the steps."""
        return range(self.batches[0].step, self.batches[-1].step + 1)

    def step(self, number: int) -> "StepTaken":
        """One of the steps, with the state after it."""
        assert self.recompute is not None
        index = number - self.batches[0].step
        return StepTaken(self.batches[index], self.recompute(index + 1), self.metrics)


class StepTaken(NamedTuple):
    """A step, with the state after it, the metrics of its call, and its batch."""

    batch: Batch
    flat: FlatState
    metrics: PackedMetrics | StackedMetrics

    @property
    def number(self) -> int:
        return self.batch.step

    @property
    def state(self) -> TrainState:
        return self.flat.tree


@dataclass(eq=False)
class Calls:
    """Takes the steps of a run."""

    alone: Callable[[PyTree, PyTree], tuple[FlatState, PackedMetrics]]  # the compiled step
    data: Batches
    together: CompiledStep | None  # the program of several steps; `None` if each is taken alone
    pace: "Pace"  # how many steps a call takes
    small: Small | None  # what is larger is taken alone; `None` if the user chose the pace

    def __call__(self, state: TrainState, ends: Callable[[Batch], bool]) -> Iterator[StepCall]:
        """Takes a step on each batch, and yields each call before the device has finished.

        `ends` is whether a call must end with a batch.
        """
        flat: PyTree | FlatState = state
        del state  # it is donated
        for group in self._groups(ends):
            try:
                call = self._take(flat, group)
            except Exception as error:
                noting(f"Raised by step {group[0].step}.").add_to(error)
                tidy(error)
                raise
            flat = call.flat  # no reference to the state before, which was donated
            yield call
            self.pace.see(len(group))

    def _groups(self, ends: Callable[[Batch], bool]) -> Iterator[list[Batch]]:
        """The batches of each call."""
        errors: list[Exception] = []
        group: list[Batch] = []
        for batch in until_error(self.data, errors):
            # A short last batch, or one that `collate_fn` makes of another shape, is taken alone.
            fits = self.together is not None and _types(batch.arrays) == self._types_of_program
            if group and not fits:
                yield group
                group = []
            group.append(batch)
            if not fits or len(group) >= self.pace.count or ends(batch):
                yield group
                group = []
        if group:  # an error of the next batch does not concern them
            yield group
        # The steps before the error are taken first, so that the run ends where the data does.
        if errors:
            raise errors[0]

    @ft.cached_property
    def _types_of_program(self) -> list[Hashable]:
        return _types(self.data.spec)

    def _take(self, state: PyTree | FlatState, group: list[Batch]) -> StepCall:
        arrays = group[0].arrays
        if self.together is not None and _types(arrays) == self._types_of_program:
            # Always of the same size, so that there is one program for all numbers of steps.
            stacked = stack([batch.arrays for batch in group], self.pace.most)
            # Measured once, when the program is traced for the first batch.
            small, self.small = self.small, None
            if small is None or _is_small(self.together, as_tree(state), stacked, small):
                return take_together(self.together, state, group, stacked)
            self.together = None
        if self.data.on_host:
            # Batches stay on the host while steps are taken together, and this one goes alone.
            arrays = place_batch(arrays, self.data.mesh, kinds=ARRAYS_OF_BATCH)
        return StepCall(group, *self.alone(state, arrays))


def take_together(
    together: CompiledStep, state: PyTree | FlatState, group: list[Batch], stacked: PyTree
) -> StepCall:
    """Takes a step on each of several batches, in one call."""
    flat, taken = together.take(state, stacked, np.int32(len(group)))

    def recompute(count: int) -> FlatState:
        # A copy, since the program donates it, and may be asked for another step.
        before = join(copy_tree(taken.before), flat.static)
        return together.take(before, stacked, np.int32(count))[0]

    return StepCall(group, flat, StackedMetrics(taken.names, taken.values), recompute)


def stack(batches: Sequence[PyTree], rows: int) -> PyTree:
    """Stacks batches in arrays with room for `rows` of them, on the host."""

    def stack_leaf(*parts: PyTree) -> np.ndarray:
        # Rows behind the last batch are not read, whatever they hold.
        stacked = np.empty((rows, *parts[0].shape), parts[0].dtype)
        np.stack(parts, out=stacked[: len(parts)])
        return stacked

    return jax.tree.map(stack_leaf, *batches)


def _types(batch: PyTree) -> list[Hashable]:
    """The shapes and dtypes of a batch."""
    return [(x.shape, x.dtype) for x in jax.tree.leaves(batch)]


def _is_small(together: CompiledStep, state: TrainState, stacked: PyTree, small: Small) -> bool:
    """Whether a step has little arithmetic, and nothing that may take long or has side effects."""
    # Imported where it is used, so that importing redcoast stays fast.
    from ..dryrun._flops import contractions

    try:
        jaxpr = together.trace(state, stacked, np.int32(1)).jaxpr
    except ValueError:
        # The step changes the types of the state; or the loss has a mistake, which a step that is
        # taken alone raises again.
        return False
    # A callback of the user sees every step as it happens.
    on_host = jaxpr.effects or any(map(is_callback, iter_equations(jaxpr)))
    work = contractions(jaxpr)
    own_loops = work.open_loops - 1  # without the loop over batches
    return not on_host and own_loops == 0 and sum(work.flops.values()) <= small.flops


class Pace:
    """How many steps the next call takes.

    - `most`: the number of steps for which the program has room.
    - `count`: the number of steps of the next call.
    """

    def __init__(self, most: int, *, fixed: bool, clock: Callable[[], float] = perf_counter):
        self.most, self.count = most, 1
        self._fixed, self._clock = fixed, clock
        self._calls, self._least, self._before = 0, math.inf, clock()

    def see(self, steps: int) -> None:
        """Measures the call that ended now; the next one may take twice as many steps."""
        now = self._clock()
        # The least, since others include compilations and waits for data.
        self._least = min(self._least, (now - self._before) / steps)
        self._calls, self._before = self._calls + 1, now
        if self._fixed:
            self.count = self.most
        # The first steps compile, and their times say nothing.
        elif self._calls >= ALONE:
            # A call should take this long at most, so that progress and signals are not held up.
            fitting = int(SECONDS / max(self._least, 1e-9))
            self.count = max(1, min(self.most, fitting, 2 * self.count))


def plan_calls(
    steps_per_call: int | None,
    training: Training,
    plan: Plan,
    state: TrainState,
    data: Batches,
    alone: Callable[[PyTree, PyTree], tuple[FlatState, PackedMetrics]],
    log: Log | Sequence[Log] | Literal[False] | None,
) -> Calls:
    """The calls of a run, with the arguments of `fit`, a compiled step, and a state that may be
    abstract.

    Raises `ValueError` if the user asks for several steps in a call, and something needs each.
    """
    most = steps_per_call
    small = None
    if steps_per_call is None:
        small = ON_ACCELERATOR
        if data.mesh.devices.flat[0].platform == "cpu":
            small = ON_CPU
        most = 0
        # Arrays for a whole batch, such as edges of graphs, have other sizes in each.
        if not data.per_batch and _bytes(state) <= small.state_bytes:
            most = min(MOST, int(small.batch_bytes / max(1, _bytes(data.spec))))
    elif data.steps is not None:
        # There is memory for as many batches as a call may take.
        most = min(steps_per_call, data.steps)
    obstacle = _obstacle(data, log)
    if steps_per_call is not None and steps_per_call > 1 and obstacle:
        raise ValueError(
            f"`steps_per_call={steps_per_call}` does not work here, because {obstacle}. Leave it "
            "out."
        )
    # With these settings of JAX, errors are raised at operations, and must name their step.
    debugs = is_debugged() or getattr(jax.config, "jax_debug_key_reuse")  # noqa: B009  # no type
    if most is None or most < 2 or obstacle or debugs:
        return Calls(alone, data, None, Pace(1, fixed=True), None)
    # Stacking needs the batches before they are on the devices.
    data.on_host = True
    pace = Pace(most, fixed=steps_per_call is not None)
    return Calls(alone, data, training.several_by(plan, data.mesh), pace, small)


def _bytes(tree: PyTree) -> int:
    # A typed key is a few bytes, and its dtype does not say how many.
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, ARRAYS)]
    return sum(x.size * getattr(x.dtype, "itemsize", 0) for x in arrays)


def _obstacle(data: Batches, log: Log | Sequence[Log] | Literal[False] | None) -> str:
    """Why steps cannot be taken together, as the end of a sentence; empty if they can."""
    if jax.process_count() > 1:
        return "the run has several processes"
    # Only the last state of a call exists.
    if any(map(takes_state, all_loggers(log))):
        return "a callable in `log` has a parameter `state`, for the state after each step"
    if any(jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in jax.tree.leaves(data.spec)):
        return "the batches have typed keys, which cannot be stacked on the host"
    return ""
