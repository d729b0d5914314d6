"""GPT-2 against NumPy, and what must leave it unchanged; with and without a memory."""

import dataclasses

import decoder_helpers as helpers
import equinox as eqx
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from decoder_helpers import TOKENS, VOCAB, decode, logits_of, make, slow_attention, slow_norm
from random_models import to_device

from redcoast.models.gpt2 import GPT2, GPT2Config
from redcoast.pretrained._registry import read_config, write_config

CONFIG = GPT2Config(vocab=VOCAB, width=16, layers=2, heads=4, hidden=24, positions=11)
MODEL = make(GPT2, CONFIG)
READER = make(GPT2, CONFIG, cross_attention=True, scale_by_layer=True)
MEMORY = to_device(np.random.default_rng(2).normal(0, 1, (2, 5, 16)), np.float32)
MEMORY_MASK = jnp.array([[1, 1, 1, 1, 1], [0, 1, 1, 0, 1]])
READ = {"memory": MEMORY, "memory_mask": MEMORY_MASK}


def numpy_logits(model, tokens, memory=None):
    c, model = model.config, helpers.in_numpy(model)
    act = {"gelu_new": helpers.slow_gelu_tanh, "gelu": helpers.slow_gelu}[c.activation]

    def attend(x, w, index, memory):
        x = slow_norm(x, w.norm, w.norm_shift)
        seen = x if memory is None else memory
        project = lambda x, w, b: np.einsum("sd,dhk->shk", x, w) + b
        q, k, v = project(x, w.wq, w.bq), project(seen, w.wk, w.bk), project(seen, w.wv, w.bv)
        scale = c.head_dim**-0.5 if c.scale_scores else 1.0
        scale /= index + 1 if c.scale_by_layer else 1
        out = slow_attention(q, k, v, scale=scale, causal=memory is None)
        return np.einsum("shk,hkd->sd", out, w.wo) + w.bo

    x = model.embed[np.asarray(tokens)] + model.position_embed[: len(tokens)]
    for index in range(c.layers):
        w = helpers.one_layer(model.layers, index)
        x = x + attend(x, w.attention, index, None)
        if memory is not None:
            x = x + attend(x, w.cross, index, memory)
        h = act(slow_norm(x, w.mlp_norm, w.mlp_norm_shift) @ w.up + w.up_bias)
        x = x + h @ w.down + w.down_bias
    head = model.embed.T if model.head is None else model.head
    return slow_norm(x, model.norm, model.norm_shift) @ head


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied": False, "activation": "gelu", "scale_by_layer": True},
        {"scale_scores": False},
    ],
)
@pytest.mark.few("changes0")
def test_matches_numpy(changes):
    model = make(GPT2, CONFIG, **changes)
    logits = logits_of(model, TOKENS)
    for row, got in zip(TOKENS, logits, strict=True):
        helpers.close(got, numpy_logits(model, row), 1e-4)


@pytest.mark.thorough
def test_attention_to_a_memory_matches_numpy():
    logits = logits_of(READER, TOKENS, **READ)
    for row in range(2):
        memory = np.asarray(MEMORY[row], np.float64)[np.asarray(MEMORY_MASK[row]) == 1]
        helpers.close(logits[row], numpy_logits(READER, TOKENS[row], memory), 1e-4)


@pytest.mark.thorough
def test_padding_changes_nothing():
    helpers.check_padding(MODEL)
    helpers.check_padding(READER, **READ)


@pytest.mark.thorough
def test_packed_texts_are_as_apart():
    helpers.check_segments(MODEL)


@pytest.mark.thorough
def test_cache_gives_what_all_at_once_does():
    helpers.check_cache(MODEL, MODEL.init_cache(2, 12))


@pytest.mark.thorough
def test_cache_with_a_memory_gives_what_all_at_once_does():
    helpers.check_cache(READER, READER.init_cache(2, 12, **READ), **READ)


@pytest.mark.thorough
def test_cache_holds_the_memory_of_the_rows_taken():
    cache = READER.init_cache(2, 4, **READ).take(jnp.array([1, 1, 0]))
    logits, _ = decode(READER, TOKENS[jnp.array([1, 1, 0]), :1], cache)
    expected = logits_of(READER, TOKENS, **READ)[:, 0]
    helpers.close(logits[:, 0], expected[jnp.array([1, 1, 0])])


@pytest.mark.thorough
def test_dropout_by_key():
    rates = ("embed_dropout", "residual_dropout", "attention_dropout")
    helpers.check_dropout(READER, rates, **READ)


@pytest.mark.thorough
def test_remat_saves_less_and_changes_no_gradient():
    helpers.check_remat(MODEL)


@pytest.mark.thorough
def test_half_precision_is_close_to_float32():
    helpers.check_half_precision(MODEL)


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.thorough
def test_is_split_over_a_mesh(reads):
    sizes = {"width": 32, "hidden": 128}
    if not reads:
        return helpers.check_plan(make(GPT2, CONFIG, **sizes))
    model = make(GPT2, CONFIG, cross_attention=True, **sizes)
    helpers.check_plan(model, memory=jnp.tile(MEMORY, (2, 1, 2)))


@pytest.mark.thorough
def test_positions_end():
    tokens = jnp.pad(TOKENS, ((0, 0), (0, 5)))
    with pytest.raises(ValueError, match="12 tokens in a row, but the model has 11 positions"):
        MODEL(tokens)
    with pytest.raises(ValueError, match="12 tokens in a row"):
        MODEL.decode(tokens, MODEL.init_cache(2, 12))
    # Packed texts may be longer together; what is at no position is seen to be.
    segments = jnp.tile((jnp.arange(12) >= 7).astype(jnp.int32)[None], (2, 1))
    assert jnp.all(jnp.isfinite(logits_of(MODEL, tokens, segments=segments)))
    beyond = logits_of(MODEL, TOKENS, positions=jnp.arange(5, 12)[None])
    assert jnp.all(jnp.isnan(beyond[:, 6]))


@pytest.mark.thorough
def test_tied_head_is_the_embedding():
    untied = make(GPT2, CONFIG, tied=False)
    untied = eqx.tree_at(lambda m: m.head, untied, MODEL.embed.T)
    helpers.close(logits_of(MODEL, TOKENS), logits_of(untied, TOKENS))


def test_token_outside_the_vocabulary_gives_nan():
    assert jnp.all(jnp.isnan(logits_of(MODEL, TOKENS.at[1, 3].set(VOCAB))[1, 3:]))


@pytest.mark.thorough
def test_initial_deviations_are_those_of_the_paper():
    config = dataclasses.replace(CONFIG, width=64, layers=8, cross_attention=True)
    model = helpers.initial(GPT2, config)
    layers = model.layers
    for array in (model.embed, layers.attention.wq, layers.cross.wv, layers.up):
        np.testing.assert_allclose(jnp.std(array), 0.02, rtol=0.05)
    for array in (layers.attention.wo, layers.cross.wo, layers.down):
        np.testing.assert_allclose(jnp.std(array), 0.005, rtol=0.05)


def test_a_memory_mask_with_one_row_is_that_of_all_rows():
    hidden = lambda mask: READER(TOKENS, memory=MEMORY, memory_mask=mask)
    row = MEMORY_MASK[1:]
    np.testing.assert_array_equal(hidden(row), hidden(jnp.repeat(row, 2, axis=0)))


@pytest.mark.parametrize("call", ["hidden", "init_cache"])
def test_memory_and_cross_attention_go_together(call):
    def use(model, **options):
        return model(TOKENS, **options) if call == "hidden" else model.init_cache(2, 4, **options)

    with pytest.raises(
        ValueError, match="`memory` must be given if `config.cross_attention` is True, and only"
    ):
        use(MODEL, **READ)
    with pytest.raises(
        ValueError, match="`memory` must be given if `config.cross_attention` is True, and only"
    ):
        use(READER)
    # The tests' type checker would refuse these first.
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with pytest.raises(ValueError, match="The memory has 1 rows, but there are 2 rows"):
            use(READER, memory=MEMORY[:1])
        with pytest.raises(ValueError, match=r"its mask has shape \(2, 4\)"):
            use(READER, memory=MEMORY, memory_mask=MEMORY_MASK[:, :4])
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3}, "16 is not a multiple of 3"),
        ({"positions": 0}, "`positions` must be at least 1, but is 0"),
        (
            {"activation": "gelu_10"},
            "Unknown activation function 'gelu_10'. Supported functions: 'gelu'",
        ),
        ({"attention_dropout": 1.0}, "`attention_dropout` must be at least 0 and less than 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


# As https://huggingface.co/openai-community/gpt2-medium has it, without its generation's defaults.
PUBLISHED = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 1024,
    "n_head": 16,
    "n_layer": 24,
    "n_positions": 1024,
    "n_special": 0,
    "predict_special_tokens": True,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "vocab_size": 50257,
}


def test_published_settings_are_read():
    config = read_config(GPT2Config, PUBLISHED)
    assert config == GPT2Config(50257, 1024, 24, 16, 4096, eos=(50256,), bos=50256)
    renamed = {n: v for n, v in PUBLISHED.items() if n not in ("n_embd", "n_positions")}
    renamed |= {"hidden_size": 1024, "max_position_embeddings": 1024}
    assert read_config(GPT2Config, renamed) == config


def test_settings_are_read_back():
    config = dataclasses.replace(
        CONFIG,
        activation="gelu",
        norm_eps=1e-6,
        tied=False,
        scale_scores=False,
        scale_by_layer=True,
        cross_attention=True,
        embed_dropout=0.2,
        residual_dropout=0.3,
        attention_dropout=0.4,
        eos=(3, 4),
        bos=5,
        pad=6,
    )
    settings = write_config(config)
    assert settings["n_inner"] == 24
    assert settings["eos_token_id"] == [3, 4]
    assert read_config(GPT2Config, settings) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rotary": True}, "`rotary`, which is True, is unknown"),
        ({"model_type": "gpt3"}, "`model_type` is 'gpt3'"),
        ({"is_encoder_decoder": True}, "`is_encoder_decoder` is True"),
        ({"hidden_size": 768}, "two names of one setting, but they are 768 and 1024"),
        ({"activation_function": "mish"}, "Unknown activation function 'mish'"),
    ],
)
def test_settings_that_would_change_results_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        read_config(GPT2Config, PUBLISHED | change)


def test_missing_sizes_are_refused():
    with pytest.raises(ValueError, match="`n_layer` is missing"):
        read_config(GPT2Config, {n: v for n, v in PUBLISHED.items() if n != "n_layer"})
