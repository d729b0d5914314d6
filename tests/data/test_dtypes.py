"""What a batch may hold: numbers that JAX can represent, big-endian ones, and typed keys."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from random_models import random_model

import redcoast as rc
from redcoast.core._dtypes import to_jax_dtype, tree_to_jax_dtypes
from redcoast.models import Llama, LlamaConfig

X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
KEY, SGD = jax.random.key(0), optax.sgd(0.1)
LARGE = np.full(16, 2**40 + 7)


def init_fn(key):
    return {"w": jnp.eye(4)}


def loss_fn(model, batch, key):
    return jnp.mean((batch["x"] @ model["w"] - 1) ** 2)


def predict_fn(model, batch, key):
    return batch["x"] @ model["w"]


def collate_with(extra):
    return lambda examples: {"x": np.stack(examples), "id": extra[: len(examples)]}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (LARGE, r"int64 and the value 1099511627783, which int32 cannot"),
        (-LARGE, r"int64 and the value -1099511627783, which int32 cannot"),
        (LARGE.astype(np.uint64), "uint64 and the value 1099511627783, which uint32 cannot"),
        (LARGE.astype(">i8"), "int64 and the value 1099511627783"),
        (np.full(16, 1e300), r"float64 and the value 1e\+300, which float32 cannot"),
        (np.full(16, 1e300j), "complex64 cannot"),
    ],
)
def test_numbers_that_would_change_are_refused(values, words):
    data = rc.batches(X, collate_with(values), batch_size=8, key=KEY, steps=2)
    with pytest.raises(ValueError, match=f"at id of what `collate_fn` returned .*{words}"):
        next(data)


def step_of(model):
    state = rc.init_state(lambda key: model, SGD, key=KEY)
    step = ft.partial(rc.train_step, loss_fn=loss_fn, optimizer=SGD)
    return state, rc.compile_step(step, rc.infer_shardings(state, rc.make_mesh()))


def take_step(batch):
    state, step = step_of(init_fn(KEY))
    return step(state, batch)


BATCH = {"x": X, "id": LARGE}
LOOP = {"collate_fn": lambda examples: {"x": np.stack(examples)}, "batch_size": 8}
PLACES = {
    "train_step": (
        lambda: rc.train_step(step_of(init_fn(KEY))[0], BATCH, loss_fn=loss_fn, optimizer=SGD),
        "at id of the batch",
    ),
    "predict": (
        lambda: rc.predict(init_fn(KEY), BATCH, predict_fn=predict_fn),
        "at id of the batch",
    ),
    "a compiled step": (
        lambda: take_step(BATCH),
        "at 0/id of the arguments",
    ),
    "a number": (
        lambda: take_step(BATCH | {"id": LARGE[0]}),
        "at 0/id of the arguments",
    ),
    "prepare": (
        lambda: rc.prepare(init_fn, SGD, loss_fn, BATCH, key=KEY),
        "at id of the batch",
    ),
    "init_fn": (lambda: step_of(init_fn(KEY) | {"id": LARGE}), "at id of the model"),
    "a model": (
        lambda: rc.fit({"w": jnp.eye(4), "id": LARGE}, SGD, X, loss_fn=loss_fn, steps=1, **LOOP),
        "at id of the model",
    ),
    "an evaluated model": (
        lambda: rc.evaluate(init_fn(KEY) | {"id": LARGE}, X, loss_fn=loss_fn, **LOOP),
        "at id of the model",
    ),
}


@pytest.mark.parametrize(("call", "words"), PLACES.values(), ids=PLACES)
def test_they_are_refused_wherever_arrays_of_numpy_come_in(call, words):
    with pytest.raises(ValueError, match=f"{words}.* the value 1099511627783, which int32 cannot"):
        call()


class Tensor:
    """Such as one of PyTorch or TensorFlow, which is compared element by element."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return np.array(self.array, dtype)

    def __eq__(self, other):
        return self.array == np.asarray(other)

    def __hash__(self):
        return id(self)


TENSORS = {
    "train_step": lambda batch: rc.train_step(
        step_of(init_fn(KEY))[0], batch, loss_fn=loss_fn, optimizer=SGD
    ),
    "predict": lambda batch: rc.predict(init_fn(KEY), batch, predict_fn=predict_fn),
    "a compiled step": take_step,
    "prepare": lambda batch: rc.prepare(init_fn, SGD, loss_fn, batch, key=KEY),
    "a model": lambda batch: rc.evaluate(
        init_fn(KEY) | {"x": batch["x"]}, X, loss_fn=loss_fn, **LOOP
    ),
}


@pytest.mark.parametrize("call", TENSORS.values(), ids=TENSORS)
def test_tensors_in_loops_of_users_are_refused_by_name(call):
    """Only `fit`, `evaluate` and `predict_examples` convert them, with the examples. A compiled
    step took them for constants, and raised an error about their truth value."""
    with pytest.raises(TypeError, match=r"at (0/)?x of .*test_dtypes\.Tensor.*`np\.asarray\(x\)`"):
        call({"x": Tensor(X[:8])})


EXACT = {
    "ends of int32": np.array([-(2**31), 2**31 - 1]),
    "end of uint32": np.array([2**32 - 1], np.uint64),
    "infinity": np.array([np.inf, -np.inf, np.nan, 2.0**127]),
    "big-endian": np.array([1.5, -2], ">f4"),
    "big-endian integers": np.array([1, 2**31 - 1], ">i8"),
    "longdouble": np.array([0.5], np.longdouble),
    "bfloat16": np.ones(2, ml_dtypes.bfloat16),
    "int4": np.ones(2, ml_dtypes.int4),
    "boolean": np.ones(2, bool),
    "nothing": np.zeros((2, 0), np.int64),
}


@pytest.mark.parametrize("x", EXACT.values(), ids=EXACT)
def test_what_stays_the_same_is_converted(x):
    actual = to_jax_dtype(x, "x")
    np.testing.assert_array_equal(np.asarray(actual, x.dtype), x)
    assert jnp.asarray(actual).dtype == actual.dtype
    assert to_jax_dtype(actual, "x") is actual


@pytest.mark.parametrize(
    "x",
    [
        np.zeros(2, "datetime64[s]"),
        np.zeros(2, ">m8[s]"),
        np.array(["a"]),
        np.array([b"a"]),
        np.array([None]),
        np.zeros(2, [("a", "i4")]),
        np.zeros(2, "V4"),
        np.array(["0.1"]).astype(np.longdouble),
    ],
    ids=lambda x: str(x.dtype),
)
def test_what_jax_cannot_hold_is_refused_by_name(x):
    collate_fn = lambda examples: {"x": {"inner": np.repeat(x[:1], len(examples))}}
    with pytest.raises(
        TypeError, match=r"`collate_fn` returned.*x/inner|x/inner of what `collate_fn`"
    ):
        next(rc.batches(X, collate_fn, batch_size=8, key=KEY, steps=1))


def test_with_64_bits_integers_stay():
    with jax.enable_x64(True):
        assert tree_to_jax_dtypes({"id": LARGE}, "x")["id"] is LARGE


@pytest.mark.thorough
def test_big_endian_files_train_as_their_copies():
    run = {"loss_fn": loss_fn, "batch_size": 8, "steps": 2, "log": False}
    run["mesh"] = rc.make_mesh(devices=jax.devices()[:1])
    trained = [
        rc.fit(init_fn, SGD, X, collate_fn=lambda e, t=t: {"x": np.stack(e).astype(t)}, **run)
        for t in ("<f4", ">f4")
    ]
    np.testing.assert_array_equal(*(state.model["w"] for state in trained))


def with_keys(examples):
    return {"x": np.stack(examples), "key": jax.random.split(KEY, len(examples))}


def masked(model, batch):
    one = lambda x, key: x * jax.random.uniform(key, x.shape)
    return jax.vmap(one)(batch["x"], batch["key"]) @ model["w"]


def masked_loss(model, batch, key):
    return jnp.mean((masked(model, batch) - 1) ** 2)


@pytest.mark.thorough
def test_a_batch_may_hold_a_key_for_each_example():
    model, batch = init_fn(KEY), with_keys(X)
    want, rows = masked_loss(model, batch, None), masked(model, batch)
    settings = {"collate_fn": with_keys, "batch_size": 16, "mesh": rc.make_mesh(fsdp=2)}
    actual = rc.evaluate(model, X, loss_fn=masked_loss, **settings)
    np.testing.assert_allclose(actual["loss"], want, rtol=1e-6)
    predict_fn = lambda model, batch, key: {"rows": masked(model, batch), "key": batch["key"]}
    outputs = rc.predict_examples(model, X, predict_fn=predict_fn, **settings)
    np.testing.assert_allclose([x["rows"] for x in outputs], rows, rtol=1e-6)
    assert outputs[3]["key"] == batch["key"][3]
    for accumulate in (1, 2):
        state, step, _ = rc.prepare(
            init_fn, SGD, masked_loss, batch, key=KEY, mesh=settings["mesh"], accumulate=accumulate
        )
        np.testing.assert_allclose(step(state, batch)[1]["loss"], want, rtol=1e-6)


@pytest.mark.thorough
def test_keys_in_the_batches_of_fit():
    settings = {"collate_fn": with_keys, "batch_size": 8, "steps": 3, "log": False}
    evaluation = rc.Evaluation(X)
    states = [
        rc.fit(init_fn, SGD, X, loss_fn=masked_loss, mesh=mesh, evaluation=evaluation, **settings)
        for mesh in (rc.make_mesh(), rc.make_mesh(devices=jax.devices()[:1]))
    ]
    np.testing.assert_allclose(*(state.model["w"] for state in states), rtol=1e-5)


@pytest.mark.thorough
def test_keys_in_the_batch_of_a_dry_run():
    run = rc.dry_run(init_fn, masked_loss, with_keys(X), SGD, target="cpu:8")
    assert run.fits


HIDDEN = np.ma.masked_array(X, X > 1)


def masked_runs(values):
    """Calls whose data, or whose model, is an array that may be masked."""
    fit = ft.partial(rc.fit, init_fn, SGD, batch_size=8, steps=1, log=False)
    loss_of_rows = lambda model, batch, key: jnp.mean((batch @ model["w"]) ** 2)
    loss_of_pair = lambda model, batch, key: loss_of_rows(model, batch[0] + batch[1][:, None], key)
    collated = lambda examples: np.ma.stack(list(values[: len(examples)]))
    return {
        "array": lambda: fit(values, loss_fn=loss_of_rows),
        "rows": lambda: fit(list(values), loss_fn=loss_of_rows),
        "columns": lambda: fit((X, values[:, 0]), loss_fn=loss_of_pair),
        "collate_fn": lambda: fit(X, loss_fn=loss_of_rows, collate_fn=collated),
        "evaluate": lambda: rc.evaluate(
            init_fn(KEY), X, collate_fn=collated, loss_fn=loss_of_rows, batch_size=8
        ),
        "train_step": lambda: rc.train_step(
            rc.init_state(init_fn, SGD, key=KEY), values, loss_fn=loss_of_rows, optimizer=SGD
        ),
        "step": lambda: take_step({"x": values}),
        "model": lambda: rc.fit(
            {"w": values[:4]}, SGD, X, loss_fn=loss_of_rows, batch_size=8, steps=1, log=False
        ),
    }


@pytest.mark.parametrize("name", masked_runs(HIDDEN))
def test_values_under_a_mask_are_not_used(name):
    with pytest.raises(ValueError, match="elements masked, and arrays of JAX have no mask"):
        masked_runs(HIDDEN)[name]()


@pytest.mark.few("columns")
@pytest.mark.parametrize("name", ["columns", "collate_fn", "step"])
def test_a_masked_array_without_masked_elements_is_an_array(name):
    masked_runs(np.ma.masked_array(X, np.zeros(X.shape, bool)))[name]()


def test_a_checkpoint_keeps_no_masks_and_all_booleans(tmp_path):
    with pytest.raises(ValueError, match="^The array at layer/x is a masked array .* 1 of "):
        rc.save_checkpoint(
            tmp_path / "a", {"layer": {"x": np.ma.masked_array([1, 2], [True, False])}}
        )
    tree = {"flag": np.bool_(True), "x": np.ones(2)}
    rc.save_checkpoint(tmp_path / "b", tree)
    assert rc.load_checkpoint(tmp_path / "b", tree | {"flag": np.bool_(False)})["flag"]


def test_complex_metrics_are_refused():
    """A log would have their real parts only."""
    of_loss = lambda *args: (loss_fn(*args), {"phase": jax.lax.complex(args[1]["x"][0, 0], 1.0)})
    collated = lambda examples: {"x": np.stack(examples)}
    options: dict[str, Any] = {"loss_fn": of_loss, "collate_fn": collated, "batch_size": 8}
    message = r"aux\['phase'\] of dtype complex64. Metrics are real numbers"
    with pytest.raises(ValueError, match=message):
        rc.fit(init_fn, SGD, X, steps=1, log=False, **options)
    with pytest.raises(ValueError, match=message):
        rc.evaluate(init_fn(KEY), X, **options)


def test_prompts_have_no_numpy_mask():
    llama = random_model(
        Llama, LlamaConfig(vocab=9, width=8, layers=1, heads=2, kv_heads=1, hidden=8)
    )
    with pytest.raises(ValueError, match="`tokens` is a masked array .* with 1 of "):
        rc.generate(llama, np.ma.masked_array([[3, 4]], [[True, False]]), 2)
