"""GPT-J against NumPy, and what must leave it unchanged."""

import dataclasses

import decoder_helpers as helpers
import jax.numpy as jnp
import numpy as np
import pytest
from decoder_helpers import TOKENS, VOCAB, logits_of, make, slow_attention, slow_norm
from random_models import to_device

from redcoast.models._rotary import rotary_angles, rotary_frequencies, rotate_pairs
from redcoast.models.gptj import GPTJ, GPTJConfig
from redcoast.pretrained._registry import read_config, write_config

CONFIG = GPTJConfig(vocab=VOCAB, width=24, layers=2, heads=4, hidden=20, rotary_dim=4)
MODEL = make(GPTJ, CONFIG)


def slow_rotation(x, turned):
    """Each pair of neighbours as a complex number, turned about zero."""
    x = x.copy()
    for i in range(0, turned, 2):
        turns = np.exp(1j * np.arange(len(x)) * 10000 ** (-i / turned))[:, None]
        pair = (x[:, :, i] + 1j * x[:, :, i + 1]) * turns
        x[:, :, i], x[:, :, i + 1] = pair.real, pair.imag
    return x


def numpy_logits(model, tokens):
    c, model = model.config, helpers.in_numpy(model)
    x = model.embed[np.asarray(tokens)]
    for index in range(c.layers):
        w = helpers.one_layer(model.layers, index)
        y = slow_norm(x, w.norm, w.norm_shift)
        q, k, v = (np.einsum("sd,dhk->shk", y, m) for m in (w.wq, w.wk, w.wv))
        q, k = slow_rotation(q, c.rotary_dim), slow_rotation(k, c.rotary_dim)
        out = slow_attention(q, k, v, scale=c.head_dim**-0.5)
        x = x + np.einsum("shk,hkd->sd", out, w.wo)
        x = x + helpers.slow_gelu_tanh(y @ w.up + w.up_bias) @ w.down + w.down_bias
    head = model.embed.T if model.head is None else model.head
    return slow_norm(x, model.norm, model.norm_shift) @ head + model.head_bias


@pytest.mark.thorough
@pytest.mark.parametrize(("rotary_dim", "tied"), [(4, False), (2, True), (6, False)])
def test_matches_numpy(rotary_dim, tied):
    model = make(GPTJ, CONFIG, rotary_dim=rotary_dim, tied=tied)
    logits = logits_of(model, TOKENS)
    for row, got in zip(TOKENS, logits, strict=True):
        helpers.close(got, numpy_logits(model, row), 1e-4)


@pytest.mark.thorough
def test_rotation_keeps_what_is_beyond_the_angles():
    x = to_device(np.random.default_rng(0).normal(0, 1, (1, 9, 3, 8)), np.float32)
    angles = rotary_angles(jnp.arange(9)[None], rotary_frequencies(6, 10000.0), jnp.float32)
    turned = rotate_pairs(x, angles)
    helpers.close(turned[0], slow_rotation(np.asarray(x[0], np.float64), 6))
    np.testing.assert_array_equal(turned[..., 6:], x[..., 6:])


@pytest.mark.thorough
def test_padding_changes_nothing():
    helpers.check_padding(MODEL)


@pytest.mark.thorough
def test_packed_texts_are_as_apart():
    helpers.check_segments(MODEL)


@pytest.mark.thorough
def test_cache_gives_what_all_at_once_does():
    helpers.check_cache(MODEL, MODEL.init_cache(2, 12))


@pytest.mark.thorough
def test_dropout_by_key():
    helpers.check_dropout(MODEL, ("embed_dropout", "residual_dropout", "attention_dropout"))


@pytest.mark.thorough
def test_remat_saves_less_and_changes_no_gradient():
    helpers.check_remat(MODEL)


@pytest.mark.thorough
def test_half_precision_is_close_to_float32():
    helpers.check_half_precision(MODEL)


@pytest.mark.thorough
def test_is_split_over_a_mesh():
    helpers.check_plan(make(GPTJ, CONFIG, vocab=16, width=32, hidden=128))


@pytest.mark.thorough
def test_initial_deviations():
    config = dataclasses.replace(CONFIG, width=64, layers=8)
    layers = helpers.initial(GPTJ, config).layers
    np.testing.assert_allclose(jnp.std(layers.wq), 0.02, rtol=0.05)
    for array in (layers.wo, layers.down):
        np.testing.assert_allclose(jnp.std(array), 0.005, rtol=0.05)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 5}, "24 is not a multiple of 5"),
        ({"rotary_dim": 3}, "even and at most the head size 6, but is 3"),
        ({"rotary_dim": 8}, "even and at most the head size 6, but is 8"),
        ({"rotary_dim": 0}, "`rotary_dim` must be at least 1"),
        ({"residual_dropout": -0.1}, "`residual_dropout` must be at least 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


# As https://huggingface.co/EleutherAI/gpt-j-6b has it, without its generation's defaults.
PUBLISHED = {
    "activation_function": "gelu_new",
    "architectures": ["GPTJForCausalLM"],
    "attn_pdrop": 0.0,
    "bos_token_id": 50256,
    "embd_pdrop": 0.0,
    "eos_token_id": 50256,
    "gradient_checkpointing": False,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gptj",
    "n_embd": 4096,
    "n_head": 16,
    "n_inner": None,
    "n_layer": 28,
    "n_positions": 2048,
    "resid_pdrop": 0.0,
    "rotary": True,
    "rotary_dim": 64,
    "scale_attn_weights": True,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "tie_word_embeddings": False,
    "tokenizer_class": "GPT2Tokenizer",
    "use_cache": True,
    "vocab_size": 50400,
}


def test_published_settings_are_read():
    config = GPTJConfig(50400, 4096, 28, 16, 16384, eos=(50256,), bos=50256)
    assert read_config(GPTJConfig, PUBLISHED) == config


def test_settings_are_read_back():
    changes = {"activation": "relu", "norm_eps": 1e-6, "tied": True, "context": 64, "pad": 6}
    rates = {"embed_dropout": 0.2, "residual_dropout": 0.3, "attention_dropout": 0.4}
    config = dataclasses.replace(CONFIG, **changes, **rates, eos=(3, 4), bos=5)
    assert read_config(GPTJConfig, write_config(config)) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rotary": False}, "`rotary` is False, but only True is implemented"),
        ({"scale_attn_weights": False}, "`scale_attn_weights` is False"),
        ({"add_cross_attention": True}, "`add_cross_attention` is True"),
        ({"parallel_residual": True}, "`parallel_residual`, which is True, is unknown"),
        ({"rotary_dim": None}, "`rotary_dim` must be a number"),
    ],
)
def test_settings_that_would_change_results_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        read_config(GPTJConfig, PUBLISHED | change)
