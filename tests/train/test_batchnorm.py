"""Stateful layers: `loss_fn` returns the updated model as its third value."""

import functools as ft
import sys
import types
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grids import few_of
from problem import batch_of, collate_fn, make_examples

import redcoast as rc


class Net(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    last: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key)
        self.first = eqx.nn.Linear(16, 32, key=keys[0])
        self.norm = eqx.nn.BatchNorm(32, axis_name="batch", mode="ema", momentum=0.9)
        self.last = eqx.nn.Linear(32, 8, key=keys[1])

    def __call__(self, x, state):
        x, state = self.norm(self.first(x), state)
        return self.last(jax.nn.relu(x)), state


def loss_fn(model, batch, key):
    net, state = model
    apply = jax.vmap(net, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    logits, state = apply(batch["x"], state)
    loss = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]))
    return loss, {}, (net, state)


def running(model):
    return [np.asarray(x) for x in jax.tree.leaves(model[1])]


def init_fn(key):
    return eqx.nn.make_with_state(Net)(key)


OPTIMIZER = optax.adam(1e-2)
STEP = ft.partial(rc.train_step, loss_fn=loss_fn, optimizer=OPTIMIZER)


def test_running_averages_are_updated_without_optimizer_state():
    state = rc.init_state(init_fn, OPTIMIZER, key=jax.random.key(0))
    batch = batch_of(32)
    hidden = jax.vmap(state.model[0].first)(batch["x"])
    after, _ = eqx.filter_jit(STEP)(state, batch)
    first_time, mean, var = running(after.model)
    assert not first_time
    np.testing.assert_allclose(mean, np.mean(hidden, 0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(var, np.var(hidden, 0), rtol=1e-4, atol=1e-5)
    trained = jax.tree.leaves(eqx.filter(state.model[0], eqx.is_inexact_array))
    assert len(jax.tree.leaves(state.opt_state)) == 1 + 2 * len(trained)


@pytest.mark.thorough
def test_microbatches_update_the_averages_in_turn():
    state = rc.init_state(init_fn, OPTIMIZER, key=jax.random.key(0))
    batch = batch_of(32)
    after, _ = eqx.filter_jit(ft.partial(STEP, accumulate=2))(state, batch)
    hidden = np.asarray(jax.vmap(state.model[0].first)(batch["x"]))
    # Rows are assigned to microbatches in turn; the second average includes both microbatches.
    expected = 0.9 * hidden[0::2].mean(0) + 0.1 * hidden[1::2].mean(0)
    np.testing.assert_allclose(running(after.model)[1], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", few_of([None, jnp.bfloat16], None))
def test_trains_evaluates_and_resumes(tmp_path, dtype):
    examples = make_examples(256)
    train = ft.partial(
        rc.fit,
        init_fn(jax.random.key(0)),
        OPTIMIZER,
        examples,
        collate_fn=collate_fn,
        loss_fn=loss_fn,
        batch_size=32,
        log=False,
        compute_dtype=dtype,
    )
    whole = train(steps=6)
    train(steps=3, checkpoints=rc.Checkpoints(tmp_path))
    resumed = train(steps=6, checkpoints=rc.Checkpoints(tmp_path))
    for a, b in zip(running(whole.model), running(resumed.model), strict=True):
        np.testing.assert_array_equal(a, b)
    assert {x.dtype for x in running(whole.model)} == {np.dtype(bool), np.dtype("float32")}

    # Inference mode uses the averages, so the result does not depend on the batch size.
    evaluate = ft.partial(
        rc.evaluate, whole.model, examples, collate_fn=collate_fn, loss_fn=loss_fn
    )
    small, large = evaluate(batch_size=10)["loss"], evaluate(batch_size=256)["loss"]
    np.testing.assert_allclose(small, large, rtol=1e-5)


def without_model(model, batch, key):
    return loss_fn(model, batch, key)[0]


def trained(init, loss, **options):
    """The state after a step of `fit`, and the texts of the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        state = rc.fit(
            init,
            OPTIMIZER,
            make_examples(32),
            collate_fn=collate_fn,
            loss_fn=loss,
            batch_size=32,
            steps=1,
            log=False,
            **options,
        )
    # Python shows a warning once for each line, but the checks of annotations make it forget.
    return state, list(dict.fromkeys(str(warning.message) for warning in caught))


def frozen(key):
    net, state = init_fn(key)
    return eqx.nn.inference_mode(net), state


@pytest.mark.thorough
@pytest.mark.few("returned")
@pytest.mark.parametrize(
    ("init", "loss", "warns"),
    [
        (init_fn, without_model, True),
        (init_fn, loss_fn, False),
        (frozen, without_model, False),
        (init_fn, lambda m, b, k: (without_model(m, b, k), {}, m), False),
    ],
    ids=["dropped", "returned", "inference mode", "left as it is"],
)
def test_a_state_that_the_loss_drops_is_a_warning(init, loss, warns):
    """Only here: the averages keep their first values, so an evaluation would be wrong."""
    state, messages = trained(init, loss)
    assert bool(messages) == warns
    if warns:
        (text,) = messages
        assert all(words in text for words in ("`State`, at 1", "return loss, {}, (net, state)"))
        assert running(state.model)[0]  # no average was taken


@pytest.mark.thorough
def test_a_state_that_is_used_up_without_vmap_is_a_warning():
    class Count(eqx.Module):
        index: eqx.nn.StateIndex
        weight: jax.Array

        def __init__(self, key):
            self.index = eqx.nn.StateIndex(jnp.zeros(()))
            self.weight = jnp.ones(())

    def loss(model, batch, key):
        net, state = model
        state.set(net.index, state.get(net.index) + 1)
        return net.weight * jnp.mean(batch["x"])

    _, messages = trained(eqx.nn.make_with_state(Count), loss)
    assert len(messages) == 1
    assert "return loss, {}, (net, state)" in messages[0]


@pytest.mark.thorough
@pytest.mark.few("state as model")
@pytest.mark.parametrize(
    "result",
    [
        lambda loss, net, state: (loss, state),
        lambda loss, net, state: (loss, (net, state)),
        lambda loss, net, state: (loss, ({"accuracy": loss}, state)),
        lambda loss, net, state: (loss, {"state": state}),
        lambda loss, net, state: (loss, {"batch_stats": {"mean": loss}}),
        lambda loss, net, state: (loss, {}, state),
    ],
    ids=["state", "model", "aux and state", "in aux", "dict in aux", "state as model"],
)
def test_a_state_in_another_place_is_told_where_to_go(result):
    def loss(model, batch, key):
        loss, _, (net, state) = loss_fn(model, batch, key)
        return result(loss, net, state)

    state = rc.init_state(init_fn, OPTIMIZER, key=jax.random.key(0))
    with pytest.raises((TypeError, ValueError), match=r"return loss, \{\}, \(net, state\)"):
        rc.train_step(state, batch_of(8), loss_fn=loss, optimizer=OPTIMIZER)


@pytest.fixture
def nnx(monkeypatch):
    """The kinds of variables that Flax's NNX has, as nodes of a tree; Flax is not installed."""
    kinds: Any = types.ModuleType("flax.nnx")

    class Variable:
        def __init__(self, value):
            self.value = value

    for name, base in {"Param": Variable, "BatchStat": Variable, "LoRAParam": None}.items():
        kind = type(name, (base or kinds.Param,), {})
        flatten = lambda x: ((x.value,), None)
        jax.tree_util.register_pytree_node(kind, flatten, lambda _, x, kind=kind: kind(*x))
        setattr(kinds, name, kind)
    kinds.Variable = Variable
    monkeypatch.setitem(sys.modules, "flax.nnx", kinds)
    return kinds


@pytest.mark.thorough
def test_statistics_of_nnx_are_not_trained(nnx):
    """Only here: weight decay would shrink the running variance of a split NNX module."""
    ones = jnp.ones((1, 16))
    init = lambda key: {"w": nnx.Param(ones), "var": nnx.BatchStat(ones)}
    normal = lambda m, b: jnp.mean((b["x"] * m["w"].value) ** 2 / m["var"].value)
    decay = optax.adamw(0.1, weight_decay=1.0)
    state = rc.init_state(init, decay, key=jax.random.key(0))
    assert len(jax.tree.leaves(state.opt_state)) == 1 + 2

    def moved(model, batch, key):
        return normal(model, batch), {}, {**model, "var": nnx.BatchStat(3 * model["var"].value)}

    state, messages = trained(init, moved)
    assert not messages
    np.testing.assert_array_equal(state.model["var"].value, 3 * np.ones((1, 16)))
    state, (text,) = trained(init, lambda m, b, k: normal(m, b))
    np.testing.assert_array_equal(state.model["var"].value, np.ones((1, 16)))
    assert "`BatchStat`, at var" in text
    assert "nnx.split(module)[1]" in text


@pytest.mark.few("True")
@pytest.mark.parametrize("frozen", [False, True])
def test_a_state_that_the_loss_closes_over_is_a_warning(frozen):
    """Only here: the argument `model` has no state that could be returned."""
    model, state = init_fn(jax.random.key(0))
    model = eqx.nn.inference_mode(model, frozen)

    def loss(model, batch, key):
        return loss_fn((model, state), batch, key)[0]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mesh = rc.make_mesh(devices=jax.devices()[:1])
        rc.prepare(model, OPTIMIZER, loss, batch_of(16), mesh=mesh)
    texts = [str(warning.message) for warning in caught]
    expected = "`loss_fn` reads an `eqx.nn.State` that is not in its argument"
    assert [text.startswith(expected) for text in texts] == [True] * (not frozen)
