"""GPT-OSS: attention sinks and clamped experts against NumPy, and what holds for every decoder."""

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
)
from random_models import random_model, to_device

from redcoast import lora
from redcoast.models import Yarn
from redcoast.models._attention import attend
from redcoast.models._rotary import yarn_frequencies
from redcoast.models.gpt_oss import GptOss, GptOssConfig, _activate
from redcoast.pretrained._registry import read_config, write_config
from redcoast.pretrained.hf import gpt_oss as hf_gpt_oss

CONFIG = GptOssConfig(
    vocab=16, width=16, layers=2, heads=4, kv_heads=2, hidden=24, experts=4, chosen=2,
    local=(True, False), window=3, rope_scaling=Yarn(4.0, 16, fast=2.0, slow=0.5, amplitude=1.1),
)  # fmt: skip
SETTINGS = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


def make(**changes):
    return random_model(GptOss, dataclasses.replace(CONFIG, **changes))


def test_a_sink_takes_its_share_of_the_weights():
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 3, heads, 4)) for heads in (4, 2, 2))
    sinks = np.array([0.0, 3.0, -50.0, 60.0])
    visible = np.tril(np.ones((3, 3), bool))
    expected = np.zeros(q.shape)
    for head, query in np.ndindex(4, 3):
        scores = k[0, : query + 1, head // 2] @ q[0, query, head] / 2
        weights = np.exp(scores) / (np.exp(scores).sum() + np.exp(sinks[head]))
        expected[0, query, head] = weights @ v[0, : query + 1, head // 2]
    *args, sinks = [to_device(x, np.float32) for x in (q, k, v, sinks)]
    actual = jax.jit(attend)(*args, visible=to_device(visible)[None], sinks=sinks)
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_hidden_features_are_clamped():
    x = np.array([-20.0, -7.5, -1.0, 0.0, 2.0, 7.5])
    gate, up = np.minimum(x, 7.0), np.clip(x[::-1], -7.0, 7.0)
    expected = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
    args = [to_device(a, np.float32) for a in (x, x[::-1])]
    assert_close(_activate(7.0, *args), expected, 1e-6)


def test_yarn_keeps_short_wavelengths_and_scales_long_ones():
    scaling = Yarn(8.0, 4096, fast=32.0, slow=1.0)
    ratio = yarn_frequencies(64, 1e4, scaling) * 1e4 ** (np.arange(0, 64, 2) / 64)
    turns = 4096 / (2 * np.pi) * 1e4 ** -(np.arange(0, 64, 2) / 64)
    np.testing.assert_allclose(ratio[turns > 40], 1)
    np.testing.assert_allclose(ratio[turns < 0.7], 1 / 8)
    assert np.all(np.diff(ratio) < 1e-9)


@pytest.mark.thorough
def test_padding_changes_nothing():
    check_padding(make())


@pytest.mark.thorough
def test_segments_are_as_rows_of_their_own():
    check_segments(make())


@pytest.mark.thorough
def test_cache_is_as_all_at_once():
    check_cache(make())


@pytest.mark.thorough
def test_remat_changes_no_gradient():
    check_remat(lambda remat: make(remat=remat))


@pytest.mark.thorough
def test_experts_are_split():
    plan = check_split(make(vocab=256, width=64, hidden=64, heads=8, kv_heads=4))
    specs = plan.shardings.layers
    assert all("model" in specs_of.spec for specs_of in (specs.gate, specs.up, specs.down))


def test_settings_are_read_and_written():
    config = read_config(GptOssConfig, SETTINGS)
    assert config == GptOssConfig(
        vocab=201088, width=2880, layers=2, heads=64, kv_heads=8, hidden=2880, head_size=64,
        rope_scaling=Yarn(32.0, 4096, rounded=False, amplitude=0.1 * np.log(32).item() + 1),
        local=(True, False), window=128, router_loss_weight=0.9, eos=(200002,), pad=199999,
    )  # fmt: skip
    assert read_config(GptOssConfig, write_config(config)) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_bias": False}, "`attention_bias`"),
        ({"swiglu_alpha": 1.0}, "`swiglu_alpha`"),
        ({"layer_types": ["chunked_attention", "full_attention"]}, "chunked_attention"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "only 'default' and 'yarn'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "original_max_position_embed"),
    ],
)
def test_settings_that_are_not_implemented_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        read_config(GptOssConfig, SETTINGS | change)


def test_tables_name_every_array_and_biases_take_no_adapter():
    for tied in (False, True):
        config = dataclasses.replace(CONFIG, tied=tied)
        model = eqx.filter_eval_shape(GptOss, config, key=jax.random.key(0))
        leaves = jax.tree_util.tree_leaves_with_path(model)
        paths = {jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves}
        assert paths == hf_gpt_oss.tensors(config).keys()
    with pytest.raises(ValueError, match="matches none of the model's matrices"):
        lora.add_adapters(model, 2, targets="layers/.*_bias", key=jax.random.key(0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chosen": 5}, "`chosen` must be at most `experts`, but they are 5 and 4"),
        ({"local": (True,)}, "`local` must have one entry for each of the 2 layers, but has 1"),
        ({"window": None}, "`window` is None. Pass its size"),
        ({"limit": 0}, "`limit` must be positive"),
    ],
)
def test_values_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


def test_yarn_refuses_rotations_in_the_wrong_order():
    with pytest.raises(ValueError, match="less than `fast`, but they are 32 and 1"):
        Yarn(2.0, 4096, fast=1, slow=32)


def test_rows_and_caches_of_many_tokens_are_served():
    """There layers with and without a window choose between arrays, and not between views."""
    config = dataclasses.replace(CONFIG, local=(True, False), window=4, layers=2)
    model = eqx.filter_eval_shape(GptOss, config, key=jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((1, 2048), jnp.int32)
    assert eqx.filter_eval_shape(GptOss.hidden, model, tokens).shape == (1, 2048, config.width)
    cache = eqx.filter_eval_shape(GptOss.init_cache, model, 1, 4096)
    assert eqx.filter_eval_shape(GptOss.decode, model, tokens, cache)[0].shape[1] == 2048
