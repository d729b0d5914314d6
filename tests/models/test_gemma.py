"""Gemma against NumPy, its three generations' settings, and what holds for every decoder."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoder_checks import (
    assert_close,
    check_cache,
    check_padding,
    check_remat,
    check_segments,
    check_split,
    logits_of,
    make_tokens,
)
from random_models import random_model

from redcoast.models import RopeScaling
from redcoast.models.gemma import Gemma, GemmaConfig
from redcoast.pretrained._registry import read_config, write_config
from redcoast.pretrained.hf import gemma as hf_gemma

CONFIG = GemmaConfig(vocab=13, width=16, layers=3, heads=4, kv_heads=2, hidden=24, head_dim=6)
THIRD = dataclasses.replace(
    CONFIG,
    post_norms=True,
    qk_norm=True,
    local=(True, False, True),
    window=3,
    local_rope_base=20.0,
    rope_scaling=RopeScaling("linear", 2.0),
    score_scale=10,
    score_cap=2.0,
    logit_cap=3.0,
)
TOKENS = make_tokens(CONFIG)
FIRST_SETTINGS = {
    "architectures": ["GemmaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "head_dim": 256,
    "hidden_act": "gelu",
    "hidden_activation": None,
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 16384,
    "max_position_embeddings": 8192,
    "model_type": "gemma",
    "num_attention_heads": 8,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 256000,
}
SECOND_SETTINGS = FIRST_SETTINGS | {
    "model_type": "gemma2",
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 224,
    "sliding_window": 4096,
}
THIRD_SETTINGS = FIRST_SETTINGS | {
    "model_type": "gemma3_text",
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
}
del THIRD_SETTINGS["hidden_act"]


def make(config=THIRD, **changes):
    return random_model(Gemma, dataclasses.replace(config, **changes))


MODEL = make()


def numpy_logits(model, tokens):
    """One sequence by the papers' equations, in float64, one position at a time."""
    c, w = model.config, jax.tree.map(lambda x: np.asarray(x, np.float64), model)
    gelu = lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    cap = lambda x, at: x if at is None else at * np.tanh(x / at)

    def norm(x, scale):
        if scale is None:
            return x
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + c.norm_eps) * (1 + scale)

    def turn(x, position, local):
        base = c.local_rope_base if local and c.local_rope_base else c.rope_base
        stretch = c.rope_scaling.factor if c.rope_scaling and base == c.rope_base else 1
        half = x.shape[-1] // 2
        angle = position * base ** (-np.arange(half) / half) / stretch
        z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
        return np.concatenate([z.real, z.imag], axis=-1)

    x = w.embed[np.asarray(tokens)] * 4.0
    for i in range(c.layers):
        p = jax.tree.map(lambda leaf, i=i: leaf[i], w.layers)
        local = bool(c.local and c.local[i])
        y = norm(x, p.attention_norm)
        q, k, v = (np.einsum("sd,dhk->shk", y, m) for m in (p.wq, p.wk, p.wv))
        q, k = norm(q, p.q_norm), norm(k, p.k_norm)
        out = np.zeros_like(q)
        for s in range(len(tokens)):
            seen = range(max(0, s - c.window + 1) if local else 0, s + 1)
            for head in range(c.heads):
                group = head * c.kv_heads // c.heads
                query = turn(q[s, head], s, local)
                scores = [query @ turn(k[t, group], t, local) for t in seen]
                scores = np.array(scores) / np.sqrt(c.score_scale or c.head_dim)
                weights = np.exp(cap(scores, c.score_cap))
                out[s, head] = weights / weights.sum() @ v[list(seen), group]
        x = x + norm(np.einsum("shk,hkd->sd", out, p.wo), p.attention_post_norm)
        y = norm(x, p.mlp_norm)
        x = x + norm((gelu(y @ p.gate) * (y @ p.up)) @ p.down, p.mlp_post_norm)
    head = w.embed.T if w.head is None else w.head
    return cap(norm(x, w.norm) @ head, c.logit_cap)


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        dataclasses.replace(CONFIG, post_norms=True, local=(True, False, True), window=2),
        dataclasses.replace(THIRD, tied=False),
    ],
)
@pytest.mark.few("config2")
def test_matches_numpy(config):
    model = make(config)
    for row, logits in zip(TOKENS, logits_of(model, TOKENS), strict=True):
        np.testing.assert_allclose(logits, numpy_logits(model, row), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "change",
    [
        {"local": (False,) * 3},
        {"window": 4},
        {"local_rope_base": None},
        {"rope_scaling": None},
        {"score_scale": 6},
        {"score_cap": 9.0},
        {"logit_cap": None},
    ],
)
def test_each_switch_has_an_effect(change):
    changed, same = numpy_logits(make(**change), TOKENS[0]), numpy_logits(MODEL, TOKENS[0])
    assert np.max(np.abs(changed - same)) > 1e-3


@pytest.mark.thorough
def test_padding_changes_nothing():
    check_padding(MODEL)


@pytest.mark.thorough
def test_segments_are_as_rows_of_their_own():
    check_segments(MODEL)


@pytest.mark.thorough
def test_cache_is_as_all_at_once():
    check_cache(MODEL)


@pytest.mark.thorough
def test_remat_changes_no_gradient():
    check_remat(lambda remat: make(remat=remat))


@pytest.mark.thorough
def test_layers_are_split():
    plan = check_split(make(vocab=256, width=64, kv_heads=4, head_dim=16, hidden=128))
    layers = plan.shardings.layers
    assert all("model" in x.spec for x in (layers.wq, layers.wo, layers.gate, layers.down))


@pytest.mark.thorough
def test_bfloat16_is_close_and_scales_embeddings_as_rounded():
    model = make(CONFIG, width=18, layers=1)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), half)
    logits, expected = logits_of(half, TOKENS), logits_of(exact, TOKENS)
    assert logits.dtype == jnp.bfloat16
    assert_close(logits.astype(jnp.float32), expected, 0.05)
    # sqrt(18) = 4.2426 is 4.25 in bfloat16.
    assert "4.25:bf16" in str(jax.make_jaxpr(lambda model: model.hidden(TOKENS))(half))


@pytest.mark.thorough
def test_dropout_needs_a_key():
    model = make(attention_dropout=0.5)
    alone, dropped = eqx.filter_jit(lambda model, key: (model(TOKENS), model(TOKENS, key=key)))(
        model, jax.random.key(0)
    )
    assert_close(alone, logits_of(MODEL, TOKENS))
    assert jnp.max(jnp.abs(dropped - alone)) > 1e-3


@pytest.mark.thorough
def test_norms_begin_as_one():
    model = eqx.filter_jit(Gemma)(THIRD, key=jax.random.key(0))
    norms = [model.norm, *(x for name, x in vars(model.layers).items() if name.endswith("norm"))]
    assert len(norms) == 7
    assert all(jnp.all(x == 0) for x in norms)
    np.testing.assert_allclose(jnp.std(model.layers.gate), 1 / 4, rtol=0.1)


def test_published_settings_of_the_first_generation():
    config = read_config(GemmaConfig, FIRST_SETTINGS)
    assert config == GemmaConfig(
        vocab=256000,
        width=2048,
        layers=18,
        heads=8,
        kv_heads=1,
        hidden=16384,
        eos=(1,),
        bos=2,
        pad=0,
    )


def test_published_settings_of_the_second_generation():
    config = read_config(GemmaConfig, SECOND_SETTINGS)
    assert config.local == (True, False) * 9
    assert (config.window, config.score_scale, config.score_cap) == (4096, 224, 50.0)
    assert (config.logit_cap, config.post_norms, config.qk_norm) == (30.0, True, False)
    assert config.local_rope_base is None


def test_published_settings_of_the_third_generation():
    config = read_config(GemmaConfig, THIRD_SETTINGS)
    assert config.local == ((True,) * 5 + (False,)) * 3
    assert (config.rope_base, config.local_rope_base, config.window) == (1e6, 1e4, 512)
    assert (config.post_norms, config.qk_norm, config.eos) == (True, True, (1, 106))
    # As `transformers` writes them now.
    near = {"rope_type": "default", "rope_theta": 10000}
    far = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000}
    new = {k: v for k, v in THIRD_SETTINGS.items() if not k.startswith(("rope", "sliding_window_"))}
    new["rope_parameters"] = {"sliding_attention": near, "full_attention": far}
    new["layer_types"] = (["sliding_attention"] * 5 + ["full_attention"]) * 3
    stretched = dataclasses.replace(config, rope_scaling=RopeScaling("linear", 8.0))
    assert read_config(GemmaConfig, new) == stretched


@pytest.mark.parametrize("settings", [FIRST_SETTINGS, SECOND_SETTINGS, THIRD_SETTINGS])
def test_settings_that_are_written_are_read(settings):
    config = read_config(GemmaConfig, settings)
    written = write_config(config)
    assert written["model_type"] == settings["model_type"]
    assert read_config(GemmaConfig, written) == config


@pytest.mark.parametrize(
    ("settings", "change"),
    [
        (FIRST_SETTINGS, {"query_pre_attn_scalar": 144}),
        (FIRST_SETTINGS, {"hidden_act": "relu"}),
        (FIRST_SETTINGS, {"attention_bias": True}),
        (SECOND_SETTINGS, {"use_bidirectional_attention": True}),
        (SECOND_SETTINGS, {"layer_types": ["chunked_attention"] * 18}),
        (SECOND_SETTINGS, {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}),
        (THIRD_SETTINGS, {"attn_logit_softcapping": 50.0}),
        (
            THIRD_SETTINGS,
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        ),
    ],
)
def test_settings_that_are_not_implemented_are_refused(settings, change):
    with pytest.raises(ValueError, match=f"`{next(iter(change))}`"):
        read_config(GemmaConfig, settings | change)


@pytest.mark.parametrize(
    "change",
    [{"qk_norm": True}, {"logit_cap": 30.0}, {"score_scale": 144}],
)
def test_a_mixture_of_generations_is_not_written(change):
    with pytest.raises(ValueError, match="No generation of Gemma"):
        write_config(dataclasses.replace(CONFIG, **change))


def test_a_scaling_that_a_file_cannot_say_is_not_written():
    """Layers with a window: a file of the third generation scales none of them, and one of the
    second scales all."""
    scaled = RopeScaling("linear", 2.0)
    third = read_config(GemmaConfig, THIRD_SETTINGS)
    third = dataclasses.replace(third, local_rope_base=None, rope_scaling=scaled)
    second = read_config(GemmaConfig, SECOND_SETTINGS)
    second = dataclasses.replace(second, local_rope_base=second.rope_base, rope_scaling=scaled)
    for config in (third, second):
        with pytest.raises(ValueError, match="No generation of Gemma"):
            write_config(config)
    for config in (third, second):
        write_config(dataclasses.replace(config, rope_scaling=None))


@pytest.mark.parametrize("config", [CONFIG, THIRD, dataclasses.replace(THIRD, tied=False)])
def test_tables_name_every_array(config):
    model = eqx.filter_eval_shape(Gemma, config, key=jax.random.key(0))
    leaves = jax.tree_util.tree_leaves_with_path(model)
    paths = {jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves}
    assert paths == hf_gemma.tensors(config).keys()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 5}, "must be even, but is 5"),
        ({"local": (True,)}, "each of the 3 layers, but has 1"),
        ({"local": (True,) * 3}, "`window` is None. Pass its size"),
        ({"kv_heads": 3}, "4 is not a multiple of 3"),
        ({"attention_dropout": 1.0}, "must be at least 0 and less than 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


def test_rows_and_caches_of_many_tokens_are_served():
    """There layers with and without a window choose between arrays, and not between views."""
    config = dataclasses.replace(CONFIG, local=(True, False), window=4, layers=2)
    model = eqx.filter_eval_shape(Gemma, config, key=jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((1, 2048), jnp.int32)
    assert eqx.filter_eval_shape(Gemma.hidden, model, tokens).shape == (1, 2048, config.width)
    cache = eqx.filter_eval_shape(Gemma.init_cache, model, 1, 4096)
    assert eqx.filter_eval_shape(Gemma.decode, model, tokens, cache)[0].shape[1] == 2048
