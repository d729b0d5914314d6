"""Functions of the user may write into what they returned before, at any time."""

import gc
import itertools
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problem import Stream

import redcoast as rc
from redcoast.core._owned import held_elsewhere
from redcoast.data import _collate

ROWS, WIDTH, STEPS = 8, 16, 6
DATA = np.random.default_rng(0).normal(size=(ROWS * STEPS, WIDTH)).astype(np.float32)
MESHES = {"1 device": 1, "8 devices": 8}
KEY = jax.random.key(0)


def aligned():
    """A buffer that JAX uses as it is, where it can."""
    memory = np.empty(ROWS * WIDTH * 4 + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + ROWS * WIDTH * 4].view(np.float32).reshape(ROWS, WIDTH)


def collate_into(buffer, result=lambda x: x, slow=0.0):
    def collate_fn(examples):
        for i, example in enumerate(examples):
            buffer[i] = example
            time.sleep(slow / len(examples))
        return result(buffer[: len(examples)])

    return collate_fn


def reused_dict():
    batch = {}

    def collate_fn(examples):
        batch["x"] = np.stack(examples)
        return batch

    return collate_fn


def generator():
    def batches():
        examples = yield
        while True:
            batch = np.stack(examples)
            examples = yield batch
            batch[:] = -1

    running = batches()
    next(running)
    return running.send


COLLATES = {
    "a buffer": lambda: collate_into(np.empty((ROWS, WIDTH), np.float32)),
    "aligned memory": lambda: collate_into(aligned()),
    "a list of views": lambda: collate_into(aligned(), lambda x: [x[:, :4], {"rest": x[:, 4:]}]),
    "a JAX array": lambda: collate_into(aligned(), jnp.asarray),
    "a memory map": lambda: collate_into(
        np.frombuffer(bytearray(ROWS * WIDTH * 4), np.float32).reshape(ROWS, WIDTH)
    ),
    "a dict": reused_dict,
    "a generator": generator,
}


def joined(batch):
    leaves = jax.tree.leaves(batch)
    return np.concatenate([np.asarray(x) for x in leaves], axis=-1)


def batches(collate_fn, examples: Any = DATA, devices=1, **options):
    mesh = rc.make_mesh(devices=jax.devices()[:devices])
    settings = {"batch_size": ROWS, "key": KEY, "steps": STEPS, "mesh": mesh} | options
    return [joined(batch.arrays) for batch in rc.batches(examples, collate_fn, **settings)]


@pytest.fixture
def in_threads(monkeypatch):
    """Batches are made in threads after the first two."""
    fast = lambda make, items: map(make, itertools.islice(items, 2))
    monkeypatch.setattr("redcoast.data._loading._while_fast", fast)


@pytest.mark.parametrize("devices", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("collate_fn", COLLATES.values(), ids=COLLATES)
def test_a_batch_stays_when_collate_fn_is_called_again(collate_fn, devices):
    np.testing.assert_array_equal(
        batches(collate_fn(), devices=devices), batches(np.stack, devices=devices)
    )


def test_threads_do_not_fill_one_buffer_at_once(in_threads):
    # While the evaluation of a step is computed, training batches are made.
    collate_fn = collate_into(aligned(), slow=2e-3)
    mesh = rc.make_mesh(devices=jax.devices()[:1])
    mean = lambda model, batch, key: jnp.mean(batch["x"] if isinstance(batch, dict) else batch)
    options = {"loss_fn": mean, "batch_size": ROWS, "mesh": mesh}
    want = rc.evaluate({}, DATA, collate_fn=np.stack, **options)
    data = rc.batches(DATA, collate_fn, batch_size=ROWS, key=KEY, steps=STEPS, mesh=mesh)
    actual = []
    for batch in data:
        actual.append(np.asarray(batch.arrays))
        assert rc.evaluate({}, DATA, collate_fn=collate_fn, **options) == want
    np.testing.assert_array_equal(actual, batches(np.stack))


def test_fresh_arrays_are_neither_copied_nor_made_in_turn(in_threads, monkeypatch):
    copies, together = [], threading.Barrier(2)
    monkeypatch.setattr(_collate, "copied", copies.append)
    calls = itertools.count()

    def collate_fn(examples):
        if next(calls) in (2, 3):  # two calls in threads wait for each other
            together.wait(timeout=300)
        tokens = np.stack(examples)
        return {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}

    assert len(batches(collate_fn)) == STEPS
    assert not copies


def test_a_collate_fn_may_load_batches_itself(in_threads):
    # Its buffer is filled in turn, and so is that of the batches that it loads in threads.
    inner, outer = collate_into(aligned()), collate_into(aligned())

    def collate_fn(examples):
        return outer(np.concatenate(batches(inner, examples, batch_size=1, steps=len(examples))))

    actual = np.concatenate(batches(collate_fn))
    assert sorted(actual[:, 0].tolist()) == sorted(DATA[:, 0].tolist())


class Reader:
    """A dataset that reads each example into the same memory."""

    def __init__(self):
        self.example = {"x": np.empty(WIDTH, np.float32), "name": ""}

    def __len__(self):
        return len(DATA)

    def __getitem__(self, i):
        self.example["x"][:] = DATA[i]
        self.example["name"] = str(i)
        return self.example


class BlockReader(Reader):
    """The same, for several examples at once."""

    def __init__(self):
        self.block = np.empty((len(DATA), WIDTH), np.float32)

    def __getitems__(self, indices):
        self.block[: len(indices)] = DATA[indices]
        return [{"x": x, "name": str(i)} for i, x in zip(indices, self.block, strict=False)]


def named(examples):
    time.sleep(1e-3)
    names = [int(example["name"]) for example in examples]
    return np.concatenate([np.stack([e["x"] for e in examples]), DATA[names]], axis=-1)


@pytest.mark.parametrize("batch_size", [1, ROWS])
@pytest.mark.parametrize("dataset", [Reader, BlockReader])
def test_an_example_stays_when_the_next_is_read(dataset, batch_size, in_threads):
    actual = batches(named, dataset(), batch_size=batch_size)
    want = batches(np.stack, batch_size=batch_size)
    np.testing.assert_array_equal(actual, np.concatenate([want, want], axis=-1))


def test_a_stream_may_give_one_dict_again_and_again(in_threads):
    reader = Reader()
    actual = batches(named, Stream(reader), steps=None)
    np.testing.assert_array_equal(np.concatenate(actual), np.concatenate([DATA, DATA], axis=-1))


class Slots:
    """A dataset that augments each example in a place of its own, in which it stays until it is
    read again."""

    def __init__(self):
        self.memory = np.empty_like(DATA)
        self.reads = np.zeros(len(DATA), int)

    def __len__(self):
        return len(DATA)

    def __getitem__(self, i):
        return self.read(i, place=i)

    def read(self, i, place):
        self.memory[place] = DATA[i] + 100 * self.reads[i]
        self.reads[i] += 1
        return self.memory[place]


class SlotsTogether(Slots):
    def __getitems__(self, indices):
        return [self.read(i, place=i) for i in indices]


class SlotsFromTheFirst(Slots):
    def __getitems__(self, indices):
        return [self.read(i, place=place) for place, i in enumerate(indices)]


SLOTS = [Slots, SlotsTogether, SlotsFromTheFirst]


@pytest.fixture(scope="module")
def no_other_loops():
    """Ends the loops of other tests, which may still make batches in threads."""
    gc.collect()


@pytest.mark.few("Slots")
@pytest.mark.parametrize("dataset", SLOTS)
def test_views_of_a_place_for_each_example_are_not_copied(no_other_loops, dataset, monkeypatch):
    copies = []
    monkeypatch.setattr("redcoast.data._sources.copied", copies.append)
    actual = batches(lambda examples: np.stack(examples), dataset())
    np.testing.assert_array_equal(actual, batches(np.stack))
    assert not copies


@pytest.mark.parametrize("dataset", SLOTS)
def test_an_example_stays_when_the_next_epoch_is_read(dataset):
    # A batch of 20 of the 48 examples spans epochs, and has some examples of both.
    settings = {"steps": None, "epochs": 5, "batch_size": 20}
    actual = np.concatenate(batches(lambda examples: np.stack(examples), dataset(), **settings))
    want = np.concatenate(batches(np.stack, **settings))
    added = np.repeat(100 * np.arange(5, dtype=np.float32), len(DATA))[:, None]
    np.testing.assert_array_equal(actual, want + added)


def test_a_later_batch_may_be_the_first_of_a_reused_buffer():
    buffer, calls = np.empty((ROWS, WIDTH), np.float32), itertools.count()

    def collate_fn(examples):
        if next(calls) < 3:
            return np.stack(examples)
        np.stack(examples, out=buffer)
        return buffer

    np.testing.assert_array_equal(batches(collate_fn), batches(np.stack))


class Shuffled(list):
    def set_epoch(self, epoch):
        self[:] = [1000 * epoch + i for i in range(12)]
        return self


def test_a_function_of_the_epoch_may_return_one_object(in_threads):
    # A batch of 8 spans epochs of 12, and threads read other epochs at the same time.
    def collate_fn(examples):
        time.sleep(1e-3)
        return np.array(examples)[:, None]

    actual = batches(collate_fn, Shuffled().set_epoch, steps=None, epochs=8)
    of_epochs = np.concatenate(actual).ravel().reshape(8, 12)
    want = [[1000 * epoch + i for i in range(12)] for epoch in range(8)]
    np.testing.assert_array_equal(np.sort(of_epochs, axis=1), want)


def test_outputs_stay_when_output_fn_is_called_again():
    buffer, entry = np.empty((ROWS, WIDTH), np.float32), {}

    def into_buffer(predictions):
        buffer[: len(predictions)] = predictions
        return list(buffer[: len(predictions)])

    def into_dict(predictions):
        entry["rows"] = [predictions.copy()]
        return [entry] * len(predictions)

    predict_fn = lambda model, batch, key: batch
    options = {"collate_fn": np.stack, "predict_fn": predict_fn, "batch_size": ROWS}
    actual = rc.predict_examples({}, DATA, output_fn=into_buffer, **options)
    np.testing.assert_array_equal(actual, DATA)
    actual = rc.predict_examples({}, DATA, output_fn=into_dict, **options)
    np.testing.assert_array_equal(actual[0]["rows"][0], DATA[:ROWS])
    # What is made for each call, and the predictions themselves, are not copied.
    rows = np.zeros((3, 2))
    assert held_elsewhere([rows[0], rows[1]], known=[rows]) == [False, False]


KEPT, KEPT_DICT = np.zeros((4, 4)), {"x": 1}
REFERENCES = {
    "a new array": (lambda: [np.zeros(4)], [False]),
    "views of one new array": (lambda: np.split(np.zeros((4, 4)), 2), [False, False]),
    "one array twice": (lambda: [np.zeros(4)] * 2, [False, False]),
    "views of a kept array": (lambda: [KEPT[0], KEPT[1:], np.zeros(4)], [True, True, False]),
    "dicts": (lambda: [KEPT_DICT, {"x": np.zeros(4)}, {"x": KEPT}], [True, False, True]),
    "a tuple": (lambda: [(np.zeros(4), [KEPT]), (np.zeros(4), [1, 2])], [True, False]),
    "memory that is not NumPy's": (lambda: [np.frombuffer(bytearray(8), np.uint8)], [True]),
    "what cannot be written": (lambda: ["text", 3, None, ()], [False] * 4),
}


@pytest.mark.parametrize(("make", "want"), REFERENCES.values(), ids=REFERENCES)
def test_what_others_refer_to(make, want):
    actual = held_elsewhere(make())  # pytest keeps what an `assert` computes
    assert actual == want
