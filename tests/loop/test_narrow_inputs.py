"""Inputs at the edge of what functions take: narrow dtypes, empty trees and sequences."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redcoast as rc
from redcoast.losses import token_log_probabilities
from redcoast.train._start import _warn_of_parameters

ROWS = np.ones((8, 4), np.float32)


def loss_fn(model, batch, key):
    return jnp.mean(batch)


def test_parameters_in_float8_are_warned_of_by_their_dtype():
    model = {"w": jnp.ones(3, jnp.float8_e4m3fn), "b": jnp.ones(3, jnp.bfloat16)}
    with pytest.warns(UserWarning, match=r"float8_e4m3fn \(w\).*float32 or bfloat16"):
        _warn_of_parameters(model, eqx.is_inexact_array)


def test_an_empty_model_is_called_empty():
    with pytest.raises(ValueError, match=r"it is empty\. Pass the parameters"):
        rc.fit({}, optax.sgd(0.1), ROWS, loss_fn=loss_fn, batch_size=8, steps=1, log=False)


def test_tokens_without_a_successor_have_no_log_probabilities():
    hidden, tokens = jnp.ones((2, 0, 4)), jnp.ones((2, 0), jnp.int32)
    values = token_log_probabilities(hidden, lambda x: x, tokens, chunk=2)
    assert values.shape == (2, 0)
