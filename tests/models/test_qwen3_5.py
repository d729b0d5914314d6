"""Qwen3.5: what holds for every decoder, its plan and its files."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from decoder_checks import (
    assert_close,
    check_cache,
    check_padding,
    check_remat,
    check_split,
    logits_of,
    make_tokens,
)
from random_models import random_model

from redcoast.models import Qwen3_5, Qwen3_5Config, RopeScaling, Yarn
from redcoast.pretrained._registry import find_family, read_config, write_config
from redcoast.pretrained._tensors import tensor_names, tensor_shape
from redcoast.pretrained.hf import qwen3_5 as hf_qwen3_5

CONFIG = Qwen3_5Config(
    vocab=16, width=16, layers=4, heads=4, kv_heads=2, hidden=24, head_size=6, rotary_dim=4,
    key_heads=2, value_heads=4, key_size=4, value_size=6, taps=3, chunk=4,
    linear=(True, False, True, False), norm_eps=0.01,
)  # fmt: skip
ROUTED = {"hidden": 8, "experts": 4, "chosen": 2, "shared_hidden": 12}
# What the file of Qwen3.5-35B-A3B says of its language model.
SETTINGS = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 10,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 512,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "use_cache": True,
    "vocab_size": 248320,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
}


def make(**changes):
    return random_model(Qwen3_5, dataclasses.replace(CONFIG, **changes))


@pytest.mark.thorough
def test_cache_of_both_kinds_of_layers():
    check_cache(make(layers=2, linear=(True, False)))


@pytest.mark.thorough
def test_cache_of_a_mixture():
    check_cache(make(**ROUTED))


@pytest.mark.thorough
def test_layers_in_a_loop_are_as_one_after_the_other():
    tokens = make_tokens(CONFIG)
    unrolled, loop = (make(unroll=unroll) for unroll in (4, 1))
    assert_close(logits_of(loop, tokens), logits_of(unrolled, tokens), 1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("changes", [{}, ROUTED], ids=["dense", "routed"])
def test_padding_changes_nothing(changes):
    check_padding(make(**changes))


@pytest.mark.thorough
def test_a_prompt_padded_on_the_right_leaves_no_trace_in_the_states():
    model, tokens = make(linear=(True,) * 4), make_tokens(CONFIG, (2, 6))
    mask = jnp.arange(6)[None] < jnp.array([[6], [4]])
    decode = eqx.filter_jit(lambda model, *args, **options: model.decode(*args, **options))
    states = decode(model, tokens, model.init_cache(2, 8), mask=mask)[1].states
    short = decode(model, tokens[:, :4], model.init_cache(2, 8))[1].states
    assert_close(states.state[:, 1], short.state[:, 1], 1e-5)


@pytest.mark.thorough
def test_remat_changes_no_gradient():
    check_remat(lambda remat: make(remat=remat))


@pytest.mark.thorough
@pytest.mark.parametrize("routed", [False, True])
def test_heads_are_split(routed):
    sizes = {"vocab": 256, "width": 64, "head_size": 16, "heads": 8, "kv_heads": 4}
    sizes |= {"key_heads": 4, "value_heads": 8, "key_size": 8, "value_size": 8, "hidden": 128}
    sizes |= {"experts": 8, "chosen": 2, "hidden": 64, "shared_hidden": 64} if routed else {}
    shardings = check_split(make(**sizes)).shardings
    linear, attention = shardings.linear, shardings.attention
    split = [linear.wq, linear.wv, linear.wz, linear.wo, linear.conv_k, linear.log_decay]
    split += [attention.wq, attention.wz, attention.wk, attention.wo, linear.up, attention.down]
    assert all("model" in leaf.spec for leaf in split)


def test_published_settings_are_read_and_written():
    wrapped = {"model_type": "qwen3_5_moe", "text_config": SETTINGS, "tie_word_embeddings": False}
    family, config = find_family(wrapped, "qwen")
    assert family.model is Qwen3_5
    assert config == Qwen3_5Config(
        vocab=248320, width=2048, layers=40, heads=16, kv_heads=2, hidden=512, head_size=256,
        rotary_dim=64, experts=256, eos=(248044,),
    )  # fmt: skip
    yarn = dataclasses.replace(CONFIG, rope_scaling=Yarn(4.0, 16))
    linear = dataclasses.replace(CONFIG, rope_scaling=RopeScaling("linear", 2.0), **ROUTED)
    for each in (config, CONFIG, yarn, linear):
        # The number of tokens that are computed at once is not a setting of files.
        assert read_config(Qwen3_5Config, write_config(each)) == dataclasses.replace(each, chunk=64)


@pytest.mark.parametrize("changes", [{}, {**ROUTED, "tied": True}, {"linear": (True,) * 4}])
def test_tables_name_every_array(changes):
    config = dataclasses.replace(CONFIG, **changes)
    model = eqx.filter_eval_shape(Qwen3_5, config, key=jax.random.key(0))
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(model)
    }
    table = hf_qwen3_5.tensors(config)
    assert leaves.keys() == table.keys()
    total = 2 * 8 + 24
    for name in ("wq", "wk", "wv"):
        path = f"linear/{name}"
        assert tensor_shape(table[path], leaves[path]) == (total, 16)
    names = tensor_names(table["linear/up"], leaves["linear/up"])
    numbers = [i for i, linear in enumerate(config.linear) if linear]
    assert {int(name.split(".")[2]) for name in names.values()} == {*numbers}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_output_gate": False}, "`attn_output_gate` is False"),
        ({"hidden_act": "gelu"}, "`hidden_act` is 'gelu'"),
        ({"layer_types": ["sliding_attention"] * 40}, r"`layer_types` has \['sliding_attention'\]"),
        ({"norm_topk_prob": False}, "`norm_topk_prob` is False"),
    ],
)
def test_settings_that_are_not_implemented_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        read_config(Qwen3_5Config, SETTINGS | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value_heads": 3}, "`value_heads` must be a multiple of `key_heads`"),
        ({"chunk": 48}, "`chunk` must be a power of two, but is 48"),
        ({"linear": (True,)}, "`linear` must have one entry for each of the 4 layers"),
        ({"rotary_dim": 8}, "`rotary_dim` must be even, positive and at most the head size 6"),
        ({"experts": 2, "chosen": 3}, "`chosen` must be at most `experts`"),
    ],
)
def test_values_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


def test_texts_in_one_row_are_refused():
    tokens = jnp.zeros((1, 4), jnp.int32)
    model = eqx.filter_eval_shape(Qwen3_5, CONFIG, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"does not take `segments`.*one text into each row"):
        model(tokens, segments=tokens)
    with pytest.raises(ValueError, match="has no experts, and so no loss of their routers"):
        model.hidden_and_router_loss(tokens)
