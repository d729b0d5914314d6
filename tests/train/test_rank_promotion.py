"""A loss that compares each prediction with the labels of all examples is a warning.

Only here: it trains towards the mean of the labels, and every shape of the model is right.
"""

import warnings

import jax
import jax.numpy as jnp
import pytest

import redcoast as rc
from redcoast.sharding._function_reports import batch_faults
from redcoast.train._coupled import warn_of_promotions

B = 8
BATCH = jnp.ones((B, 4)), jnp.ones(B)
KEY = jax.random.key(0)
ONE = rc.make_mesh(devices=jax.devices()[:1])


def column(w, batch):
    return jnp.tanh(batch[0] @ w["a"])


def flat(w, batch):
    return column(w, batch)[:, 0]


MISTAKES = {
    "difference": lambda w, b, k: jnp.mean((column(w, b) - b[1]) ** 2),
    "labels in a column": lambda w, b, k: jnp.mean((flat(w, b) - b[0][:, :1]) ** 2),
    "compiled inside": lambda w, b, k: jax.jit(lambda p: jnp.mean(jnp.abs(b[1] - p)))(column(w, b)),
    "mask": lambda w, b, k: jnp.mean(column(w, b) ** 2 * b[1]),
    "accuracy": lambda w, b, k: jnp.mean((column(w, b) > 0) == (b[1] > 0)),
}
MEANT = {
    "same shapes": lambda w, b, k: jnp.mean((column(w, b) - b[1][:, None]) ** 2),
    "row": lambda w, b, k: jnp.mean((column(w, b) - b[1][None, :]) ** 2),
    "column": lambda w, b, k: jnp.mean((jnp.exp(flat(w, b)[:, None]) - b[1]) ** 2),
    "each by vmap": lambda w, b, k: jnp.mean(jax.vmap(lambda p: (p - b[1]) ** 2)(column(w, b))),
    "pairs of predictions": lambda w, b, k: jnp.mean((column(w, b) - flat(w, b)) ** 2),
    "contrastive": lambda w, b, k: jnp.mean(jax.nn.logsumexp(column(w, b) @ column(w, b).T, 1)),
    "distances": lambda w, b, k: jnp.mean(
        jnp.sum(column(w, b) ** 2, 1, keepdims=True) + jnp.sum(b[0] ** 2, 1)
    ),
    "same labels": lambda w, b, k: jnp.mean(
        (b[1][:, None] == b[1]).astype(jnp.float32) * (column(w, b) * 1.0).T
    ),
}


def promotions(loss):
    with jax.numpy_rank_promotion("allow"):
        return batch_faults(loss, {"a": jnp.ones((4, 1))}, (BATCH, KEY), ONE)[2]


@pytest.mark.parametrize("name", MISTAKES)
def test_predictions_that_meet_all_labels_are_found(name):
    (line,) = promotions(MISTAKES[name])
    assert line.startswith("test_rank_promotion.py:")
    with pytest.warns(UserWarning, match=rf"\({line}\).*same shape"):
        warn_of_promotions([line])


@pytest.mark.parametrize("name", MEANT)
def test_pairs_that_are_meant_are_not(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert promotions(MEANT[name]) == ()
