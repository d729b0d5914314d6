"""From raw examples to batches on the devices, a few ahead of the step."""

import functools as ft
import inspect
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree, UInt64

from ..core._errors import noting
from ..distributed._arrays import own_rows, place_rows
from ..distributed._heartbeat import doing
from ..distributed._mesh import batch_shards
from ._permutation import batch_indices, example_generators
from ._stream_state import encode_stream_state

T = TypeVar("T")
U = TypeVar("U")
CollateFn = Callable[..., PyTree]
ARRAYS = (np.ndarray, jax.Array)
AHEAD = 4
CHEAP = 0.2e-3  # seconds
WORKERS = 2


class Batch(NamedTuple):
    arrays: PyTree
    rows: int
    position: int  # of the run, behind this batch
    stream: Any = None  # the state of the stream behind this batch


def with_last(batches: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Batches, and whether each is the last: the next is at hand already."""
    before: list[T] = []
    batches = iter(batches)
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            break
        except Exception:
            if before:  # it is whole, whatever has become of the next
                yield before.pop(), False
            raise
        if before:
            yield before.pop(), False
        before.append(batch)
    if before:
        yield before.pop(), True


def is_stream(examples: Any) -> bool:
    """Whether examples come one by one, from an iterator whose state can be saved (Grain's)."""
    return all(hasattr(examples, name) for name in ("__next__", "get_state", "set_state"))


def by_epoch(examples: Any, *, name: str = "examples") -> tuple[Callable[[int], Any], int]:
    """A function from the epoch to the examples, and how many there are in each."""
    if isinstance(examples, Mapping):
        raise TypeError(
            f"`{name}` is a {type(examples).__name__}, whose items are columns. It must give one "
            "example for an index: a list of dicts, say, or a dataset."
        )
    if hasattr(examples, "__len__") and hasattr(examples, "__getitem__"):
        return lambda epoch: examples, _length(examples, name)
    if not callable(examples):
        raise TypeError(
            f"`{name}` is of type {type(examples).__name__}. It must have a length and an index "
            "(a list, an array, a dataset), be a function from the epoch to such a thing, or be "
            "an iterator with `get_state` and `set_state`, as Grain's are."
        )
    make: Callable[[int], Any] = examples
    length = _length(make(0), f"{name}(0)")

    @ft.lru_cache(maxsize=2)  # a batch may span two epochs
    def of_epoch(epoch: int) -> Any:
        found = make(epoch)
        if len(found) != length:
            raise ValueError(
                f"`{name}({epoch})` has {len(found)} examples, but `{name}(0)` has {length}. "
                "Every epoch must have the same number."
            )
        return found

    return of_epoch, length


def count_examples(examples: Any, name: str = "examples") -> int | None:
    """How many there are in an epoch; `None` of a stream, and where there are none at all."""
    nothing = examples is None or is_stream(examples)
    return None if nothing else by_epoch(examples, name=name)[1]


def _length(examples: Any, name: str) -> int:
    if len(examples) == 0:
        raise ValueError(f"`{name}` is empty. Pass at least one example.")
    return len(examples)


def training_batches(
    examples: Any,
    collate_fn: CollateFn,
    *,
    batch_size: int,
    seed: UInt64[np.ndarray, "2"],
    start: int,
    stop: int,
    mesh: Mesh,
) -> Iterator[Batch]:
    """The batches from one position of a run to another, shuffled anew in each epoch."""
    of_epoch, length = by_epoch(examples)

    def make(drawn: tuple[int, list[int], list[int]]) -> Batch:
        begin, *places = drawn
        rows = len(places[0])
        own = own_rows(mesh, rows)
        epochs, indices = ([x[i] for i in own] for x in places)
        found: list[Any] = []
        for epoch in dict.fromkeys(epochs):
            first = epochs.index(epoch)
            found += fetch(of_epoch(epoch), indices[first : first + epochs.count(epoch)])
        rngs = lambda: example_generators(epochs, indices, seed)
        arrays = collate(collate_fn, found, indices, rngs)
        return Batch(place_rows(arrays, mesh, rows), rows, begin + rows)

    draws = batch_indices(start, stop, batch_size, length, seed)
    positions = range(start, stop, batch_size)
    drawn = ((p, *draw) for p, draw in zip(positions, draws, strict=True))
    return _alike(prefetch(make, drawn, workers=WORKERS))


def stream_batches(
    stream: Any,
    collate_fn: CollateFn,
    *,
    batch_size: int,
    seed: UInt64[np.ndarray, "2"],
    start: int,
    stop: int | None,
    mesh: Mesh,
) -> Iterator[Batch]:
    """The batches of a stream, from where it stands, with its state behind each of them."""

    def draw() -> Iterator[tuple[int, list[Any], Any]]:
        position = start
        while stop is None or position < stop:
            wanted = batch_size if stop is None else min(batch_size, stop - position)
            found = [x for _, x in zip(range(wanted), stream, strict=False)]
            if not found:
                return
            position += len(found)
            yield position, found, encode_stream_state(stream.get_state())

    def make(drawn: tuple[int, list[Any], Any]) -> Batch:
        position, found, state = drawn
        own = own_rows(mesh, len(found))
        indices = [position - len(found) + i for i in own]
        rngs = lambda: example_generators([0] * len(own), indices, seed)
        arrays = collate(collate_fn, [found[i] for i in own], indices, rngs)
        return Batch(place_rows(arrays, mesh, len(found)), len(found), position, state)

    return _alike(prefetch(make, draw(), workers=WORKERS))


def ordered_batches(
    examples: Any, collate_fn: CollateFn, *, batch_size: int, mesh: Mesh, name: str = "examples"
) -> Iterator[Batch]:
    """All examples once, in order: for evaluation and prediction."""
    of_epoch, length = by_epoch(examples, name=name)

    def make(bounds: tuple[int, int]) -> Batch:
        begin, end = bounds
        indices = [begin + i for i in own_rows(mesh, end - begin)]
        arrays = collate(collate_fn, fetch(of_epoch(0), indices), indices, lambda: None)
        return Batch(place_rows(arrays, mesh, end - begin), end - begin, end)

    return prefetch(make, chunks(length, batch_size, batch_shards(mesh)), workers=WORKERS)


def chunks(length: int, batch_size: int, shards: int) -> Iterator[tuple[int, int]]:
    """Bounds of batches that leave nothing over, of few different sizes."""
    # The last examples go in a batch that divides over the devices and, whole on each device,
    # in batches no larger than a device's share, so that memory is that of a full batch.
    share = max(1, batch_size // shards)
    start = 0
    while start < length:
        rows = min(batch_size, length - start)
        if rows < batch_size and rows % shards:
            rows = rows // shards * shards or min(share, rows)
        yield start, start + rows
        start += rows


def fetch(examples: Any, indices: list[int]) -> list[Any]:
    """The examples at the given indices; in one call where the data offers it."""
    note = noting(lambda: f"Raised by the examples with indices {indices}.")
    with note, doing("reading examples"):
        if hasattr(examples, "__getitems__"):  # datasets on disk read faster so
            return list(examples.__getitems__(indices))
        return [examples[i] for i in indices]


def collate(
    collate_fn: CollateFn, examples: list[Any], indices: list[int], rngs: Callable[[], Any]
) -> PyTree:
    """Calls `collate_fn` and checks that it returned a batch of these examples."""
    options = {"rngs": rngs()} if takes_rngs(collate_fn) else {}
    note = noting(lambda: f"Raised by `collate_fn` for the examples with indices {indices}.")
    with note, doing("`collate_fn`"):
        try:
            arrays = collate_fn(examples, **options)
        except SystemExit as error:
            # Meant for a thread, it would end the whole run, and perhaps with a code of success.
            raise RuntimeError(f"`collate_fn` wanted to exit: {error!r}.") from error
    _check_rows(arrays, len(examples))
    return arrays


def takes_rngs(collate_fn: CollateFn) -> bool:
    """Whether `collate_fn` wants random generators."""
    code = getattr(collate_fn, "__code__", None)
    if code is not None:  # a plain function: a look at its names is cheaper than its signature
        return "rngs" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    try:
        return "rngs" in inspect.signature(collate_fn).parameters
    except ValueError:  # functions of C may have none
        return False


def _check_rows(arrays: PyTree, rows: int) -> None:
    leaves = jax.tree.leaves(arrays)
    if not leaves:
        raise ValueError("`collate_fn` returned no array. It must return a PyTree of NumPy arrays.")
    if all(_is_numeric(leaf) and leaf.shape[:1] == (rows,) for leaf in leaves):
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(arrays):
        where = jax.tree_util.keystr(path, simple=True, separator="/") or "the batch"
        if not _is_numeric(leaf):
            what = leaf.dtype if isinstance(leaf, np.ndarray) else type(leaf).__name__
            raise TypeError(
                f"`collate_fn` returned {what} at {where}. It must return a PyTree of NumPy "
                "arrays of numbers, batch dimension first."
            )
        if leaf.shape[:1] != (rows,):
            raise ValueError(
                f"`collate_fn` was given {rows} examples and returned an array of shape "
                f"{leaf.shape} at {where}. Its first dimension must be the batch: {rows} rows."
            )


def _is_numeric(leaf: Any) -> bool:
    return isinstance(leaf, ARRAYS) and leaf.dtype.kind not in "OSU"


def _alike(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Passes batches on while they have the structure and the dtypes of the first; and, where
    each process makes its own rows of them, the shapes as well."""
    first, of_first = None, None
    for batch in batches:
        found = _common(batch.arrays)
        if first is None:
            first, of_first = found, describe_batch(batch.arrays)
        if found != first:
            alone = "keys, dtypes and numbers of dimensions."
            together = (
                "keys, dtypes and shapes: each process makes rows of its own, and cannot know how "
                "long those of the others are. Pad all to one length."
            )
            raise ValueError(
                "`collate_fn` returned batches of different structure. The first had "
                f"{of_first}; another had {describe_batch(batch.arrays)}. Every batch must have "
                "the same " + (alone if jax.process_count() == 1 else together)
            )
        yield batch


def _common(arrays: PyTree) -> tuple[Any, list[tuple[Any, Any]]]:
    """What all batches of a run must have in common."""
    leaves, structure = jax.tree.flatten(arrays)
    alone = jax.process_count() == 1
    return structure, [(x.dtype, x.ndim if alone else x.shape[1:]) for x in leaves]


def describe_batch(arrays: PyTree) -> str:
    """The same in words."""
    structure, kinds = _common(arrays)
    unit = "dimensions" if jax.process_count() == 1 else "a row"
    return str(structure.unflatten([f"{dtype}, {shape} {unit}" for dtype, shape in kinds]))


def prefetch(
    make: Callable[[T], U], items: Iterable[T], *, workers: int, ahead: int = AHEAD
) -> Generator[U, None, None]:
    """`map(make, items)`, in order; in threads, `ahead` of the reader, where that is worth it."""
    items = iter(items)
    yield from _while_hidden(make, items)
    pool = ThreadPoolExecutor(workers, thread_name_prefix="redcoast-data")
    pending: deque[Any] = deque()
    errors: list[Exception] = []
    try:
        for item in _until_error(items, errors):
            pending.append(pool.submit(make, item))
            if len(pending) > ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
        if errors:
            raise errors[0]
    finally:
        # The reader may stop early; batches under way are of no use then.
        pool.shutdown(wait=False, cancel_futures=True)


def _until_error(items: Iterable[T], errors: list[Exception]) -> Iterator[T]:
    """Items up to an error, which is for later: those before it are still to be used."""
    try:
        yield from items
    except Exception as error:
        errors.append(error)


def _while_hidden(make: Callable[[T], U], items: Iterator[T]) -> Iterator[U]:
    """Makes results in this thread, until two in a row take longer than their reader does."""
    # The device works while the reader waits here, so that this costs no time as long as it is
    # the shorter part. Threads would take turns with the reader in one interpreter: handing over
    # a small batch costs more than making it.
    slow = 0
    before = perf_counter()
    for item in items:
        begin = perf_counter()
        result = make(item)
        end = perf_counter()
        slow = slow + 1 if end - begin > max(CHEAP, begin - before) else 0
        yield result
        before = end
        if slow == 2:
            return
