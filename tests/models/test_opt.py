"""OPT against NumPy, and what must leave it unchanged."""

import dataclasses

import decoder_helpers as helpers
import jax.numpy as jnp
import numpy as np
import pytest
from decoder_helpers import TOKENS, VOCAB, logits_of, make, slow_attention, slow_norm

from redcoast.models.opt import OPT, OPTConfig
from redcoast.pretrained._registry import read_config, write_config

CONFIG = OPTConfig(vocab=VOCAB, width=16, layers=2, heads=4, hidden=24, positions=11)
SMALLEST = {"post_norm": True, "final_norm": False, "embed_width": 12}  # as 350m is, next to 125m
BARE = {"bias": False, "affine": False, "tied": False}
MODEL = make(OPT, CONFIG)
OTHER = make(OPT, CONFIG, **SMALLEST)


def numpy_logits(model, tokens):
    c, model = model.config, helpers.in_numpy(model)
    or_zero = lambda x: 0.0 if x is None else x

    def norm(x, scale, shift):
        return slow_norm(x, scale, shift) if c.affine else slow_norm(x)

    def attend(x, w):
        pairs = ((w.wq, w.bq), (w.wk, w.bk), (w.wv, w.bv))
        q, k, v = (np.einsum("sd,dhk->shk", x, m) + or_zero(b) for m, b in pairs)
        out = slow_attention(q, k, v, scale=c.head_dim**-0.5)
        return np.einsum("shk,hkd->sd", out, w.wo) + or_zero(w.bo)

    def feed(x, w):
        return np.maximum(x @ w.up + or_zero(w.up_bias), 0) @ w.down + or_zero(w.down_bias)

    x = model.embed[np.asarray(tokens)]
    x = x if model.project_in is None else x @ model.project_in
    x = x + model.position_embed[2 : 2 + len(tokens)]
    for index in range(c.layers):
        w = helpers.one_layer(model.layers, index)
        parts = ((attend, w.attention_norm, w.attention_norm_shift),)
        for part, scale, shift in (*parts, (feed, w.mlp_norm, w.mlp_norm_shift)):
            if c.post_norm:
                x = norm(x + part(x, w), scale, shift)
            else:
                x = x + part(norm(x, scale, shift), w)
    x = norm(x, model.norm, model.norm_shift) if c.final_norm else x
    x = x if model.project_out is None else x @ model.project_out
    return x @ (model.embed.T if model.head is None else model.head)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "changes", [{}, SMALLEST, BARE, {"final_norm": False, "embed_width": 20, "tied": False}]
)
def test_matches_numpy(changes):
    model = make(OPT, CONFIG, **changes)
    logits = logits_of(model, TOKENS)
    for row, got in zip(TOKENS, logits, strict=True):
        helpers.close(got, numpy_logits(model, row), 1e-4)


@pytest.mark.parametrize("model", [MODEL, OTHER], ids=["before", "after"])
@pytest.mark.thorough
def test_padding_changes_nothing(model):
    helpers.check_padding(model)


@pytest.mark.thorough
def test_packed_texts_are_as_apart():
    helpers.check_segments(OTHER)


@pytest.mark.parametrize("model", [MODEL, OTHER], ids=["before", "after"])
@pytest.mark.thorough
def test_cache_gives_what_all_at_once_does(model):
    helpers.check_cache(model, model.init_cache(2, 12))


@pytest.mark.thorough
def test_dropout_by_key():
    helpers.check_dropout(MODEL, ("dropout", "attention_dropout"))


@pytest.mark.thorough
def test_remat_saves_less_and_changes_no_gradient():
    helpers.check_remat(OTHER)


@pytest.mark.thorough
def test_half_precision_is_close_to_float32():
    helpers.check_half_precision(MODEL)


@pytest.mark.parametrize("changes", [{}, SMALLEST], ids=["before", "after"])
@pytest.mark.thorough
def test_is_split_over_a_mesh(changes):
    helpers.check_plan(make(OPT, CONFIG, **changes, width=32, hidden=128))


@pytest.mark.thorough
def test_positions_end():
    tokens = jnp.pad(TOKENS, ((0, 0), (0, 5)))
    with pytest.raises(ValueError, match="12 tokens in a row, but the model has 11 positions"):
        MODEL(tokens)
    with pytest.raises(ValueError, match="12 tokens in a row"):
        MODEL.decode(tokens, MODEL.init_cache(2, 12))
    beyond = logits_of(MODEL, TOKENS, positions=jnp.arange(5, 12)[None])
    assert jnp.all(jnp.isnan(beyond[:, 6]))
    assert jnp.all(jnp.isfinite(logits_of(MODEL, TOKENS, positions=jnp.arange(4, 11)[None])))


@pytest.mark.thorough
def test_initial_deviations_are_those_of_the_paper():
    config = dataclasses.replace(CONFIG, width=64, layers=8)
    layers = helpers.initial(OPT, config).layers
    np.testing.assert_allclose(jnp.std(layers.wq), 0.006, rtol=0.05)
    for array in (layers.wo, layers.down):
        np.testing.assert_allclose(jnp.std(array), 0.0015, rtol=0.05)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3}, "16 is not a multiple of 3"),
        ({"embed_width": 0}, "`embed_width` must be at least 1"),
        ({"post_norm": True}, "With `post_norm=True` each layer already ends with a norm"),
        ({"dropout": 1.5}, "`dropout` must be at least 0 and less than 1, but is 1.5"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


# As https://huggingface.co/facebook/opt-350m has it.
PUBLISHED = {
    "_remove_final_layer_norm": False,
    "activation_dropout": 0.0,
    "activation_function": "relu",
    "architectures": ["OPTForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "do_layer_norm_before": False,
    "dropout": 0.1,
    "eos_token_id": 2,
    "ffn_dim": 4096,
    "hidden_size": 1024,
    "init_std": 0.02,
    "layerdrop": 0.0,
    "max_position_embeddings": 2048,
    "model_type": "opt",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "pad_token_id": 1,
    "prefix": "</s>",
    "torch_dtype": "float16",
    "use_cache": True,
    "vocab_size": 50272,
    "word_embed_proj_dim": 512,
}


def test_published_settings_are_read():
    config = OPTConfig(50272, 1024, 24, 16, 4096, embed_width=512, eos=(2,), bos=2, pad=1)
    config = dataclasses.replace(config, post_norm=True, final_norm=False)
    assert read_config(OPTConfig, PUBLISHED) == config


@pytest.mark.parametrize("changes", [{}, SMALLEST, BARE, {"final_norm": False}])
def test_settings_are_read_back(changes):
    others = {"activation": "gelu", "dropout": 0.2, "attention_dropout": 0.3, "pad": 6}
    config = dataclasses.replace(CONFIG, **changes, **others, eos=(3, 4), bos=5)
    assert read_config(OPTConfig, write_config(config)) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layerdrop": 0.1}, "`layerdrop` is 0.1, but only 0.0 is implemented"),
        ({"activation_dropout": 0.1}, "`activation_dropout` is 0.1"),
        ({"scale_embeddings": True}, "`scale_embeddings` is True"),
        ({"rope_theta": 1e4}, "`rope_theta`, which is 10000.0, is unknown"),
    ],
)
def test_settings_that_would_change_results_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        read_config(OPTConfig, PUBLISHED | change)
