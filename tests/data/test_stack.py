"""The default `collate_fn`, and arrays as examples."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redcoast as rc
from redcoast.data._columns import Columns, as_columns
from redcoast.data._sources import by_epoch, fetch
from redcoast.data._stack import stack_examples


class Pair(NamedTuple):
    left: np.ndarray
    right: Any


EXAMPLES = {
    "arrays": ([np.arange(3), np.arange(3, 6)], np.arange(6).reshape(2, 3)),
    "numbers": ([1, 2], np.array([1, 2])),
    "booleans": ([True, False], np.array([True, False])),
    "tuples": ([(np.zeros(2), 1), (np.ones(2), 2)], (np.array([[0, 0], [1, 1.0]]), [1, 2])),
    "dicts": ([{"x": [1, 2], "y": 3}, {"x": [4, 5], "y": 6}], {"x": [[1, 2], [4, 5]], "y": [3, 6]}),
    "named": ([Pair(np.zeros(1), 1.5)] * 2, Pair(np.zeros((2, 1)), np.array([1.5, 1.5]))),
    "matrices": ([[[1, 2], [3, 4]]] * 2, [[[1, 2], [3, 4]]] * 2),
    "JAX arrays": ([jnp.ones(2), jnp.zeros(2)], np.array([[1, 1], [0, 0.0]])),
    "lists of arrays": ([[np.zeros(1), np.ones(1)]] * 2, [np.zeros((2, 1)), np.ones((2, 1))]),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_stacked_leaf_by_leaf(name):
    examples, wanted = EXAMPLES[name]
    actual = stack_examples(examples)
    is_plain = lambda x: isinstance(x, list) and not isinstance(x[0], np.ndarray)
    for x, y in zip(
        jax.tree.leaves(actual), jax.tree.leaves(wanted, is_leaf=is_plain), strict=True
    ):
        assert isinstance(x, np.ndarray)
        np.testing.assert_array_equal(x, np.asarray(y))
    if isinstance(wanted, tuple | dict):
        assert type(actual) is type(wanted)


BAD = {
    "other keys": ([{"x": 1}, {"y": 1}], ValueError, "different structures: the first is .*'x'"),
    "columns": ([{"x": np.ones(3)}, np.ones(3)], ValueError, "If `examples` are columns, pass a"),
    "missing": ([{"x": 1, "y": None}, {"x": 1, "y": 2}], ValueError, "different structures"),
    "shapes": ([(1, np.zeros(2)), (1, np.zeros(3))], ValueError, r"at example\[1\] have .*\(2,\)"),
    "ragged": ([{"x": [1, 2]}, {"x": [1]}], ValueError, "at x have different shapes.*padding"),
    "nested ragged": ([[[1, 2], [1]]], ValueError, "list at their root that is not an array"),
    "text": ([({"a": "b"},)], TypeError, r'have str at example\[0\]\["a"\].*Pass a `collate_fn`'),
    "fields": ([np.zeros(3, [("x", "f4")])[0]], TypeError, r"fields one by one, such as `tuple\("),
    "objects": ([{"x": object()}], TypeError, "have object at x"),
    "dates": ([np.array(["2020-01-01"], "M8[D]")], TypeError, r"datetime64\[D\] at their root"),
}


@pytest.mark.parametrize("name", BAD)
def test_examples_that_cannot_be_stacked_are_refused(name):
    examples, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        stack_examples(examples)


@pytest.mark.parametrize("of_function", [False, True])
def test_rows_of_a_tuple_of_arrays_are_examples(of_function):
    """A function may return a tuple of arrays, whose rows are the examples of its epoch."""
    x, y = np.arange(12.0).reshape(6, 2), jnp.arange(6)
    examples, length = by_epoch((lambda epoch: (x, y)) if of_function else (x, y))
    assert length == 6
    assert examples(1)[0][1] == 0
    rows = fetch(examples(0), [4, 1])
    assert [(row.tolist(), int(label)) for row, label in rows] == [([8, 9], 4), ([2, 3], 1)]
    assert isinstance(by_epoch((x,))[0](0), Columns)
    assert as_columns(({"x": 1}, {"x": 2}), "examples") is None  # examples


def test_tuples_of_arrays_that_may_be_examples_are_refused():
    for examples in ((np.zeros((3, 2)), np.zeros(4)), (np.zeros(3), np.array(1.0))):
        with pytest.raises(ValueError, match=r"different first dimensions.*list\(zip\(\*train\)\)"):
            by_epoch(examples, name="train")
    with pytest.raises(ValueError, match="one shape, .*columns or examples"):
        by_epoch((np.zeros(3), np.zeros(3)))


@pytest.mark.thorough
def test_arrays_train_evaluate_and_predict_without_a_collate_fn():
    x = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    y = x.sum(1)
    model = eqx.nn.Linear(3, "scalar", key=jax.random.key(0))
    mesh = rc.make_mesh(devices=jax.devices()[:1])

    def loss_fn(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    predict_fn = lambda model, batch, key: jax.vmap(model)(batch[0])
    labels = lambda rows: np.array([label for _, label in rows])
    errors = lambda rows, outputs: {"worst": np.max(np.abs(labels(rows) - np.array(outputs)))}
    evaluation = rc.Evaluation((x, y), predict_fn=predict_fn, metric_fn=errors)
    options: Any = {"batch_size": 8, "mesh": mesh}
    train: Any = {
        "loss_fn": loss_fn,
        "log": False,
        "epochs": 3,
        "evaluation": evaluation,
        **options,
    }
    by_hand = [(np.asarray(a), np.asarray(b)) for a, b in zip(x, y, strict=True)]
    collate_fn = lambda rows: (np.stack([a for a, _ in rows]), np.stack([b for _, b in rows]))
    state = rc.fit(model, optax.sgd(0.1), (x, y), **train)
    other = rc.fit(model, optax.sgd(0.1), by_hand, collate_fn=collate_fn, **train)
    np.testing.assert_array_equal(state.model.weight, other.model.weight)
    metrics = rc.evaluate(state.model, (x, y), loss_fn=loss_fn, **options)
    actual = rc.predict_examples(state.model, (x, y), predict_fn=predict_fn, **options)
    assert metrics["loss"] == pytest.approx(np.mean((np.array(actual) - y) ** 2), rel=1e-4)
    data = rc.batches((x, y), batch_size=8, key=jax.random.key(0), mesh=mesh, steps=1)
    assert [part.shape for part in next(data).arrays] == [(8, 3), (8,)]


def test_a_tuple_of_arrays_without_rows_is_empty():
    """Its arrays are not the examples."""
    with pytest.raises(ValueError, match="`examples` is empty"):
        by_epoch((np.zeros((0, 3)), np.zeros(0)))


class WithoutLength:
    """An array as that of zarr and TensorStore: it has a shape, and no length."""

    def __init__(self, values):
        self.values, self.shape, self.dtype = values, values.shape, values.dtype

    def __getitem__(self, index):
        return self.values[index]


class Labelled(WithoutLength):
    """A column of pandas that was filtered: its items are found by their labels."""

    iloc, __arrow_c_stream__ = object(), object()
    __len__ = lambda self: self.shape[0]
    to_numpy = lambda self: self.values

    def __getitem__(self, index):
        raise KeyError(index)


@pytest.mark.parametrize("kind", [WithoutLength, Labelled])
def test_rows_of_arrays_are_found_by_their_places(kind):
    x, y = np.arange(12.0).reshape(6, 2), np.arange(6)
    key = jax.random.key(0)
    for source, expected in [(kind(x), x), ((kind(x), kind(y)), (x, y)), (lambda: kind(x), x)]:
        data = rc.batches(source, batch_size=6, key=key, epochs=1, workers=0)
        order, _ = data.examples_of(next(rc.batches(y, batch_size=6, key=key, epochs=1)))
        (batch,) = data
        rows = jax.tree.leaves(batch.arrays)
        for array, column in zip(rows, jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(array, column[order])


class OfArrow:
    """A column of Arrow, whose items are scalars of Arrow."""

    __arrow_c_array__ = None
    __len__ = lambda self: 2
    __getitem__ = lambda self, index: index
    to_numpy = None


class Unreadable(WithoutLength):
    def __init__(self, values):
        super().__init__(values)
        self.dtype = "torch.bfloat16"

    def __array__(self, dtype=None, copy=None):
        raise TypeError("Got unsupported ScalarType BFloat16")


REFUSED = {
    "a class": (OfArrow, TypeError, r"the class OfArrow. Pass an object of it.*OfArrow\(\.\.\.\)"),
    "Arrow": (OfArrow(), TypeError, r"`examples\.to_numpy\(zero_copy_only=False\)`"),
    "tuple": ((OfArrow(), OfArrow()), TypeError, r"`examples\[0\]\.to_numpy"),
    "none": ([None] * 2, ValueError, r"Number 0 of this batch is `None`.*to_iter_dataset\(\)"),
    "columns": (
        [np.zeros((2, 3)), np.zeros(2)],
        ValueError,
        r"tuple of arrays, such as `\(x, y\)`",
    ),
    "two arguments": (lambda a, b: [], TypeError, r"other arguments, `\(a, b\)`.*partial"),
    "bfloat16": ([Unreadable(np.zeros(2))] * 2, TypeError, r"NumPy cannot read.*`x\.float\(\)`"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_sources_that_are_no_examples_say_what_to_pass(name):
    source, kind, words = REFUSED[name]
    with pytest.raises(kind, match=words):
        next(rc.batches(source, batch_size=2, key=jax.random.key(0), steps=1))


def test_a_function_may_take_the_epoch_by_its_name():
    epochs = []

    def of_epoch(*, epoch):
        epochs.append(epoch)
        return [epoch, epoch]

    data = rc.batches(of_epoch, batch_size=2, key=jax.random.key(0), epochs=2, workers=0)
    assert [np.asarray(batch.arrays).tolist() for batch in data] == [[0, 0], [1, 1]]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_end_that_a_function_raises_is_no_end_of_the_data(workers):
    def collate_fn(examples):
        return next(iter(()))

    data = rc.batches(
        lambda: iter([1, 2]), collate_fn, batch_size=1, key=jax.random.key(0), epochs=1,
        workers=workers,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="StopIteration"):
        next(data)
