"""Tokens, masks and segments of other shapes and types are named, in place of what fails later."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from grids import few_of

from redcoast import models

SIZES: dict[str, Any] = {"vocab": 11, "width": 8, "layers": 1, "heads": 2}
DECODER: dict[str, Any] = {**SIZES, "hidden": 12}
LABELLED: dict[str, Any] = {**DECODER, "head": "classification", "labels": 2}
KEY = jax.random.key(0)
TOKENS = np.arange(6).reshape(2, 3)
OF = "have the same shape, or one row for all"
MATRIX = r"It must hold integers and have the shape \(batch, seq\)"
MODELS = {
    "llama": models.Llama(models.LlamaConfig(**DECODER, kv_heads=1), key=KEY),
    "gpt2": models.GPT2(models.GPT2Config(**DECODER), key=KEY),
    "mamba2": models.Mamba2(models.Mamba2Config(**SIZES, head_size=8), key=KEY),
    "mixtral": models.Mixtral(models.MixtralConfig(**DECODER, kv_heads=1, experts=2), key=KEY),
    "bert": models.Bert(models.BertConfig(**LABELLED), key=KEY),
    "modernbert": models.ModernBert(models.ModernBertConfig(**LABELLED, pooling="mean"), key=KEY),
}
PAIR = models.T5(models.T5Config(**DECODER, decoder_layers=1, head_size=4), key=KEY)


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
    with pytest.raises(ValueError, match=f"`decoder_tokens` has dtype float64 .*{MATRIX}"):
        PAIR(TOKENS, TOKENS.astype(float))
    with pytest.raises(ValueError, match=f"`decoder_mask` has shape .*{OF}"):
        PAIR(TOKENS, TOKENS, decoder_mask=np.ones((2, 2), bool))
    for name in ("segments", "positions"):
        with pytest.raises(ValueError, match=f"`{name}` has shape .3,., but .*{OF}"):
            MODELS["llama"](TOKENS, **{name: np.arange(3)})


@pytest.mark.parametrize("name", ["llama", "mamba2", "mixtral"])
def test_a_batch_without_rows_has_no_logits(name):
    assert eqx.filter_eval_shape(MODELS[name], TOKENS[:0]).shape == (0, 3, 11)


def calls_of(model):
    """All ways to call a model with tokens."""
    if model is PAIR:
        memory = model.encode(TOKENS)
        yield lambda tokens: model.encode(tokens)
        yield lambda tokens: model(TOKENS, tokens)
        yield lambda tokens: model.decode(tokens, model.init_cache(2, 3, memory=memory))[0]
    else:
        yield model
        if hasattr(model, "decode"):
            yield lambda tokens: model.decode(tokens, model.init_cache(2, 3))[0]


@pytest.mark.parametrize("name", [*MODELS, "t5"])
def test_ids_outside_the_vocabulary_are_named_or_give_nan(name):
    """Indexing counts negative ids from the end, and the results would be finite."""
    for call in calls_of(MODELS.get(name, PAIR)):
        traced = eqx.filter_jit(call)
        for token in (-1, -11, -100, 11):
            tokens = TOKENS.copy()
            tokens[1, 2] = token
            for kind in (np.asarray, jnp.asarray):
                says = f"tokens` holds {token}, but the token ids of the vocabulary are 0 to 10"
                with pytest.raises(ValueError, match=says):
                    call(kind(tokens))
            results = traced(tokens)
            assert jnp.isfinite(results[0]).all()
            assert jnp.isnan(results[1]).any()


def test_negative_positions_of_a_table_give_nan():
    positions = np.array([[0, 1, 2], [0, 1, -1]])
    results = eqx.filter_jit(MODELS["gpt2"])(TOKENS, positions=positions)
    assert jnp.isfinite(results[0]).all()
    assert jnp.isnan(results[1, 2]).all()


MASK, SEGMENTS = np.array([[0, 1, 1]]), np.array([[0, 0, 1]])
ONE_ROW: dict[str, dict[str, Any]] = {
    "llama": {"mask": MASK, "segments": SEGMENTS, "positions": SEGMENTS},
    "gpt2": {"mask": MASK, "segments": SEGMENTS},
    "mamba2": {"mask": MASK},
    "mixtral": {"mask": MASK},
    "bert": {"mask": MASK, "types": SEGMENTS},
    "modernbert": {"mask": MASK},
    "t5": {"mask": MASK, "decoder_mask": MASK},
    "t5 packed": {"segments": SEGMENTS, "decoder_segments": SEGMENTS},
}


@pytest.mark.parametrize("name", few_of(ONE_ROW, "bert", "t5"))
def test_a_mask_with_one_row_is_that_of_all_rows(name):
    options = ONE_ROW[name]
    whole = {key: np.repeat(x, 2, axis=0) for key, x in options.items()}
    model = MODELS.get(name, PAIR)
    inputs = (TOKENS,)
    if model is PAIR:
        inputs = (TOKENS, TOKENS)
    run = eqx.filter_jit(model)
    np.testing.assert_array_equal(run(*inputs, **options), run(*inputs, **whole))


def test_a_mask_with_one_row_of_new_tokens_is_that_of_all_rows():
    model, new = MODELS["llama"], np.ones((2, 1), np.int32)
    results: list[jax.Array] = []
    for mask in (MASK, np.repeat(MASK, 2, axis=0)):
        _, cache = model.decode(TOKENS, model.init_cache(2, 4), mask=mask)
        results.append(model.decode(new, cache)[0])
    np.testing.assert_array_equal(results[0], results[1])


def test_a_cache_has_a_row_and_a_slot_for_each_token():
    """A slice beyond the last slot would be written over the tokens before it."""
    model = MODELS["llama"]
    with pytest.raises(ValueError, match="has 3 rows, but there are 2 rows of new tokens"):
        model.decode(TOKENS, model.init_cache(3, 4))
    _, cache = model.decode(TOKENS, model.init_cache(2, 4))
    with pytest.raises(ValueError, match="has 4 slots, of which 3 are filled, and there are 2 new"):
        model.decode(TOKENS[:, :2], cache)
    with pytest.raises(ValueError, match="has 2 slots, of which 0 are filled, and there are 3 new"):
        eqx.filter_jit(lambda: model.decode(TOKENS, model.init_cache(2, 2)))()


@pytest.mark.usefixtures("no_annotations")
def test_images_and_sounds_are_floats_and_have_no_mask():
    """Bytes of pixels were taken as they are, and a mask was not read."""
    sizes: dict[str, Any] = {"width": 8, "layers": 1, "heads": 2, "hidden": 12}
    vit = models.ViT(models.ViTConfig(**sizes, image=(4, 4), patch=(2, 2)), key=KEY)
    config = models.WhisperConfig(
        vocab=11, **sizes, decoder_layers=1, frames=4, mels=3, decoder_start=1
    )
    whisper = models.Whisper(config, key=KEY)
    pixels, features = np.zeros((2, 3, 4, 4), np.float32), np.zeros((2, 3, 4), np.float32)
    calls: list[tuple[Any, np.ndarray]] = [(vit, pixels), (whisper.encode, features)]
    for call, inputs in calls:
        with pytest.raises(ValueError, match=r"has dtype uint8 .* floating-point numbers that are"):
            call(inputs.astype(np.uint8))
        with pytest.raises(ValueError, match=r"has dtype float32 and shape .* must have the shape"):
            call(inputs[0])
        with pytest.raises(TypeError, match="is of type list. It must be an array"):
            call(inputs.tolist())
        with pytest.raises(ValueError, match="`mask` marks padding tokens"):
            call(inputs, mask=np.ones((2, 4)))
