"""Inputs that are NumPy arrays count like those of JAX where nothing is compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_models import random_model

from redcoast.models import Bert, BertConfig, Llama, LlamaConfig

LLAMA = random_model(Llama, LlamaConfig(vocab=11, width=8, layers=1, heads=2, kv_heads=1, hidden=8))
BERT = random_model(Bert, BertConfig(vocab=11, width=8, layers=1, heads=2, hidden=8, positions=6))
TOKENS = np.array([[3, 4, 5, 6, 7], [8, 3, 9, 1, 2]])
INPUTS = {
    "left padding": {"mask": np.array([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])},
    "right padding": {"mask": np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], bool)},
    "packed": {"segments": np.array([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]])},
    "positions": {"positions": np.array([[4, 3, 2, 1, 0]])},
}


@pytest.mark.thorough
@pytest.mark.few("llama-packed")
@pytest.mark.parametrize("what", INPUTS)
@pytest.mark.parametrize("model", [LLAMA, BERT], ids=["llama", "bert"])
def test_numpy_inputs_count_outside_of_a_compiled_program(model, what):
    given = INPUTS[what]
    of_jax = model(jnp.asarray(TOKENS), **jax.tree.map(jnp.asarray, given))
    np.testing.assert_allclose(model(TOKENS, **given), of_jax, atol=1e-6)
    without = model(jnp.asarray(TOKENS))
    assert np.abs(np.asarray(of_jax - without)).max() > 1e-3


@pytest.mark.thorough
def test_a_cache_takes_numpy_masks():
    mask = np.array([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    hidden, _ = LLAMA.decode(TOKENS, LLAMA.init_cache(2, 5), mask=mask)
    expected = LLAMA.hidden(jnp.asarray(TOKENS), mask=jnp.asarray(mask))
    np.testing.assert_allclose(hidden[mask == 1], expected[mask == 1], atol=1e-6)
