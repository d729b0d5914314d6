"""The forms of `trainable`: which leaves each selects, and what is refused."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problem import batch_of, loss_fn, make_model

import redcoast as rc
from redcoast import lora
from redcoast.core._pytree import show_path
from redcoast.core._trainable import partition_trainable, trainable_arrays
from redcoast.models import Llama, LlamaConfig

LAST = {"layers/2/weight", "layers/2/bias"}
WEIGHTS = {f"layers/{i}/weight" for i in range(3)}
FORMS: Any = {
    "a part of the model": (lambda m: m.layers[-1], LAST),
    "an array of the model": (lambda m: m.layers[0].weight, {"layers/0/weight"}),
    "several parts": (lambda m: (m.layers[0].bias, m.layers[2]), LAST | {"layers/0/bias"}),
    "a mask from the model": (lambda m: jax.tree.map(eqx.is_inexact_array, m), None),
    "a mask of NumPy's booleans": (
        lambda m: jax.tree.map(lambda x: np.bool_(eqx.is_inexact_array(x) and x.ndim == 2), m),
        WEIGHTS,
    ),
    "a filtered part": (lambda m: eqx.filter(m.layers[2], eqx.is_array), LAST),
    "a function of a leaf": (lambda x: x.ndim == 2, WEIGHTS),
    "a function of any leaf": (lambda x: eqx.is_array(x) and x.ndim == 2, WEIGHTS),
    "a function of path and leaf": (
        lambda path, x: "bias" in path and x.size < 10,
        {"layers/2/bias"},
    ),
    "a pattern": ("weight$", WEIGHTS),
    "patterns": (["^layers/2", "0/bias"], LAST | {"layers/0/bias"}),
    "a tuple of patterns": (("layers/2",), LAST),
}


@pytest.mark.parametrize("name", FORMS)
def test_form_selects(name):
    form, wanted = FORMS[name]
    model = make_model()
    selected, rest = partition_trainable(model, form)
    names = {show_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(selected)}
    assert names == (wanted or {*LAST, *WEIGHTS, "layers/0/bias", "layers/1/bias"})
    assert eqx.tree_equal(eqx.combine(selected, rest), model)
    abstract = eqx.filter_eval_shape(lambda: model)
    assert sum(trainable_arrays(abstract, form)) == len(names)


def test_parameters_that_are_called_like_parts_of_models_decide_nothing():
    """What tells the forms apart is what a function does, not how its arguments are called."""
    model = make_model()
    for form in (lambda leaf: leaf.layers[-1], lambda path: path.layers[-1]):
        assert len(jax.tree.leaves(partition_trainable(model, form)[0])) == 2
    of_leaf = lambda model: model.ndim == 2
    assert len(jax.tree.leaves(partition_trainable(model, of_leaf)[0])) == 3
    of_pair = lambda model, key: "weight" in model and key.ndim == 2
    assert len(jax.tree.leaves(partition_trainable(model, of_pair)[0])) == 3


def test_part_with_an_array_that_is_at_several_places_is_the_part_that_is_named():
    shared = jnp.ones(3)
    model = {"a": shared, "b": shared}
    selected, _ = partition_trainable(model, lambda m: m["b"])
    assert selected["a"] is None
    assert selected["b"] is shared


@pytest.mark.thorough
def test_adapters_are_selected_by_their_function():
    config = LlamaConfig(vocab=16, width=16, layers=1, heads=2, kv_heads=1, hidden=16)
    model = lora.add_adapters(
        Llama(config, key=jax.random.key(0)), 2, targets="wq", key=jax.random.key(1)
    )
    actual, wanted = (
        partition_trainable(model, form)[0] for form in (lora.trainable, lora.trainable(model))
    )
    assert eqx.tree_equal(actual, wanted)
    assert len(jax.tree.leaves(actual)) == 2


BAD: Any = {
    "other part": (lambda m: m.layers[7], r"IndexError .*for the model, and .*for the leaf at lay"),
    "typo": (lambda m: m.layer, "has no attribute 'layer'.*for the model, and Attrib.*function of"),
    "computed": (lambda m: m.layers[0].weight * 2, "for the model, which is not a part of it"),
    "nothing": (lambda m: None, "returned nothing for the model"),
    "text": (lambda path, x: "weight", "returned str for the leaf at layers/0/weight"),
    "no match": ("wight", "'wight' of `trainable` matches no path.*layers/0/weight"),
    "one without match": (["weight", "head"], "'head' of `trainable` matches no path"),
    "no expression": ("(", "is not a regular expression"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_selects_no_leaves_is_refused(name):
    form, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        partition_trainable(make_model(), form)


@pytest.mark.integration
def test_forms_train_alike_on_a_mesh():
    mesh = rc.make_mesh(fsdp=2, devices=jax.devices()[:2])
    examples = [{"x": x, "y": y} for x, y in zip(*batch_of(8).values(), strict=True)]
    options: Any = {"loss_fn": loss_fn, "batch_size": 4, "steps": 2, "mesh": mesh, "log": False}
    mask = eqx.tree_at(lambda m: m.layers[-1], jax.tree.map(lambda _: False, make_model()), True)
    states = [
        rc.fit(make_model(), optax.adam(0.1), examples, trainable=form, **options)
        for form in (mask, lambda m: m.layers[-1], "layers/2")
    ]
    for state in states[1:]:
        assert eqx.tree_equal(state.opt_state, states[0].opt_state)
        assert eqx.tree_equal(state.model, states[0].model)
    assert np.all(states[0].model.layers[0].weight == make_model().layers[0].weight)


@pytest.mark.few("layers/2")
@pytest.mark.parametrize("form", ["layers/2", lambda path, x: "layers/2" in path])
def test_a_run_of_a_created_model_trains_the_selected_part_and_is_resumed(form, tmp_path):
    """The arrays of such a model have only shapes when a run is planned, and when it is resumed."""
    examples = [{"x": x, "y": y} for x, y in zip(*batch_of(8).values(), strict=True)]
    # Hyperparameters in the state are compared with those of the checkpoint.
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    options: Any = {"loss_fn": loss_fn, "batch_size": 4, "trainable": form, "log": False}
    options["mesh"] = rc.make_mesh(devices=jax.devices()[:1])

    def run(steps, checkpoints=None):
        init_fn = lambda key: make_model()
        return rc.fit(init_fn, optimizer, examples, steps=steps, checkpoints=checkpoints, **options)

    whole = run(2)
    run(1, tmp_path)
    resumed = run(2, tmp_path)
    assert eqx.tree_equal(resumed.model, whole.model)
    after, before = whole.model.layers, make_model().layers
    assert not eqx.tree_equal(after[2], before[2])
    assert eqx.tree_equal(after[:2], before[:2])


@pytest.mark.parametrize("is_function", [False, True])
def test_filters_that_tell_numpy_arrays_apart_are_refused(is_function):
    # Training converts NumPy arrays, and so would train one that the user meant to freeze.
    model = {"w": jnp.ones(3), "table": np.ones(3, np.float32)}
    start = model
    if is_function:
        start = lambda key: model
    for form in (lambda x: isinstance(x, jax.Array), lambda x: not isinstance(x, np.ndarray)):
        with pytest.raises(ValueError, match="`trainable` selects other leaves.*table.*by path"):
            rc.init_state(start, optax.sgd(0.1), key=jax.random.key(0), trainable=form)
    by_path = lambda path, x: path != "table"
    rc.init_state(start, optax.sgd(0.1), key=jax.random.key(0), trainable=by_path)


@pytest.mark.parametrize("form", ["embed", lambda m: m["head"]])
def test_a_numpy_array_at_two_places_is_told_apart_by_path(form):
    table = np.ones((3, 2), np.float32)
    model = {"embed": table, "head": table}
    state = rc.init_state(model, optax.sgd(0.1), key=jax.random.key(0), trainable=form)
    assert set(state.model) == {"embed", "head"}
