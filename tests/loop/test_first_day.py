"""What a user writes on the first day is taken, or says what would work."""

import contextlib
import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problem import arrays, batch_of, collate_fn, loss_fn, make_examples, make_model, predict_fn

import redcoast as rc
from redcoast.dryrun._chips import CHIPS
from redcoast.loop._printing import Printer, cost_of_float32
from redcoast.models import Llama, LlamaConfig
from redcoast.train._precision import as_compute_dtype

OPTIONS: Any = {"collate_fn": collate_fn, "loss_fn": loss_fn, "batch_size": 8, "log": False}


@pytest.mark.few("given1-steps=4")
@pytest.mark.parametrize(
    ("given", "remedy"), [({"epochs": 1}, "epochs=2"), ({"steps": 2}, "steps=4")]
)
def test_second_call_with_the_same_length_warns_and_says_what_to_pass(given, remedy):
    options: Any = OPTIONS | {"mesh": rc.make_mesh(devices=jax.devices()[:1])}
    examples = make_examples(16)
    state = rc.fit(make_model(), optax.sgd(0.1), examples, **options, **given)
    with pytest.warns(UserWarning, match=f"Nothing is left to train: 2 of 2 .*pass `{remedy}`"):
        state = rc.fit(state, optax.sgd(0.1), examples, **options, **given)
    name, number = remedy.split("=")
    more: Any = {name: int(number)}
    state = rc.fit(state, optax.sgd(0.1), examples, **options, **more)
    assert int(state.step) == 4


def one_device() -> Any:
    return OPTIONS | {"mesh": rc.make_mesh(devices=jax.devices()[:1])}


class Augmented:
    """Examples that differ at each reading."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __len__(self):
        return 32

    def __getitem__(self, index):
        example = make_examples(32)[index]
        return example | {"x": example["x"] + self.rng.normal(size=example["x"].shape)}


@pytest.mark.thorough
@pytest.mark.few("in another order")
@pytest.mark.parametrize("data", ["same", "in another order", "augmented"])
def test_examples_in_another_order_than_before_are_said(data, tmp_path, caplog):
    """As of a list that is shuffled without a seed at each start of a script."""
    examples: Any = make_examples(32)
    if data == "augmented":
        examples = Augmented()
    train = lambda examples, steps: rc.fit(
        make_model(), optax.sgd(0.1), examples, **one_device(), steps=steps, checkpoints=tmp_path
    )
    train(examples, 1)
    if data == "in another order":
        examples = [examples[i] for i in np.random.default_rng(0).permutation(32)]
    train(examples, 2)
    assert ("another order than when the run was started" in caplog.text) == (
        data == "in another order"
    )
    caplog.clear()
    train(examples[::-1] if isinstance(examples, list) else examples, 2)
    assert "another order" not in caplog.text, "nothing is left to train"


@pytest.mark.thorough
def test_a_finished_run_that_prints_nothing_warns(tmp_path, caplog):
    """As of a sweep of learning rates, all in one directory."""
    options = one_device() | {"steps": 2, "checkpoints": tmp_path}
    rc.fit(make_model(), optax.sgd(0.1), make_examples(16), **options)
    assert not caplog.text
    rc.fit(make_model(), optax.sgd(0.3), make_examples(16), **options)
    assert "Nothing is left to train: 2 of 2" in caplog.text
    assert "choose another directory for a new run" in caplog.text


@pytest.mark.thorough
def test_injected_values_of_a_checkpoint_are_said(tmp_path, caplog):
    options = one_device() | {"checkpoints": tmp_path}

    def train(steps, rate, momentum):
        inject = optax.inject_hyperparams(optax.sgd)
        rc.fit(make_model(), inject(rate, momentum), make_examples(16), **options, steps=steps)

    schedule = optax.linear_schedule(0.1, 0.2, 10)
    train(1, schedule, 0.5)
    train(2, schedule, 0.5)
    assert "goes on with" not in caplog.text
    train(3, schedule, 0.75)
    assert "goes on with momentum=0.5, from its checkpoint, and not with 0.75" in caplog.text


@pytest.mark.thorough
@pytest.mark.parametrize("keeps", ["all", "leaves", "copies", "the last"])
def test_states_that_a_logger_keeps_are_said_to_be_deleted(keeps):
    kept: list[Any] = []

    def keep(metrics, step, state):
        if keeps == "the last":
            kept.clear()
        model = jax.device_get(state.model) if keeps == "copies" else state.model
        kept.append(jax.tree.leaves(model)[0] if keeps == "leaves" else model)

    options = one_device() | {"log": [keep, rc.progress_logger(False)], "steps": 4}
    said = pytest.warns(UserWarning, match=r"`log` \(keep\) keeps arrays of an earlier state")
    with said if keeps in ("all", "leaves") else contextlib.nullcontext():
        rc.fit(make_model(), optax.sgd(0.1), make_examples(32), **options)
    readable = jax.tree.leaves(kept[-1])[0]
    assert np.isfinite(readable).all()


def test_a_deleted_array_of_an_earlier_state_says_what_to_keep():
    last: list[Any] = []

    def compare(metrics, step, state):
        for old, new in zip(last, jax.tree.leaves(state.model), strict=False):
            old - new
        last[:] = jax.tree.leaves(state.model)

    options = one_device() | {"log": [compare, rc.progress_logger(False)]}
    with pytest.raises(RuntimeError, match="has been deleted") as info:
        rc.fit(make_model(), optax.sgd(0.1), make_examples(16), **options, steps=2)
    assert info.value.__notes__[-1].endswith("Keep a copy, such as `jax.device_get(state.model)`.")


def test_an_attribute_of_another_librarys_state_says_what_there_is():
    state = rc.init_state(make_model(), optax.sgd(0.1), key=jax.random.key(0))
    with pytest.raises(AttributeError, match="no attribute 'params'.*`model` has the trained"):
        _ = state.params
    assert not hasattr(state, "apply_fn")


class Repeated:
    """An endless source with an index, as Grain's `repeat()` makes."""

    def __len__(self):
        return sys.maxsize

    def __getitem__(self, index):
        return make_examples(8)[index % 8]


@pytest.mark.parametrize(
    ("examples", "length", "words"),
    [
        (make_examples(8), {"epochs": 2}, "8 examples, 4 steps of 4 (2 epochs)"),
        (Repeated(), {"steps": 3}, "an endless source, 3 steps of 4"),
        (
            lambda: iter(make_examples(8)),
            {"steps": 3},
            "3 steps of 4 examples, in the order",
        ),
        (lambda: iter(make_examples(8)), {"epochs": 1}, "(each until `examples` ends)"),
        (iter(make_examples(8)), {}, "batches of 4 examples, in the order of the source"),
    ],
)
def test_summary_says_how_long_a_source_is(examples, length, words, capsys):
    key = jax.random.key(0)
    data = rc.batches(examples, collate_fn, batch_size=4, key=key, **length)
    state = rc.init_state(make_model(), optax.sgd(0.1), key=key)
    Printer(None, None).describe_run(state, data, None, None, plans=False)
    assert words in " ".join(capsys.readouterr().out.split())


NAMES = {"bf16": jnp.bfloat16, "bfloat16": jnp.bfloat16, "fp16": jnp.float16, "half": jnp.float16}
NAMES |= {"f32": jnp.float32, "fp32": jnp.float32, "float32": jnp.float32}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_dtypes_are_taken(name):
    assert as_compute_dtype(name) == jnp.dtype(NAMES[name])


@pytest.mark.integration
def test_name_of_a_dtype_computes_as_the_dtype_everywhere():
    mesh, examples = rc.make_mesh(devices=jax.devices()[:1]), make_examples(8)
    common = {"collate_fn": collate_fn, "batch_size": 8, "mesh": mesh}
    actual = []
    for dtype in ("bf16", jnp.bfloat16):
        options: Any = common | {"compute_dtype": dtype}
        model = make_model()
        state = rc.fit(model, optax.sgd(0.1), examples, **OPTIONS | options, steps=1)
        metrics = rc.evaluate(model, examples, loss_fn=loss_fn, **options)
        predicted = rc.predict_examples(model, examples, predict_fn=predict_fn, **options)
        one = rc.predict(model, batch_of(8), predict_fn=predict_fn, compute_dtype=dtype)
        prepared = rc.prepare(
            model, optax.sgd(0.1), loss_fn, batch_of(8), mesh=mesh, compute_dtype=dtype
        )
        assert prepared.state.loss_scale is None
        actual.append((arrays(state), metrics, predicted, np.asarray(one)))
    for x, y in zip(jax.tree.leaves(actual[0]), jax.tree.leaves(actual[1]), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("dtype", ["bf17", "int8", jnp.int32, object()])
def test_what_is_no_floating_dtype_is_refused(dtype):
    with pytest.raises((TypeError, ValueError), match="`compute_dtype` must be .*, but is"):
        as_compute_dtype(dtype)


def test_cost_of_float32_is_a_line_on_devices_with_bfloat16_units():
    a100 = CHIPS["a100-80gb"].device_kind
    assert cost_of_float32(a100, "float32") == (
        'compute_dtype="bf16" would compute products up to 2 times as fast and halve the memory of '
        "activations"
    )
    assert "up to" not in cost_of_float32(CHIPS["v4"].device_kind, "float32")
    assert cost_of_float32(a100, "float32 parameters, bfloat16 computation") == ""
    assert cost_of_float32("cpu", "float32") == cost_of_float32("unknown", "float32") == ""


@pytest.mark.thorough
def test_prompts_may_be_lists_and_the_length_positional():
    config = LlamaConfig(vocab=16, width=16, layers=1, heads=2, kv_heads=1, hidden=16)
    model = Llama(config, key=jax.random.key(0))
    actual = rc.generate(model, [[1, 2, 3]], 2)
    np.testing.assert_array_equal(
        actual, rc.generate(model, np.array([[1, 2, 3]]), max_new_tokens=2)
    )
    with pytest.raises(ValueError, match="from 1 to 2 tokens. Pad them to one length.*`mask`"):
        rc.generate(model, [[1, 2], [3]], 2)
    with pytest.raises(ValueError, match=r"list of 3 integers.*For one prompt, pass `\[tokens\]`"):
        rc.generate(model, [1, 2, 3], 2)


def test_a_run_is_no_part_of_a_transformed_function():
    fit = lambda model: rc.fit(
        model, optax.sgd(0.1), make_examples(8), loss_fn=loss_fn, batch_size=8, steps=1, log=False
    )
    models = eqx.filter_vmap(lambda key: eqx.nn.Linear(16, 8, key=key))(
        jax.random.split(jax.random.key(0), 2)
    )
    with pytest.raises(TypeError, match=r"`fit` was called inside `jax\.vmap`.*To train several"):
        eqx.filter_vmap(fit)(models)
