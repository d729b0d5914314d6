"""A small model is updated in one thread of a CPU, with the results of the step as it is."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxpr_as_fun
from problem import collate_fn, loss_fn, make_examples, make_model

import redcoast as rc
from redcoast.core._pytree import join, split
from redcoast.train import _one_thread
from redcoast.train._one_thread import READY, in_one_thread

ONE = rc.make_mesh(devices=jax.devices()[:1])
BATCH = jax.tree.map(jnp.asarray, collate_fn(make_examples(8)))


def traced_step(optimizer, loss_fn=loss_fn, model=None, **options):
    """The program of a training step, and its arguments."""
    model = make_model() if model is None else model
    state = rc.init_state(lambda key: model, optimizer, key=jax.random.key(0), **options)
    arrays, static = split(state)
    options = {"loss_fn": loss_fn, "optimizer": optimizer} | options

    def step(arrays, batch):
        new, metrics = rc.train_step(join(arrays, static), batch, **options)
        return split(new)[0], metrics

    return jax.make_jaxpr(step)(arrays, BATCH), jax.tree.leaves((arrays, BATCH))


def compiled_calls(program, args):
    """The numbers of results of the calls that the compiler did not inline."""
    text = jax.jit(in_one_thread(program, ONE)).lower(*args).compile().as_text() or ""
    entry = text[text.index("ENTRY") :]
    shapes = re.findall(r"= (\(.*?\)|\S+) call\(.*inlineable=\"false\"", entry)
    return [len(re.findall(r"\w+\[", shape)) for shape in shapes]


OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "scheduled": optax.chain(optax.clip(1.0), optax.adam(optax.cosine_decay_schedule(1e-2, 9))),
    "injected": optax.inject_hyperparams(optax.adam)(1e-2),
    "products": optax.contrib.muon(1e-2),
    "line search": optax.lbfgs(),
    "few results": optax.sgd(1e-2),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_results_are_those_of_the_step_as_it_is(name):
    program, args = traced_step(OPTIMIZERS[name])
    # For each of six arrays its two moments and its value.
    if name in ("adamw", "scheduled", "injected"):
        assert compiled_calls(program, args) == [6, 6, 6]
    expected = jax.jit(jaxpr_as_fun(program))(*args)
    for x, y in zip(expected, jax.jit(in_one_thread(program, ONE))(*args), strict=True):
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)


@pytest.mark.thorough
def test_many_updates_are_calls_of_calls():
    deep = eqx.nn.MLP(16, 8, 8, depth=11, key=jax.random.key(0))  # of 24 arrays
    program, args = traced_step(optax.adam(1e-2), model=deep)
    calls = compiled_calls(program, args)
    assert len(calls) == 4
    assert sum(calls) == 3 * 24


@pytest.mark.thorough
def test_large_models_and_several_devices_keep_their_threads(monkeypatch):
    program, args = traced_step(OPTIMIZERS["adamw"])
    assert "_one_thread" not in in_one_thread(program, rc.make_mesh()).__module__
    norm = 1
    assert compiled_calls(*traced_step(OPTIMIZERS["few results"])) == [norm]
    assert len(jax.tree.leaves(eqx.filter(make_model(), eqx.is_array))) <= READY
    monkeypatch.setattr(_one_thread, "MOST_BYTES", 1000)
    assert compiled_calls(program, args) == [norm]


@pytest.mark.thorough
def test_effects_and_unused_results_stay_outside():
    def printing(model, batch, key):
        loss, aux = loss_fn(model, batch, key)
        jax.debug.callback(lambda x: None, loss)
        return loss, aux

    def unused(updates, state, params=None):
        updates, state = OPTIMIZERS["adamw"].update(updates, state, params)
        _ = jax.tree.map(jnp.exp, updates)  # nothing needs it
        return updates, state

    optimizer = optax.GradientTransformation(OPTIMIZERS["adamw"].init, unused)
    program, args = traced_step(optimizer, printing)
    assert compiled_calls(program, args) == [6, 6, 6]


@pytest.mark.thorough
def test_state_of_float16_is_updated_in_calls():
    program, args = traced_step(optax.adamw(1e-2), compute_dtype=jnp.float16)
    assert compiled_calls(program, args) == [6, 6, 6]
