import contextlib
import dataclasses
import functools
import itertools
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problem import Stream, collate_fn, make_examples

import redcoast as rc
from redcoast.core._iterate import with_last
from redcoast.data import _batches
from redcoast.data._loading import (
    chunks,
    ordered_batches,
    prefetch,
    stream_batches,
    training_batches,
)
from redcoast.data._sources import by_epoch
from redcoast.data._stream_state import decode_stream_state, encode_stream_state

SEED = np.array([1, 2], np.uint64)


def index_collate(examples):
    return {"index": np.array([e["index"] for e in examples])}


def train(examples, collate=index_collate, start=0, stop=20, batch_size=4):
    return training_batches(
        examples,
        collate,
        batch_size=batch_size,
        seed=SEED,
        start=start,
        stop=stop,
        mesh=rc.make_mesh(),
    )


def indices(batches):
    return [np.asarray(b.arrays["index"]).tolist() for b in batches]


def test_positions_continue_and_resume_anywhere():
    examples = make_examples(7)
    whole = indices(train(examples, stop=21))
    assert [len(i) for i in whole] == [4, 4, 4, 4, 4, 1]
    flat = sum(whole, [])
    assert all(sorted(flat[i : i + 7]) == list(range(7)) for i in (0, 7, 14))
    assert indices(train(examples, start=12, stop=21)) == whole[3:]


def test_examples_may_depend_on_the_epoch():
    def examples(epoch):
        return [{"index": 100 * epoch + i} for i in range(5)]

    flat = sum(indices(train(examples, stop=10)), [])
    assert sorted(flat) == [0, 1, 2, 3, 4, 100, 101, 102, 103, 104]
    with pytest.raises(ValueError, match=r"examples\(1\)` has 2 examples"):
        by_epoch(lambda epoch: [1] * (epoch + 1))[0](1)


def test_examples_that_are_added_while_they_are_read_are_said_to_be_left_out(caplog):
    """Such as those of a replay buffer: the order of an epoch is that of its first examples."""
    buffer = make_examples(8)
    key = jax.random.key(0)
    data = rc.batches(buffer, index_collate, batch_size=4, key=key, steps=6, workers=0)
    read: set[int] = set()
    for batch in data:
        if batch.step == 1:
            assert not caplog.text
        buffer.append({"index": 100 + batch.step})
        read.update(np.asarray(batch.arrays["index"]).tolist())
    assert read == set(range(8))
    assert caplog.text.count("had 8 entries when the run began and have 9 now") == 1

    def sample():
        while True:
            yield buffer[-1]

    data = rc.batches(sample, index_collate, batch_size=4, key=key, steps=1)
    assert np.asarray(next(data).arrays["index"]).tolist() == [106] * 4


@pytest.mark.parametrize("examples", [[], np.zeros((0, 3)), lambda epoch: []])
def test_no_examples(examples):
    with pytest.raises(ValueError, match="empty"):
        by_epoch(examples)


def test_invalid_examples_raise():
    with pytest.raises(TypeError, match="of type int"):
        by_epoch(3)
    with pytest.raises(TypeError, match="columns"):
        by_epoch({"x": np.zeros(3), "y": np.zeros(3)})


def test_each_example_has_its_own_generator():
    def collate(examples, rngs):
        noise = [rng.random() for rng in rngs]
        return {"index": np.array([e["index"] for e in examples]), "noise": np.array(noise)}

    def noise(batches):
        return {
            int(i): float(x)
            for b in batches
            for i, x in zip(b.arrays["index"], b.arrays["noise"], strict=True)
        }

    examples = make_examples(12)
    small = noise(train(examples, collate, stop=12, batch_size=3))
    large = noise(train(examples, collate, stop=12, batch_size=6))
    assert small == large
    assert len(set(small.values())) == 12


@pytest.mark.parametrize("length", range(1, 40))
def test_chunks_cover_every_example_once(length):
    bounds = list(chunks(length, 16, 8))
    assert [i for a, b in bounds for i in range(a, b)] == list(range(length))
    # Either sharded over all devices, or no larger than a device's share of a batch.
    assert all((b - a) % 8 == 0 or b - a <= 2 for a, b in bounds)


def test_ordered_batches_do_not_augment():
    def collate(examples, rngs):
        assert rngs is None
        return index_collate(examples)

    batches = ordered_batches(make_examples(21), collate, batch_size=8, mesh=rc.make_mesh())
    assert sum(indices(batches), []) == list(range(21))


@pytest.mark.parametrize(
    ("collate", "error", "words"),
    [
        (lambda e: {"a": {"b": np.zeros((3, 2))}}, ValueError, r"4 examples.*\(3, 2\) at a/b"),
        (lambda e: {"a": np.zeros(())}, ValueError, "first dimension"),
        (lambda e: {"a": 1.0}, TypeError, "float at a"),
        (lambda e: {"a": np.array(["x"] * 4)}, TypeError, "<U1 at a"),
        (lambda e: {}, ValueError, "no array"),
    ],
)
def test_collate_fn_must_return_a_batch(collate, error, words):
    with pytest.raises(error, match=words):
        next(train(make_examples(7), collate))


@pytest.mark.parametrize(
    "second",
    [
        lambda n: {"a": np.zeros(n, np.int32)},
        lambda n: {"b": np.zeros(n)},
        lambda n: {"a": np.zeros((n, 1))},
    ],
)
def test_structure_must_not_change(second):
    calls = []

    def collate(examples):
        calls.append(1)
        return {"a": np.zeros(4)} if len(calls) == 1 else second(4)

    batches = train(make_examples(7), collate)
    next(batches)
    with pytest.raises(ValueError, match="different structure"):
        list(batches)


def test_errors_of_collate_fn_name_the_examples():
    def collate(examples):
        if any(e["index"] == 3 for e in examples):
            raise KeyError("text")
        return index_collate(examples)

    with pytest.raises(KeyError) as info:
        list(train(make_examples(7), collate))
    note, given = info.value.__notes__
    assert "3" in note
    assert "indices" in note
    assert given.startswith("The first of the examples is ")
    assert any(entry.name == "collate" for entry in info.traceback)


def test_datasets_may_fetch_many_at_once():
    class Dataset(list):
        def __getitems__(self, wanted):
            return [{"index": 1000 + i} for i in wanted]

    flat = sum(indices(train(Dataset(make_examples(4)), stop=4)), [])
    assert sorted(flat) == [1000, 1001, 1002, 1003]


class Clock:
    """A clock that advances only when a test sets it."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("redcoast.data._loading.perf_counter", clock)
    return clock


def wait_until(condition):
    deadline = time.monotonic() + 300
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_prefetch_keeps_the_order_and_runs_ahead(clock):
    made = []

    def make(i):
        clock.now += 0.02
        time.sleep(0.03 if i == 5 else 0)
        made.append(i)
        return i

    results = prefetch(make, range(20), workers=3, ahead=4)
    assert [next(results) for _ in range(4)] == [0, 1, 2, 3]
    assert wait_until(lambda: len(made) == 8)
    time.sleep(0.05)
    assert sorted(made) == list(range(8))
    assert list(results) == list(range(4, 20))


def test_prefetch_uses_no_threads_while_results_are_fast(clock):
    def make(i):
        clock.now += 0.02
        return threading.current_thread().name

    here = threading.current_thread().name
    results = prefetch(make, range(40), workers=2)
    for _ in range(30):
        assert next(results) == here
        clock.now += 0.04  # a reader that takes longer than `make`
    rest = list(results)  # and a reader that takes less time
    assert here not in rest[3:]


def test_prefetch_uses_no_threads_for_cheap_results(clock):
    names = prefetch(lambda i: threading.current_thread().name, range(50), workers=2)
    assert set(names) == {threading.current_thread().name}


def test_prefetch_uses_no_threads_after_delays_that_are_rare(clock):
    """Such as of a busy machine, in two batches one after the other."""

    def make(i):
        clock.now += 0.008 if i % 200 in (100, 101) else 0.0001
        return threading.current_thread().name

    assert set(prefetch(make, range(1000), workers=2)) == {threading.current_thread().name}


def test_prefetch_stops_with_its_reader(clock):
    def workers():
        return [t for t in threading.enumerate() if t.name.startswith("redcoast-data")]

    def make(i):
        clock.now += 0.02

    results = prefetch(make, range(1000), workers=2)
    for _ in range(4):
        next(results)
    started = workers()
    assert started
    results.close()
    assert wait_until(lambda: not any(thread.is_alive() for thread in started))


def test_with_last():
    assert list(with_last("abc")) == [("a", False), ("b", False), ("c", True)]
    assert list(with_last("")) == []


def stream(source, start=0, stop=None):
    return stream_batches(
        source,
        index_collate,
        batch_size=4,
        seed=SEED,
        start=start,
        stop=stop,
        mesh=rc.make_mesh(),
    )


def test_a_stream_ends_with_a_short_batch_and_resumes_from_its_state():
    batches = list(stream(Stream(make_examples(10))))
    assert indices(batches) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    again = Stream(make_examples(10))
    again.set_state(decode_stream_state(batches[0].stream))
    assert indices(stream(again, start=4)) == [[4, 5, 6, 7], [8, 9]]
    assert indices(stream(Stream(make_examples(10)), stop=6)) == [[0, 1, 2, 3], [4, 5]]


def test_a_grain_iterator():
    grain = pytest.importorskip("grain")
    source = grain.MapDataset.source(make_examples(10)).seed(3).shuffle().to_iter_dataset()
    batches = list(stream(iter(source)))
    assert sorted(sum(indices(batches), [])) == list(range(10))
    again = iter(source)
    again.set_state(decode_stream_state(batches[1].stream))
    assert indices(stream(again, start=8)) == indices(batches)[2:]


@pytest.mark.parametrize("state", [{"a": [1]}, b"\x00\xff"])
def test_stream_states_are_json(state):
    import json

    assert decode_stream_state(json.loads(json.dumps(encode_stream_state(state)))) == state


def test_batches_are_split_over_the_devices():
    (batch,) = train(make_examples(8), collate_fn, stop=8, batch_size=8)
    assert len(batch.arrays["x"].sharding.device_set) == 8
    assert batch.arrays["x"].addressable_shards[0].data.shape == (1, 16)


def test_jax_arrays_are_split_too():
    def collate(examples):
        return {name: jnp.asarray(x) for name, x in collate_fn(examples).items()}

    (batch,) = train(make_examples(8), collate, stop=8, batch_size=8)
    assert batch.arrays["x"].addressable_shards[0].data.shape == (1, 16)


def test_collate_fn_may_be_any_callable():
    @dataclasses.dataclass
    class Collate:
        names: list[str]

        def __call__(self, examples, *, rngs=None):
            assert rngs is not None
            return {name: np.stack([e[name] for e in examples]) for name in self.names}

    (batch,) = train(make_examples(8), Collate(["x"]), stop=8, batch_size=8)
    assert batch.arrays["x"].shape == (8, 16)
    (batch,) = train(list(np.arange(8)), np.array, stop=8, batch_size=8)
    assert batch.arrays.shape == (8,)


def test_a_batch_may_be_a_list_of_arrays_as_long_as_the_batch():
    as_list = lambda examples: [index_collate(examples)["index"], np.ones((len(examples), 3))]
    actual = [
        [x.shape for x in batch.arrays] for batch in train(make_examples(8), as_list, stop=10)
    ]
    assert actual == [[(4,), (4, 3)], [(4,), (4, 3)], [(2,), (2, 3)]]
    with pytest.raises(TypeError, match="returned a list of 4 entries"):
        next(train(make_examples(8), lambda examples: [e["index"] for e in examples]))


def test_a_decorated_collate_fn_gets_rngs():
    given = []

    def collate(examples, rngs=None):
        given.append(rngs)
        return index_collate(examples)

    @functools.wraps(collate)
    def decorated(*args, **kwargs):
        return collate(*args, **kwargs)

    next(train(make_examples(8), decorated))
    assert len(given[0]) == 4


def test_batches_that_end_early_are_an_error(monkeypatch):
    """A run must not look finished because its loader has stopped."""
    whole = training_batches

    def ends_early(*args, **options):
        batches = whole(*args, **options)
        with contextlib.closing(batches):
            yield from itertools.islice(batches, 2)

    monkeypatch.setattr(_batches, "training_batches", ends_early)
    examples = np.arange(32.0, dtype=np.float32)
    data = rc.batches(examples, np.stack, batch_size=8, key=jax.random.key(0), steps=4)
    with pytest.raises(RuntimeError, match="ended after 16 of the 32 examples .* of 4"):
        list(data)
    data.close()


LEFT_OPEN = """
import itertools, time
import jax, numpy as np, redcoast as rc

examples = list(np.zeros((64, 4), np.float32))
slow = lambda rows: time.sleep(0.02) or np.stack(rows)  # so that threads make the batches
options = {"batch_size": 4, "key": jax.random.key(0), "steps": 64}
indexed = rc.batches(examples, slow, **options)
stream = rc.batches(lambda: iter(examples), slow, **options)
for data in (indexed, stream):
    assert [batch.step for batch in itertools.islice(data, 8)] == list(range(1, 9))
"""


@pytest.mark.integration
def test_a_process_that_ends_while_batches_are_open_prints_nothing():
    """The threads are stopped before the modules that they need are gone."""
    ended = subprocess.run([sys.executable, "-c", LEFT_OPEN], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
