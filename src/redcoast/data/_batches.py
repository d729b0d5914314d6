"""Iterates over the batches of a training run; the state of the iterator can be saved."""

import contextlib
import functools as ft
import itertools
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PRNGKeyArray, PyTree, UInt64

from ..core._errors import check_integer, check_key, listed, noting
from ..core._frames import hide_frames
from ..core._iterate import with_next
from ..core._read_json import JSONObject
from ..distributed._kv_store import exchange, is_main
from ..distributed._mesh import ambient_or_default
from ._by_host import SplitByHost, read_part
from ._collate import CollateFn, Rngs, check_batching, collate, collate_own, count_rows
from ._fingerprint import fingerprint, warn_of_other_examples
from ._loading import (
    USUAL_THREADS,
    Collating,
    Loaded,
    OwnBatches,
    Threads,
    checked_threads,
    read_batches,
    stream_batches,
    training_batches,
)
from ._per_batch import has_per_batch, is_per_batch, without_marks
from ._permutation import data_seed, example_generators, shuffled
from ._sources import fetch, is_endless, read_source
from ._stack import Examples
from ._stream_state import decode_stream_state, encode_stream_state
from ._streams import is_iterator

logger = logging.getLogger("redcoast")

MOST_STEPS = 2**31 - 1  # a state counts its steps in int32


class Batch(NamedTuple):
    """A batch on the devices, and its position in the run.

    **Attributes:**

    - `arrays`: the result of `collate_fn`, on the devices: a PyTree, batch dimension first. On a
        single CPU device, its leaves are NumPy arrays.
    - `rows`: the number of examples.
    - `step`: the number of the training step; the first step is 1.
    - `epoch_end`: whether it contains the last example of an epoch.
    - `last`: whether it is the last batch of the run.
    - `state`: the state of the data after this batch, as [`redcoast.Batches`][] restores it.
    """

    arrays: PyTree
    rows: int
    step: int
    epoch_end: bool
    last: bool
    state: dict[str, Any]


class Batches:
    """An iterator over [`redcoast.Batch`][]es, created by [`redcoast.batches`][].

    **Attributes:**

    - `batch_size`: the number of examples in a batch; only the last batch of a run may have fewer.
        If the source makes batches itself, the number in its first batch.
    - `collate_fn`: the function that turns a list of examples into a batch.
    - `mesh`: the mesh that the batches are placed on.
    - `length`: the number of examples in an epoch; `None` for a stream.
    """

    def __init__(
        self,
        examples: object,
        collate_fn: CollateFn | None,
        *,
        batch_size: int | None,
        key: PRNGKeyArray,
        mesh: Mesh,
        epochs: int | None,
        steps: int | None,
        threads: Threads = USUAL_THREADS,
    ):
        self.mesh, self.collate_fn = mesh, collate_fn
        self.on_host = False  # whether the batches are left to be placed by the loop
        self.given_epochs, self._steps, self._threads = epochs, steps, threads
        self.makes_batches = batch_size is None  # whether the items of the examples are batches
        self._part, self._parts = 0, 1  # which part of a stream this process reads, and of how many
        if isinstance(examples, SplitByHost):
            self._examples: Any  # `Epochs` if there is a `length`, otherwise a `Stream`
            self._examples, self._part, self._parts = read_part(examples, mesh, batch_size)
        elif batch_size is None:
            self._examples = read_batches(OwnBatches(examples), epochs=epochs)
        else:
            self._examples = read_source(examples, epochs=epochs)
        self.is_split = self._parts > 1  # whether each process reads its own examples
        self.length: int | None = getattr(self._examples, "length", None)
        if batch_size is None:
            batch_size = self._own_rows()
        self.batch_size: int = batch_size
        self._state: JSONObject = {}
        self._loading: Iterator[tuple[Loaded, Loaded | None, bool]] | None = None
        self._closing = contextlib.ExitStack()
        self._has_warned_of_added = False
        self._stream_is_ahead = False  # of the last returned batch, since batches were prepared
        self._fingerprint: list[int] | None = None
        self.set_state({"step": 0}, key=key)

    @property
    def step(self) -> int:
        """The number of batches returned so far, including those before a resume."""
        return self._state["step"]

    @property
    def steps(self) -> int | None:
        """The number of the last step; `None` for a stream without `steps`."""
        return self._end()[0]

    @property
    def epochs(self) -> float | None:
        """The number of epochs of the run; `None` for a stream."""
        end = self._end()[1]
        if end is None or not self.length:
            return None
        return end / self.length

    @property
    def is_endless(self) -> bool:
        """Whether the examples have an index and no end, as a dataset that Grain repeats."""
        return self.length is not None and is_endless(self.length)

    @property
    def epochs_done(self) -> int | None:
        """The number of epochs whose examples were all returned; `None` for a stream."""
        if not self.length:
            return None
        return self._state["position"] // self.length

    @property
    def rows_left(self) -> int | None:
        """The number of examples left in the run; `None` for a stream without `steps`."""
        end = self._end()[1]
        if end is None:
            return None
        return max(0, end - self._state["position"])

    @property
    def spec(self) -> PyTree[jax.ShapeDtypeStruct]:
        """The shapes and dtypes of a full batch. The first use collates a batch, as `peek` does."""
        return without_marks(self._marked_spec)

    @property
    def resumes(self) -> bool:
        """Whether another process can restore the state of the data."""
        return self.length is not None or self._examples.resumes

    @property
    def has_single_integers(self) -> bool:
        """Whether each example is one integer, as in a flat array of tokens."""
        leaves = jax.tree.leaves(self.spec)
        return len(leaves) == 1 and leaves[0].ndim == 1 and leaves[0].dtype.kind in "iu"

    @property
    def per_batch(self) -> bool:
        """Whether some arrays are marked with [`redcoast.per_batch`][]."""
        return has_per_batch(self._marked_spec)

    @ft.cached_property
    def _marked_spec(self) -> PyTree:
        def abstract(part: PyTree) -> PyTree:
            if is_per_batch(part):  # the sizes of other batches may differ
                return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), part)
            # `part` has the rows of this process, and a batch those of all.
            return jax.ShapeDtypeStruct((self.batch_size, *part.shape[1:]), part.dtype)

        return jax.tree.map(abstract, self._peek(), is_leaf=is_per_batch)

    @hide_frames
    def peek(self) -> PyTree[np.ndarray | jax.Array]:
        """Collates this process's rows of a first batch on the host, without advancing."""
        return without_marks(self._peek())

    def collate_examples(self, indices: list[int], *, augment: bool = True) -> PyTree:
        """Collates examples of the first epoch on the host, without advancing.

        In a stream, examples are counted from its current position. Indices wrap around at the last
        example, or, in a stream, at the end of its next batch. Without `augment`, the parameter
        `rngs` of `collate_fn` is `None`. Arrays that belong to the whole batch keep their mark.
        """
        if self.makes_batches:
            (item,) = self._examples.peek(1)
            batch = collate_own(self.collate_fn, item, 0)  # all rows, unlike `peek`
            rows = count_rows(batch)
            own_rows = np.array(indices) % rows

            def take_rows(x: PyTree) -> PyTree:
                if is_per_batch(x):
                    return x
                return x[own_rows]

            return jax.tree.map(take_rows, batch, is_leaf=is_per_batch)
        assert self.collate_fn is not None
        examples = self._first_examples(indices)
        if not augment:
            return collate(self.collate_fn, examples, indices, lambda: None)
        return collate(self.collate_fn, examples, indices, _any_generators(indices))

    def _own_rows(self) -> int:
        """The number of rows of the next batch that the source makes."""
        (item,) = self._examples.peek(1) or [None]
        if item is None:
            raise ValueError(_EMPTY)
        return Collating(self.collate_fn, self.mesh).own_host_batch(item, 0)[1]

    def _peek(self) -> PyTree:
        if self.makes_batches:
            (item,) = self._examples.peek(1)
            return Collating(self.collate_fn, self.mesh).own_host_batch(item, 0)[0]

        def read(own: list[int]) -> tuple[Examples, list[int], Rngs]:
            return self._first_examples(own), own, _any_generators(own)

        return Collating(self.collate_fn, self.mesh).host_batch(self.batch_size, read)[0]

    def _first_examples(self, rows: list[int]) -> Examples:
        if self.length is not None:
            with self._examples.using(0) as dataset:
                # Of fewer examples than rows, some come several times.
                return fetch(dataset, [i % self.length for i in rows])
        examples = self._examples.peek(self.batch_size // self._parts)
        if not examples:
            raise ValueError(_EMPTY)
        return [examples[i % len(examples)] for i in rows]

    def get_state(self) -> dict[str, Any]:
        """Returns the state after the last returned batch, which can be stored as JSON."""
        # A copy, which later batches do not change.
        return dict(self._state)

    def recognise_examples(self, saved: JSONObject) -> None:
        """Warns if the examples differ from a saved state's, for instance in their order.

        States that `gather_state` returns contain checksums of examples. This method reads a few
        examples, and must be called before the first batch.
        """
        if self.length is None:
            return
        with self._examples.using(0) as dataset:
            self._fingerprint = fingerprint(dataset, self.length)
            before = saved.get("fingerprint")
            if before not in (None, self._fingerprint) and self.rows_left and is_main():
                # A dataset that augments at random differs from itself.
                again = fingerprint(dataset, self.length)
                warn_of_other_examples(before, self._fingerprint, again)

    def gather_state(self, state: JSONObject) -> JSONObject:
        """Returns a state for a checkpoint, with the places of all processes.

        All processes must call it if the examples are split by host.
        """
        if self._fingerprint is not None:
            state = {**state, "fingerprint": self._fingerprint}
        if not self.is_split:
            return state
        # Processes that share rows read the same part, and have the same place in it.
        places = exchange("the places in `examples`", [self._part, state["stream"]])
        streams = dict(places)
        return {**state, "stream": {"parts": [streams[part] for part in range(self._parts)]}}

    def _own_place(self, stream: JSONObject | None) -> JSONObject | None:
        """The position in the part that this process reads."""
        places = (stream or {}).get("parts")
        if places is None:
            return stream
        self._check_parts(len(places))
        return places[self._part]

    def _check_parts(self, before: int) -> None:
        """Raises `ValueError` if a stream was read in another number of parts."""
        if before == self._parts:
            return
        then = f"examples split by host into {before} parts"
        if before == 1:
            then = "examples in one part"
        raise ValueError(
            f"The run was started with {then} and cannot be resumed with {self._parts}. Use as "
            "many processes with different rows of a batch, or choose another directory to start "
            "a new run."
        )

    @hide_frames
    def set_state(self, state: dict[str, Any], *, key: PRNGKeyArray | None = None) -> None:
        """Sets the position, so that the next batch is the one after the given state.

        **Arguments:**

        - `state`: from `get_state` or [`redcoast.Batch`][]. `{"step": n}` is the state after `n`
            full batches. With `epochs`, it is the end of an epoch if `n` batches can be a whole
            number of epochs, trained in one run or in one run for each epoch.
        - `key`: a JAX key that determines the order of the examples if the state does not; in
            `fit`, `state.key` of the [`redcoast.TrainState`][].

        **Raises:**

        `ValueError` if the state belongs to a stream but the examples are not a stream, or vice
        versa.
        """
        step, length = state["step"], self.length
        # For states without a position, such as `{"step": n}`.
        of_epoch = None
        if self.given_epochs:
            of_epoch = length
        guess = _position(step, self.batch_size, of_epoch)
        before = state.get("length", length)
        if (before is None) != (length is None):
            now, then = "examples with an index", "a stream"
            if length is None:
                now, then = then, now
            raise ValueError(
                f"The run was started with {then} and cannot be resumed with {now}. Pass the same "
                "kind of `examples`, or choose another directory to start a new run."
            )
        if before != length:
            logger.warning(
                "The run was started with %s examples per epoch and is resumed with %s. From here "
                "on, the order of the examples differs.",
                *(before, length),
            )
        stream = self._own_place(state.get("stream"))
        if length is None:
            # A stream that is read in one part has the same state as each of several.
            self._check_parts(state.get("parts", self._parts))
        # Batches that were prepared belong to the position before.
        self.close()
        if length is None and stream is not None:
            self._examples.set_state(decode_stream_state(stream))
        elif length is None:
            stream = encode_stream_state(self._examples.get_state())
        self._stream_is_ahead = False
        position = state.get("position", guess)
        # A resumed run keeps its own seed, and with it its order, whatever the key is now.
        seed = state.get("seed") or self._state.get("seed")
        if key is not None and not state.get("seed"):
            seed = data_seed(key).tolist()
        self._state = {"step": step, "seed": seed, "position": position, "length": length}
        self._state["stream"] = stream
        if length is None:
            self._state["parts"] = self._parts

    def examples_of(self, batch: Batch) -> tuple[list[int], str]:
        """Returns the indices of a batch's examples (for a stream, their positions), and a sentence
        for error messages."""
        end = batch.state["position"]
        positions = np.arange(end - batch.rows, end, dtype=np.int64)
        if self.length is None:
            at = positions.tolist()
            return at, f"The batch held the examples {at[0]} to {at[-1]} of the stream."
        epochs, indices = shuffled(positions, self.length, self._seed())
        which = " and ".join(map(str, sorted(set(epochs.tolist()))))
        return indices.tolist(), (
            f"The batch held the examples with indices {listed(indices.tolist(), 8)} of epoch "
            f"{which}."
        )

    def close(self) -> None:
        """Stops the threads that prepare batches; reading the next batch starts them again."""
        self._loading = None
        self._closing.close()

    def __iter__(self) -> Iterator[Batch]:
        return self

    @hide_frames
    def __next__(self) -> Batch:
        if self._loading is None:
            self._loading = self._load()
        state, length = self._state, self.length
        step = state["step"] + 1
        try:
            loaded, following, last = next(self._loading)
        except StopIteration:
            self._check_end()
            raise
        except BaseException as error:
            noting(f"Raised while the batch of step {step} was made.").add_to(error)
            self.close()  # after an error, the next call tries this batch again
            raise
        if last:
            self._check_complete(loaded.position)
        if length is not None:
            epoch_end = loaded.position // length > state["position"] // length
            if epoch_end:
                self._warn_of_added()
        else:
            epoch_end = following is not None and following.epoch > loaded.epoch
        # The state is of what was returned, and not of what threads have prepared since.
        state |= {"step": step, "position": loaded.position, "stream": loaded.stream}
        return Batch(loaded.arrays, loaded.rows, step, last or epoch_end, last, self.get_state())

    def _load(self) -> Iterator[tuple[Loaded, Loaded | None, bool]]:
        length = self.length
        if length is not None and min(self.batch_size, self.rows_left or 0) > length and is_main():
            logger.warning(
                "`batch_size=%d` is more than the %d examples: a batch spans epochs, and contains "
                "examples several times. Pass at most %d, or more examples.",
                *(self.batch_size, length, length),
            )
        # Threads that were stopped have read further than the batches that were returned.
        if self._stream_is_ahead:
            self._examples.set_state(decode_stream_state(self._state["stream"]))
        self._stream_is_ahead = length is None
        batch_size = self.batch_size
        if self.makes_batches:
            batch_size = None
        options: Any = {
            "batch_size": batch_size,
            "seed": self._seed(),
            "start": self._state["position"],
            "stop": self._end()[1],
            "mesh": self.mesh,
            "threads": self._threads,
            "on_host": self.on_host,
        }
        if length is None:
            options["parts"] = self._parts
        load: Any = training_batches
        if length is None:
            load = stream_batches
        loading = load(self._examples, self.collate_fn, **options)
        self._closing.callback(loading.close)
        left = None
        if self._steps is not None:
            left = max(0, self._steps - self.step)
        return with_next(itertools.islice(loading, left))

    def _end(self) -> tuple[int | None, int | None]:
        """Returns the last step of the run, and the position at which its data ends."""
        step, position = self.step, self._state["position"]
        if self._steps is not None:
            # Of batches that the source makes, the numbers of examples are not known before.
            if self.makes_batches:
                return self._steps, None
            return self._steps, position + (self._steps - step) * self.batch_size
        if self.given_epochs is None or self.length is None:
            return None, None
        left = max(0, self.given_epochs * self.length - position)
        # The last batch may be short.
        return step + -(-left // self.batch_size), self.given_epochs * self.length

    def _seed(self) -> UInt64[np.ndarray, "2"]:
        return np.array(self._state["seed"], np.uint64)

    def _warn_of_added(self) -> None:
        """Warns, once, of examples that were added to a list while it was read."""
        assert self.length is not None
        if self._has_warned_of_added or not is_main():
            return
        now = self.length
        # Only for a warning: a length that cannot be counted any more does not end the run.
        with contextlib.suppress(Exception):
            now = self._examples.count_now()
        if now <= self.length:
            return
        self._has_warned_of_added = True
        logger.warning(
            "`examples` had %d entries when the run began and have %d now, of which the later ones "
            "are not read: the order of the examples depends on their number. For a replay buffer "
            "that grows, pass a generator function that samples from it, with `steps`; or call "
            "`fit` again with the state that it returned, after entries were added.",
            *(self.length, now),
        )

    def _check_complete(self, position: int) -> None:
        """Raises `RuntimeError` if batches of indexed examples end before the run."""
        steps, end = self._end()
        if self.length is not None and end is not None and position < end:
            raise RuntimeError(
                f"The batches ended after {position} of the {end} examples of the run, at step "
                f"{self.step} of {steps}, although nothing stopped it."
            )

    def _check_end(self) -> None:
        """Raises an error if a stream is empty, and warns if it ended before the run."""
        self._check_complete(self._state["position"])
        if self.length is not None or self.step == self._steps:
            return
        if self.step == 0:
            raise ValueError(_EMPTY)
        # Another process may have more examples, and then cannot go on without this one.
        processes = {device.process_index for device in self.mesh.devices.flat}
        if len(processes) == jax.process_count():
            exchange("the end of `examples`", self.step)
        if self._steps is not None and self.step < self._steps:
            logger.warning("The stream ended after %d of %d steps.", self.step, self._steps)


_EMPTY = "`examples` is a stream that gave no examples. Pass a stream at its start."


@hide_frames
def batches(
    examples: object,
    collate_fn: CollateFn | None = None,
    *,
    batch_size: int | None,
    key: PRNGKeyArray,
    mesh: Mesh | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    workers: int = 2,
    ahead: int = 4,
) -> Batches:
    """Creates an iterator over the batches of a training run, prepared a few steps ahead.

    The batches are on the devices of the mesh. Each epoch has its own order, a permutation that
    depends on `key`. A batch can span two epochs, so only the last batch of a run may be short.
    Each process reads and collates only the rows of its own devices.

    **Arguments:**

    - `examples`, `collate_fn`: as for [`redcoast.fit`][].
    - `batch_size`: the number of examples in a batch, over all devices; `None` if the items of
        `examples` are batches already, as for [`redcoast.fit`][].
    - `key`: a JAX key that determines the order of the examples; `fit` uses `state.key`.
    - `mesh`: from [`redcoast.make_mesh`][]; by default the ambient mesh, or all devices as `data`.
    - `epochs`, `steps`: the total length of the run, including the part before a resume. Pass
        exactly one, or neither to read an iterator to its end.
    - `workers`: the number of threads that prepare batches if this takes longer than a step. With
        0, the calling thread makes each batch when it is needed.
    - `ahead`: the number of batches that the threads prepare in advance and keep in memory.

    **Returns:**

    A [`redcoast.Batches`][], an iterator over [`redcoast.Batch`][]es with `get_state()` and
    `set_state(state)`.

    **Raises:**

    `ValueError` or `TypeError` if an argument is invalid.

    !!! Example

        ```python
        data = rc.batches(examples, collate_fn, batch_size=4, key=jax.random.key(0), steps=3)
        for batch in data:
            print(batch.step, jax.tree.map(jnp.shape, batch.arrays), batch.last)
        ```
    """
    collate_fn = check_batching(collate_fn, batch_size)
    check_key(key)
    threads = checked_threads(workers, ahead)
    for name, value in (("epochs", epochs), ("steps", steps)):
        if value is not None:
            check_integer(name, value, most=MOST_STEPS)
    if epochs is not None and steps is not None:
        raise ValueError(f"Both `epochs={epochs}` and `steps={steps}` are given; pass one of them.")
    if epochs is None and steps is None and not is_iterator(examples):
        raise ValueError("Pass `epochs` or `steps` to specify how long to train.")
    if epochs is not None and isinstance(examples, SplitByHost):
        raise ValueError(
            "With `split_by_host`, processes may read different numbers of examples in an epoch. "
            "Pass `steps` instead of `epochs`."
        )
    if epochs is not None and is_iterator(examples):
        raise ValueError(
            f"`examples` is an iterator, of type {type(examples).__name__}, which can be read only "
            "once and has no epochs. Pass a function that returns a new one, such as a generator "
            "function itself; `steps`; or neither, to read it to its end."
        )
    options = {"batch_size": batch_size, "key": key, "epochs": epochs, "steps": steps}
    mesh = ambient_or_default(mesh)
    return Batches(examples, collate_fn, mesh=mesh, threads=threads, **options)


def _any_generators(indices: list[int]) -> Rngs:
    """Generators of examples that are not of a run, the same in each call."""
    return ft.partial(example_generators, [0] * len(indices), indices, np.zeros(2, np.uint64))


def _position(step: int, batch_size: int, length: int | None) -> int:
    """Returns the position in the data after a number of steps, if no position was saved."""
    # The last batch of a run with `epochs` may be short. The steps may be from one run over several
    # epochs, or from several runs over one epoch each.
    if length is not None:
        epochs, per_epoch = step * batch_size // length, -(-length // batch_size)
        if -(-epochs * length // batch_size) == step:
            return epochs * length
        if step % per_epoch == 0:
            return step // per_epoch * length
    return step * batch_size
