"""Labels and masks of optax's optimizers in the shape of a model that can be called."""

import functools as ft
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from problem import batch_of, loss_fn, make_model

import redcoast as rc

MODEL = make_model()
PARAMS = eqx.filter(MODEL, eqx.is_inexact_array)


def labels_of(tree):
    named = lambda path, _: "last" if "layers[2]" in jax.tree_util.keystr(path) else "others"
    return jax.tree_util.tree_map_with_path(named, tree)


def groups(labels):
    return optax.multi_transform({"last": optax.sgd(0.5), "others": optax.sgd(0.1)}, labels)


OPTIMIZERS = {
    "labels like the parameters": (lambda: groups(labels_of(PARAMS)), 0.5),
    "labels like the model": (lambda: groups(labels_of(MODEL)), 0.5),
    "in a chain": (lambda: optax.chain(optax.identity(), groups(labels_of(PARAMS))), 0.5),
    "accumulated": (lambda: optax.MultiSteps(groups(labels_of(PARAMS)), 1), 0.5),
    "a function of labels": (lambda: groups(lambda params: labels_of(params)), 0.5),
    "a mask like the model": (
        lambda: optax.masked(
            optax.scale(-0.5), jax.tree.map(lambda x: x == "last", labels_of(MODEL))
        ),
        None,
    ),
}


@pytest.mark.few("a mask like the model")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_trains_groups_at_their_rates(name):
    make, rate = OPTIMIZERS[name]
    optimizer = make()
    if not isinstance(optimizer, optax.GradientTransformation):
        optimizer = optax.GradientTransformation(optimizer.init, optimizer.update)
    state = rc.init_state(MODEL, optimizer, key=jax.random.key(0))
    step: Any = ft.partial(rc.train_step, loss_fn=loss_fn, optimizer=optimizer)
    after, _ = eqx.filter_jit(step)(state, batch_of(8))
    grads = eqx.filter_grad(lambda m: loss_fn(m, batch_of(8), None)[0])(MODEL)
    for i, factor in ((0, -0.1 if rate else 1.0), (2, -0.5)):
        moved = after.model.layers[i].weight - MODEL.layers[i].weight
        np.testing.assert_allclose(moved, factor * grads.layers[i].weight, rtol=1e-3, atol=1e-6)


def test_optimizer_is_the_same_object_with_labels_that_are_not_called():
    optimizer = groups(labels_of(PARAMS))
    with pytest.raises(TypeError):
        optimizer.init(PARAMS)  # optax calls the labels
    before = optimizer.init, optimizer.update
    rc.init_state(MODEL, optimizer, key=jax.random.key(0))
    assert (optimizer.init, optimizer.update) == before
    optimizer.init(PARAMS)
