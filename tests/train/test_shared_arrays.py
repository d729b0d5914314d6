"""One array or module at two places of a model: its copies are trained apart, with a warning.

Only here: tied weights that are not tied lose quality, and no shape or value shows it.
"""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from problem import batch_of, collate_fn, make_examples

import redcoast as rc

TABLE = jnp.ones((16, 16))
LAYER = eqx.nn.Linear(16, 16, key=jax.random.key(0))


class Inner(eqx.Module):
    layer: eqx.nn.Linear
    own: jax.Array


def two(a, b):
    return {"first": Inner(a, jnp.ones(1)), "second": [Inner(b, jnp.ones(1))]}


def loss_fn(model, batch, key):
    leaves = jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))
    return sum(jnp.mean(x**2) for x in leaves) * jnp.mean(batch["x"])


CASES = {
    "array": (lambda: {"embed": TABLE, "head": TABLE}, ["embed and head."]),
    "three": (lambda: [TABLE, TABLE, TABLE], ["0 and 1 and 2."]),
    "module": (lambda: {"a": LAYER, "b": LAYER, "c": jnp.ones(2)}, ["a and b."]),
    "inside": (lambda: two(LAYER, LAYER), ["first/layer and second/0/layer."]),
    "one array of a module": (
        lambda: two(LAYER, eqx.tree_at(lambda x: x.bias, LAYER, jnp.ones(16))),
        ["first/layer/weight and second/0/layer/weight."],
    ),
    "equal": (lambda: {"a": jnp.ones(2), "b": jnp.ones(2)}, []),
    "shared": (
        lambda: eqx.nn.Shared({"a": TABLE, "b": TABLE}, lambda x: x["b"], lambda x: x["a"]),
        [],
    ),
}


def messages_of(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        call()
    return [str(warning.message) for warning in caught]


def fit(model, **options):
    settings = {"collate_fn": collate_fn, "loss_fn": loss_fn, "batch_size": 16, "log": False}
    return rc.fit(model, optax.sgd(0.1), make_examples(16), steps=1, **settings, **options)


@pytest.mark.few("inside-model")
@pytest.mark.parametrize("how", ["model", "init_fn", "prepare", "state"])
@pytest.mark.parametrize(("make", "words"), CASES.values(), ids=CASES)
def test_the_places_are_named(make, words, how):
    optimizer, key = optax.sgd(0.1), jax.random.key(0)
    init = lambda key: make()
    calls = {
        "model": lambda: fit(make()),
        "init_fn": lambda: fit(init),
        "prepare": lambda: rc.prepare(init, optimizer, loss_fn, batch_of(16), key=key),
        "state": lambda: rc.init_state(init, optimizer, key=key),
    }
    messages = messages_of(calls[how])
    assert len(messages) == len(words)
    for text, part in zip(messages, words, strict=True):
        assert part in text
        assert "eqx.nn.Shared" in text


def test_a_frozen_copy_may_be_the_same_array():
    model = {"online": LAYER, "target": LAYER}
    assert not messages_of(lambda: fit(model, trainable={"online": True, "target": False}))
