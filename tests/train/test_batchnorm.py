"""Stateful layers: `loss_fn` returns the updated model as its third value."""

import functools as ft

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


def test_microbatches_update_the_averages_in_turn():
    state = rc.init_state(init_fn, OPTIMIZER, key=jax.random.key(0))
    batch = batch_of(32)
    after, _ = eqx.filter_jit(ft.partial(STEP, accumulate=2))(state, batch)
    hidden = np.asarray(jax.vmap(state.model[0].first)(batch["x"]))
    # Rows are assigned to microbatches in turn; the second average includes both microbatches.
    expected = 0.9 * hidden[0::2].mean(0) + 0.1 * hidden[1::2].mean(0)
    np.testing.assert_allclose(running(after.model)[1], expected, rtol=1e-4, atol=1e-5)


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
