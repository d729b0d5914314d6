"""Sources without an index: what they give, over epochs, and after they are stopped anywhere."""

import json
import logging
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from grids import few_of
from problem import Stream, collate_fn, loss_fn, make_examples, make_model

import redcoast as rc
from redcoast.data._stack import stack_examples

EXAMPLES = make_examples(10)
KEY = jax.random.key(0)


def index_of(examples):
    return np.array([e["index"] for e in examples])


def read(source, state=None, collate=index_of, batch_size: int | None = 4, **length):
    """The batches of a source from a state on, and the states after them."""
    length = length or {"epochs": 3}
    options = {"key": KEY, "mesh": rc.make_mesh(devices=jax.devices()[:1])}
    data = rc.batches(source, collate, batch_size=batch_size, **length, **options)
    if state is not None:
        data.set_state(json.loads(json.dumps(state)))
    actual = list(data)
    return [np.asarray(x.arrays).tolist() for x in actual], actual


class Iterable:
    def __init__(self):
        self.examples = EXAMPLES

    def __iter__(self):
        return iter(self.examples)


class WithEpoch(Iterable):
    """Shuffles as it is told to by `set_epoch`."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        yield from (EXAMPLES[i] for i in np.random.default_rng(self.epoch).permutation(10))


class WithState(WithEpoch):
    """A source with a state, as Hugging Face's and torchdata's are; it counts what is read."""

    read = 0

    def __init__(self):
        self.next = self.begin = 0

    def __iter__(self):
        order = np.random.default_rng(self.epoch).permutation(10)
        self.next, self.begin = self.begin, 0
        while self.next < 10:
            self.next += 1
            WithState.read += 1
            yield EXAMPLES[order[self.next - 1]]

    def state_dict(self):
        return {"next": np.int64(self.next)}

    def load_state_dict(self, state):
        self.begin = int(state["next"])


class WithBuffer(WithState):
    """Its state has lost what was in a buffer of three, as that of a shuffle buffer has."""

    def load_state_dict(self, state):
        self.begin = min(10, int(state["next"]) + 3)


def generator():
    yield from EXAMPLES


def of_epoch(epoch):
    for i in np.random.default_rng(epoch).permutation(10):
        yield EXAMPLES[i]


SOURCES = [Iterable, WithEpoch, WithState, WithBuffer, lambda: generator, lambda: of_epoch]
FIRST = {WithEpoch, WithState, WithBuffer, SOURCES[5]}


@pytest.mark.parametrize("make", SOURCES)
def test_epochs_of_a_stream_resume_after_any_batch(make):
    whole, actual = read(make())
    flat = sum(whole, [])
    assert [sorted(flat[i : i + 10]) for i in (0, 10, 20)] == [list(range(10))] * 3
    assert [len(x) for x in whole] == [4] * 7 + [2]
    shuffled = make in FIRST
    assert (flat[:10] == list(range(10))) != shuffled
    assert (flat[:10] == flat[10:20]) != shuffled
    assert [x.step for x in actual if x.epoch_end] == [3, 5, 8]
    for k in range(8):
        assert read(make(), actual[k].state)[0] == whole[k + 1 :]


def test_steps_go_on_through_epochs():
    actual, _ = read(generator, steps=6)
    assert sum(actual, []) == [*range(10), *range(10), *range(4)]


def test_a_state_is_restored_without_reading_what_was_before():
    """And what it restores is compared with what was read: a lossy state is not used."""
    _, actual = read(WithState(), epochs=1, batch_size=2)
    WithState.read = 0
    read(WithState(), actual[3].state, epochs=1, batch_size=2)
    assert WithState.read <= 2 + 2 + 2  # the peeked batch, that before the place, and the rest


def test_a_state_that_restores_other_examples_is_said(caplog):
    whole, actual = read(WithBuffer(), epochs=1, batch_size=2)
    assert read(WithBuffer(), actual[2].state, epochs=1, batch_size=2)[0] == whole[3:]
    assert "does not restore its next examples exactly" in caplog.text


def test_an_order_that_changes_is_said(caplog):
    rng = np.random.default_rng(0)
    source = lambda: iter([EXAMPLES[i] for i in rng.permutation(10)])
    _, actual = read(source, epochs=1)
    read(source, actual[0].state, epochs=1)
    assert "gave other examples than before" in caplog.text
    with pytest.raises(ValueError, match="fewer examples in epoch 0 than the 8"):
        read(lambda: iter(EXAMPLES[:5]), actual[1].state, epochs=1)


def test_a_source_that_can_be_read_once_is_said():
    once = iter(EXAMPLES)
    with pytest.raises(ValueError, match="no examples in epoch 1: it can be read only once"):
        read(lambda: once, epochs=2)


def test_an_epoch_that_does_not_end_is_said(monkeypatch, caplog):
    """Such as that of an endless generator; a source with a length ends."""
    monkeypatch.setattr("redcoast.data._streams._LONG", 6)

    class WithLength(Iterable):
        def __len__(self):
            return 10

    def endless():
        while True:
            yield from EXAMPLES

    class EndlessDataset:
        """Such as one of TensorFlow: it has a method for its length, which is not known."""

        def __len__(self):
            raise TypeError("The dataset is infinite.")

        def __iter__(self):
            return endless()

    read(WithLength(), epochs=2)
    read(endless, steps=4)
    assert not caplog.text
    for source in (endless, EndlessDataset()):
        caplog.clear()
        data = rc.batches(source, index_of, batch_size=4, key=KEY, epochs=1, workers=0)
        for _ in range(9):
            next(data)
        assert caplog.text.count("has given 6 items in its first epoch, which has not ended") == 1

    class Repeated(Iterable):
        """What Grain's `repeat()` makes."""

        def __len__(self):
            return sys.maxsize

        def __getitem__(self, index):
            return EXAMPLES[index % 10]

    assert len(read(Repeated(), steps=2)[0]) == 2
    for source in (Repeated(), lambda epoch: Repeated()):
        with pytest.raises(ValueError, match=r"`examples(\(0\))?` is endless.*`steps`"):
            read(source, epochs=1)


def test_an_iterator_is_read_once():
    actual, _ = read((e for e in EXAMPLES), steps=2)
    assert actual == [[0, 1, 2, 3], [4, 5, 6, 7]]
    actual, batches = read(iter(EXAMPLES), steps=None)
    assert sum(actual, []) == list(range(10))
    with pytest.raises(ValueError, match="an iterator, of type zip, .*Pass a function that"):
        read(zip(EXAMPLES, EXAMPLES, strict=True), epochs=2)
    with pytest.raises(ValueError, match="cannot go back"):
        read(iter(EXAMPLES), batches[0].state, steps=3)


def test_an_error_in_a_generator_does_not_end_the_epoch():
    """A generator that has raised ends; that must not look like the end of the data."""
    failures = [KeyError("shard 3")]

    def source():
        for i, example in enumerate(EXAMPLES):
            if i == 6 and failures:
                raise failures.pop()
            yield example

    data = rc.batches(source, index_of, batch_size=4, key=KEY, epochs=1, workers=0)
    assert np.asarray(next(data).arrays).tolist() == [0, 1, 2, 3]
    with pytest.raises(KeyError):
        next(data)
    assert [np.asarray(x.arrays).tolist() for x in data] == [[4, 5, 6, 7], [8, 9]]


def test_a_generator_may_fill_one_buffer():
    def source():
        buffer = np.zeros(1, np.int32)
        for i in range(10):
            buffer[0] = i
            yield {"index": buffer}

    expected = [[[0], [1], [2], [3]], [[4], [5], [6], [7]], [[8], [9]]]
    assert read(source, epochs=1)[0] == expected
    assert read(source(), steps=None)[0] == expected


class Tensor:
    """An array of another library, which NumPy can read."""

    def __init__(self, values):
        self.values = np.asarray(values)

    def __array__(self, dtype=None, copy=None):
        return self.values

    def __getitem__(self, i):
        return Tensor(self.values[i])

    def __len__(self):
        return len(self.values)


class Loader:
    """Makes batches itself, as PyTorch's loader does: the last of an epoch is smaller."""

    dataset = EXAMPLES

    def __iter__(self):
        for i in range(0, 10, 4):
            yield {"index": Tensor(list(range(i, min(i + 4, 10))))}


def only_index(batch):
    return batch["index"]


@pytest.mark.parametrize("make", [Loader, lambda: list(Loader()), lambda: lambda: iter(Loader())])
def test_a_source_may_make_batches_itself(make):
    options = {"batch_size": None, "collate": only_index}
    whole, actual = read(make(), epochs=2, **options)
    assert whole == 2 * [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [x.rows for x in actual] == [4, 4, 2, 4, 4, 2]
    assert [x.step for x in actual if x.epoch_end] == [3, 6]
    assert read(make(), actual[3].state, epochs=2, **options)[0] == whole[4:]
    assert read(make(), steps=4, **options)[0] == whole[:4]


@pytest.mark.parametrize("collate", [None, lambda e: tuple(map(np.stack, zip(*e, strict=True)))])
def test_batches_that_are_taken_for_examples_say_what_to_pass(collate):
    """And not that `jax.vmap` is missing only, which is so for any error of shapes."""
    rows = [(np.ones((4, 3), np.float32), np.zeros(4, np.int32))] * 8

    def loss(model, batch, key):
        return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(batch[0]), batch[1])

    with pytest.raises(TypeError) as info:
        rc.evaluate(
            jax.tree_util.Partial(lambda x: x @ np.ones((4, 2), np.float32)),
            rows,
            collate_fn=collate,
            loss_fn=loss,
            batch_size=4,
        )
    note = info.value.__notes__[-1]
    assert "arrays of the batch begin with (4, 4)." in note
    assert "pass `batch_size=None`" in note
    uneven = [*rows[:3], (np.ones((2, 3), np.float32), np.zeros(2, np.int32))]
    with pytest.raises(ValueError, match="have different shapes.*`batch_size=None`"):
        stack_examples(uneven)


def test_batches_that_are_none_say_what_they_are():
    refused = {
        r"An item of `examples` at index is of type int": (EXAMPLES[:1], None),
        r"has shape \(2, 3\), and another array has 4 rows": (
            [{"a": np.zeros((4, 2)), "b": np.zeros((2, 3))}],
            None,
        ),
        r"What `collate_fn` returned has shape \(\)": ([3], np.array),
    }
    for words, (source, collate) in refused.items():
        with pytest.raises((TypeError, ValueError), match=words):
            rc.batches(source, collate, batch_size=None, key=KEY, steps=1)
    with pytest.raises(TypeError, match="of type Loader, whose items are batches.*batch_size=None"):
        read(Loader())
    with pytest.raises(ValueError, match="`collate_fn` has a parameter `rngs`"):
        rc.batches(Loader(), lambda b, rngs: b, batch_size=None, key=KEY, steps=1)


@pytest.mark.parametrize("workers", [0, 3])
def test_threads_are_an_argument(workers, monkeypatch):
    import threading

    monkeypatch.setattr("redcoast.data._loading._while_fast", lambda make, items: iter(()))
    names = set()

    def collate(examples):
        names.add(threading.current_thread().name)
        return index_of(examples)

    options = {"workers": workers, "ahead": 5}
    list(rc.batches(EXAMPLES, collate, batch_size=2, key=KEY, epochs=20, **options))
    own = {threading.current_thread().name}
    assert names == own if workers == 0 else names != own


@pytest.mark.thorough
def test_evaluation_and_prediction_of_streams():
    model, examples = make_model(), make_examples(21)
    options = {"collate_fn": collate_fn, "batch_size": 8}
    predict = {"predict_fn": lambda model, batch, key: jax.vmap(model)(batch["x"])}

    def stream():
        yield from examples

    class Batched:
        def __iter__(self):
            yield from (collate_fn(examples[i : i + 8]) for i in (0, 8, 16))

    expected = rc.evaluate(model, examples, loss_fn=loss_fn, **options)
    predicted = rc.predict_examples(model, examples, **predict, **options)
    own = {"collate_fn": None, "batch_size": None}
    for source, given in [(stream, options), (stream(), options), (Batched(), own)]:
        actual = rc.evaluate(model, source, loss_fn=loss_fn, **given)
        assert actual == pytest.approx(expected, rel=1e-5)
    for source, given in [(stream, options), (Batched(), own)]:
        actual = rc.predict_examples(model, source, **predict, **given)
        np.testing.assert_allclose(actual, predicted, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="gave no examples"):
        rc.evaluate(model, lambda: iter([]), loss_fn=loss_fn, **options)


@pytest.mark.thorough
@pytest.mark.parametrize("own", few_of([False, True], True))
def test_fit_evaluates_streams_and_resumes(own, tmp_path, caplog):
    """Evaluated at the ends of epochs whose length nobody knows; the metrics get the examples."""
    caplog.set_level(logging.ERROR)
    examples = make_examples(40)
    compared = []

    def source():
        for i in range(0, 40, 8):
            yield from ([collate_fn(examples[i : i + 8])] if own else examples[i : i + 8])

    def metric_fn(given, outputs):
        compared.append(([int(e["y"]) for e in given], len(outputs)))
        return {"right": 0.5}

    def train(epochs, directory):
        logged = []
        rc.fit(
            make_model(),
            optax.adamw(1e-2),
            source,
            collate_fn=None if own else collate_fn,
            loss_fn=loss_fn,
            batch_size=None if own else 8,
            epochs=epochs,
            evaluation=rc.Evaluation(
                source,
                predict_fn=lambda model, batch, key: jax.vmap(model)(batch["x"]),
                metric_fn=metric_fn,
            ),
            checkpoints=rc.Checkpoints(directory),
            log=[rc.progress_logger(False), lambda values, step: logged.append((step, values))],
        )
        return [(step, values) for step, values in logged if "loss" in values], logged

    whole, logged = train(3, tmp_path / "whole")
    assert [step for step, values in logged if "eval/loss" in values] == [5, 10, 15]
    assert compared[-1] == ([int(e["y"]) for e in examples], 40)
    before, _ = train(1, tmp_path / "stopped")
    after, _ = train(3, tmp_path / "stopped")
    assert [(s, v["loss"]) for s, v in before + after] == [(s, v["loss"]) for s, v in whole]


def test_a_flat_array_of_tokens_is_told_of_windows():
    tokens = np.arange(100, dtype=np.uint16)
    loss = lambda model, batch, key: jax.numpy.mean(batch[:, :-1])
    with pytest.raises(IndexError) as info:
        rc.fit(
            make_model(),
            optax.sgd(0.1),
            tokens,
            collate_fn=np.stack,
            loss_fn=loss,
            batch_size=8,
            steps=1,
            log=False,
        )
    assert "`redcoast.token_windows(tokens, length)`" in "".join(info.value.__notes__)


def test_a_table_and_a_name_are_no_examples():
    class Table:
        columns = ("x",)

        def __arrow_c_stream__(self):
            pass

        def __len__(self):
            return 3

        def __getitem__(self, i):
            return [1, 2, 3]

    class OfPandas(Table):
        def to_dict(self, kind):
            pass

    class OfArrow(Table):
        def to_pylist(self):
            pass

    class Polars(Table):
        def to_dicts(self):
            pass

    rows = {OfPandas: r"to_dict\(\"records\"\)", OfArrow: r"to_pylist\(\)", Polars: r"to_dicts\(\)"}
    for kind, method in rows.items():
        with pytest.raises(TypeError, match=rf"a {kind.__name__}, .*rows, `examples\.{method}`"):
            read(kind())
        with pytest.raises(TypeError, match=rf"have a table, .*rows, `table\.{method}`"):
            read([kind()], collate=None)
    with pytest.raises(TypeError, match="An item of `examples` is of type Table"):
        read([Table()], collate=None, batch_size=None)
    with pytest.raises(TypeError, match=r"several sets of examples.*`examples\['train'\]`"):
        read({"train": EXAMPLES, "test": EXAMPLES})
    with pytest.raises(TypeError, match=r"a dict, whose items are columns.*`tuple\(examples\."):
        read({"x": np.zeros(3), "y": [1, 2, 3]})
    with pytest.raises(TypeError, match="`examples` is a path"):
        read(Path("train.csv"))
    with pytest.raises(TypeError, match="`examples` is a string, 'wikitext'"):
        read("wikitext")
    with pytest.raises(TypeError, match=r"a set, whose order may differ.*`sorted\(examples\)`"):
        read({1, 2})
    with pytest.raises(TypeError, match="an array of one number"):
        read(np.zeros(()))


class Refusing(WithState):
    """Like Grain's `DataLoader`, it refuses states that are not of this very source."""

    def load_state_dict(self, state):
        raise ValueError("DataSource in checkpoint does not match")


def test_examples_are_skipped_if_a_source_refuses_its_state(caplog):
    whole, batches = read(Refusing(), epochs=1, batch_size=2)
    assert read(Refusing(), batches[2].state, epochs=1, batch_size=2)[0] == whole[3:]
    assert "cannot be restored, ValueError('DataSource in checkpoint" in caplog.text


def test_an_iterator_that_refuses_a_state_is_told_of_the_checkpoint():
    _, batches = read(generator, epochs=1)
    with pytest.raises(KeyError) as info:
        read(Stream(EXAMPLES), batches[0].state, steps=3)
    assert "given the state of a checkpoint. Pass the examples" in info.value.__notes__[0]
