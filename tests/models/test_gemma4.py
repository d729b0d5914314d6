"""Gemma 4: what holds for every decoder, its kinds of layers and its files."""

import dataclasses
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from decoder_checks import (
    assert_close,
    check_cache,
    check_padding,
    check_remat,
    check_segments,
    check_split,
    gradient_of,
    logits_of,
    make_tokens,
)
from random_models import random_model

import redcoast as rc
from redcoast.models import Gemma4, Gemma4Config
from redcoast.pretrained._match import layout_of
from redcoast.pretrained._registry import find_family, read_config, write_config
from redcoast.pretrained.hf import gemma4 as hf_gemma4

CONFIG = Gemma4Config(
    vocab=16, width=16, layers=6, heads=4, kv_heads=2, hidden=24, head_dim=6, global_head_dim=8,
    rotary_dim=4, window=3, local=(True, False) * 3, shared_layers=2, wide_shared=True,
    layer_size=4, layer_vocab=16, logit_cap=5.0,
)  # fmt: skip
ROUTED = {"experts": 4, "chosen": 2, "expert_hidden": 8, "shared_layers": 0, "layer_size": None}
ROUTED |= {"keys_are_values": True, "global_kv_heads": 1, "layer_vocab": None, "wide_shared": False}
# A file as the small models have it.
SETTINGS = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_k_eq_v": False,
    "bos_token_id": 2,
    "dtype": "bfloat16",
    "enable_moe_block": False,
    "eos_token_id": 1,
    "expert_intermediate_size": None,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1536,
    "hidden_size_per_layer_input": 256,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
    "max_position_embeddings": 131072,
    "model_type": "gemma4_text",
    "num_attention_heads": 8,
    "num_experts": None,
    "num_global_key_value_heads": None,
    "num_hidden_layers": 35,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "full_attention": {
            "partial_rotary_factor": 0.25,
            "rope_theta": 1000000.0,
            "rope_type": "proportional",
        },
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "top_k_experts": None,
    "use_bidirectional_attention": None,
    "use_cache": True,
    "use_double_wide_mlp": True,
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
}


def make(**changes):
    return random_model(Gemma4, dataclasses.replace(CONFIG, **changes))


@pytest.mark.thorough
def test_cache_of_all_kinds_of_layers():
    check_cache(make(layers=4, local=(True, False) * 2))


@pytest.mark.thorough
def test_cache_of_a_mixture():
    check_cache(make(**ROUTED))


@pytest.mark.thorough
def test_without_windows_their_cache_is_empty():
    model = make(layers=2, local=(False, False), shared_layers=0)
    tokens = rc.generate(model, make_tokens(CONFIG, (2, 5)), max_new_tokens=3, eos=())
    logits = logits_of(model, tokens)
    # Each new token is the likeliest one after those before it.
    assert (tokens[:, 5:] == jnp.argmax(logits[:, 4:-1], axis=-1)).all()


@pytest.mark.thorough
def test_layers_in_a_loop_are_as_one_after_the_other():
    tokens = make_tokens(CONFIG)
    unrolled, loop = (make(unroll=unroll) for unroll in (6, 1))
    assert_close(logits_of(loop, tokens), logits_of(unrolled, tokens), 1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("changes", [{}, ROUTED], ids=["dense", "routed"])
def test_padding_changes_nothing(changes):
    check_padding(make(**changes))


@pytest.mark.thorough
def test_segments_are_as_rows_of_their_own():
    check_segments(make())


@pytest.mark.thorough
def test_remat_changes_no_gradient():
    check_remat(lambda remat: make(remat=remat))


@pytest.mark.thorough
@pytest.mark.parametrize("changes", [{}, ROUTED], ids=["dense", "routed"])
def test_heads_are_split(changes):
    sizes = {"vocab": 256, "width": 64, "head_dim": 16, "global_head_dim": 32, "heads": 8}
    sizes |= {"kv_heads": 4, "hidden": 128, "layer_size": 16, "layer_vocab": 256}
    sizes |= changes | ({"experts": 8, "global_kv_heads": 4} if changes else {})
    shardings = check_split(make(**sizes)).shardings
    for layers in (shardings.near, shardings.far):
        split = (layers.wq, layers.wk, layers.wo, layers.gate, layers.down)
        assert all("model" in leaf.spec for leaf in split)


@pytest.mark.thorough
def test_what_multiplies_a_layer_has_no_gradient():
    gradient = gradient_of(make(), make_tokens(CONFIG))
    assert not jnp.any(gradient.near.scalar)
    assert jnp.any(gradient.near.wk)


def test_published_settings_are_read_and_written():
    wrapped = {"model_type": "gemma4", "text_config": SETTINGS, "tie_word_embeddings": True}
    family, config = find_family(wrapped, "gemma")
    assert family.model is Gemma4
    assert config == Gemma4Config(
        vocab=262144, width=1536, layers=35, heads=8, kv_heads=1, hidden=6144, rotary_dim=128,
        local=((True,) * 4 + (False,)) * 7, shared_layers=20, wide_shared=True, layer_size=256,
        layer_vocab=262144, logit_cap=30.0, bos=2, pad=0, eos=(1,),
    )  # fmt: skip
    assert config.kinds == (("near",) * 4 + ("far",)) * 3 + (
        (("near_shared",) * 4 + ("far_shared",)) * 4
    )
    routed = dataclasses.replace(CONFIG, **ROUTED)
    for each in (config, CONFIG, routed, dataclasses.replace(CONFIG, rotary_dim=None)):
        assert read_config(Gemma4Config, write_config(each)) == each


def test_heads_of_layers_without_a_window_are_read_from_either_place():
    far = {"head_dim": 64, "num_key_value_heads": 1}
    numbers = [f"{i:02}" for i in range(4, 35, 5)]
    newer = {name: x for name, x in SETTINGS.items() if "global" not in name}
    newer["attention_k_eq_v"] = True
    config = read_config(Gemma4Config, newer | {"per_layer_config": dict.fromkeys(numbers, far)})
    assert (config.global_head_dim, config.far_kv_heads, config.rotary_dim) == (64, 1, 16)
    with pytest.raises(ValueError, match="`per_layer_config` gives layers other settings"):
        read_config(Gemma4Config, newer | {"per_layer_config": {"3": far}})


@pytest.mark.parametrize("changes", [{}, {**ROUTED, "tied": False}], ids=["dense", "routed"])
def test_tables_name_every_array(changes):
    config = dataclasses.replace(CONFIG, **changes)
    model = eqx.filter_eval_shape(Gemma4, config, key=jax.random.key(0))
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_leaves_with_path(model)
    }
    assert leaves == hf_gemma4.tensors(config).keys()


def test_keys_and_values_that_a_file_has_and_no_layer_uses_are_left_out():
    names = ["model.layers.4.self_attn.k_proj.weight", "model.layers.5.self_attn.v_norm.weight"]
    needed = ["model.layers.3.self_attn.k_proj.weight", "model.layers.4.self_attn.q_proj.weight"]
    buffers = layout_of(CONFIG).buffers
    unused = [name for name in names + needed if any(re.search(x, name) for x in buffers)]
    assert unused == names
    assert not layout_of(dataclasses.replace(CONFIG, shared_layers=0)).buffers


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_bias": True}, "`attention_bias` is True"),
        ({"use_bidirectional_attention": "all"}, "`use_bidirectional_attention` is 'all'"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0}}},
            "'full_attention' are .* only the types 'default' and 'proportional'",
        ),
        ({"rope_parameters": {"rope_theta": 1e4}}, "must have entries 'sliding_attention'"),
    ],
)
def test_settings_that_are_not_implemented_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        read_config(Gemma4Config, SETTINGS | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"local": (True,) * 6}, "`local` gives the last layer a window"),
        ({"shared_layers": 6}, "`shared_layers` must be at least 0 and less than `layers`"),
        ({"shared_layers": 5}, "no layer before them without a window has keys and values"),
        ({"global_kv_heads": 1}, "`global_kv_heads` needs `keys_are_values`"),
        ({"rotary_dim": 10}, "`rotary_dim` must be even and at most `global_head_dim`"),
        ({"global_head_dim": 7}, "`global_head_dim` must be even"),
    ],
)
def test_values_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)
