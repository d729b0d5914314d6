"""Tokens, masks and segments of other shapes and types are named, in place of what fails later."""

from typing import Any

import jax
import jaxtyping
import numpy as np
import pytest

from redcoast import models

SIZES: dict[str, Any] = {"vocab": 11, "width": 8, "layers": 1, "heads": 2}
DECODER: dict[str, Any] = {**SIZES, "hidden": 12}
KEY = jax.random.key(0)
TOKENS = np.arange(6).reshape(2, 3)
OF = "have the same shape, or one row for all"
MATRIX = r"It must hold integers and have the shape \(batch, seq\)"
MODELS = {
    "llama": models.Llama(models.LlamaConfig(**DECODER, kv_heads=1), key=KEY),
    "gpt2": models.GPT2(models.GPT2Config(**DECODER), key=KEY),
    "mamba2": models.Mamba2(models.Mamba2Config(**SIZES, head_size=8), key=KEY),
    "bert": models.Bert(models.BertConfig(**DECODER), key=KEY),
    "modernbert": models.ModernBert(models.ModernBertConfig(**DECODER), key=KEY),
}


@pytest.fixture
def no_annotations():
    """The tests' runtime type checker would reject all of these first."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("no_annotations")
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_tokens_are_a_matrix_of_integers_and_masks_have_their_shape(model):
    for tokens, says in (
        (TOKENS.tolist(), r"`tokens` is of type list. .* `np.array\(tokens\)`"),
        (TOKENS[0], f"`tokens` has dtype int64 and shape .3,.. {MATRIX}"),
        (TOKENS.astype(float), f"`tokens` has dtype float64 .*{MATRIX}"),
        (TOKENS > 2, f"`tokens` has dtype bool .*{MATRIX}"),
    ):
        with pytest.raises((TypeError, ValueError), match=says):
            model(tokens)
    for shape in ((2, 4), (3,), (2, 1, 1, 3), (4, 3)):
        with pytest.raises(ValueError, match=f"`mask` has shape .*{OF}"):
            model(TOKENS, mask=np.ones(shape, bool))


@pytest.mark.usefixtures("no_annotations")
def test_segments_positions_and_the_decoders_arrays_are_named():
    pair = models.T5(models.T5Config(**DECODER, decoder_layers=1, head_size=4), key=KEY)
    with pytest.raises(ValueError, match=f"`decoder_tokens` has dtype float64 .*{MATRIX}"):
        pair(TOKENS, TOKENS.astype(float))
    with pytest.raises(ValueError, match=f"`decoder_mask` has shape .*{OF}"):
        pair(TOKENS, TOKENS, decoder_mask=np.ones((2, 2), bool))
    for name in ("segments", "positions"):
        with pytest.raises(ValueError, match=f"`{name}` has shape .3,., but .*{OF}"):
            MODELS["llama"](TOKENS, **{name: np.arange(3)})


def test_a_batch_without_rows_has_no_logits():
    assert MODELS["llama"](TOKENS[:0]).shape == (0, 3, 11)
