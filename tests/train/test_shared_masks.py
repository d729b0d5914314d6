"""Dropout with one key for all rows is a warning: every example has the same mask."""

import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from problem import collate_fn, make_examples

import redcoast as rc

DROPOUT = eqx.nn.Dropout(0.5)
MESHES: dict[str, Any] = {"8 devices": {"model": 4}, "one device": {"devices": jax.devices()[:1]}}


def network(w, x, key):
    return DROPOUT(jnp.tanh(x @ w), key=key)


def one_key(w, x, key):
    return jax.vmap(lambda x: network(w, x, key))(x)


def keys(w, x, key):
    return jax.vmap(lambda x, key: network(w, x, key))(x, jax.random.split(key, len(x)))


def products(w, x, key):
    mask = jax.random.bernoulli(key, 0.5, (16,)).astype(jnp.float32)
    return jax.vmap(lambda x: jnp.tanh(x @ w) * (mask / 0.5))(x)


def layers(w, x, key):
    step = lambda x, key: (one_key(w, x, key), None)
    return jax.lax.scan(step, x, jax.random.split(key, 3))[0]


def on_weights(w, x, key):
    return x @ jnp.where(jax.random.bernoulli(key, 0.5, w.shape), w, 0.0)


def noise(w, x, key):
    return x @ w + jax.random.normal(key, (1, 16))


SHARED = {
    "one key": one_key,
    "products": products,
    "layers": layers,
    "compiled": lambda w, x, key: jax.jit(one_key)(w, x, key),
    "rematerialised": lambda w, x, key: jax.checkpoint(one_key)(w, x, key),
    "shape of an example": lambda w, x, key: jnp.where(
        jax.random.bernoulli(key, 0.5, (1, 16)), x @ w, 0.0
    ),
}
APART = {
    "keys": keys,
    "whole batch": lambda w, x, key: network(w, x, key),
    "weights": on_weights,
    "noise": noise,
    "tokens": lambda w, x, key: jnp.where(jax.random.bernoulli(key, 0.5, (len(x), 1)), x @ w, 0.0),
    "none": lambda w, x, key: x @ w,
}


def messages_of(apply, mesh):
    def loss_fn(model, batch, key):
        return jnp.mean(apply(model, batch["x"], key) ** 2)

    options = {"collate_fn": collate_fn, "batch_size": 16, "steps": 1, "log": False}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        rc.fit(
            jnp.eye(16),
            optax.sgd(0.1),
            make_examples(16),
            loss_fn=loss_fn,
            mesh=rc.make_mesh(**MESHES[mesh]),
            **options,
        )
    return [str(warning.message) for warning in caught]


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", SHARED)
def test_one_mask_for_all_examples_is_said_once(name, mesh):
    """Only here: the model trains, with less regularisation than was asked for."""
    (text,) = messages_of(SHARED[name], mesh)
    assert "test_shared_masks.py:" in text
    assert "jax.random.split(key, len(x))" in text


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", APART)
def test_other_draws_are_none(name, mesh):
    assert not messages_of(APART[name], mesh)
