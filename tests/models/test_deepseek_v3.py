"""DeepSeek-V3: its routing against NumPy, what holds for every decoder, and its files."""

import dataclasses
import json

import equinox as eqx
import jax
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
from redcoast.models import DeepseekV3, DeepseekV3Config, Yarn
from redcoast.models._shared_experts import route
from redcoast.pretrained._registry import read_config, write_config
from redcoast.pretrained._tensors import tensor_names, tensor_shape
from redcoast.pretrained.hf import deepseek_v3 as hf_deepseek_v3

CONFIG = DeepseekV3Config(
    vocab=16, width=16, layers=3, heads=4, hidden=24, expert_hidden=8, dense_layers=1, experts=8,
    chosen=3, shared=2, groups=4, chosen_groups=2, q_rank=12, kv_rank=8, plain_size=6, rope_size=4,
    value_size=5, rope_scaling=Yarn(4.0, 16, fast=2.0, slow=0.5, amplitude=1.1), score_scaling=0.7,
)  # fmt: skip
# What the published file says, but for its quantisation.
SETTINGS = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def make(**changes):
    return random_model(DeepseekV3, dataclasses.replace(CONFIG, **changes))


@pytest.mark.parametrize("weights_sum_to_one", [True, False])
def test_experts_are_chosen_within_the_best_groups(weights_sum_to_one):
    rng = np.random.default_rng(0)
    scores, correction = rng.uniform(size=(2, 5, 8)), rng.normal(size=8)
    expected = np.zeros_like(scores)
    for at in np.ndindex(2, 5):
        choice = (scores[at] + correction).reshape(4, 2)
        groups = np.argsort(-choice.sum(axis=1))[:2]
        allowed = np.repeat(np.isin(np.arange(4), groups), 2)
        best = np.argsort(-np.where(allowed, choice.reshape(-1), -np.inf))[:3]
        weights = scores[at][best]
        expected[at][best] = 2.5 * weights / (weights.sum() if weights_sum_to_one else 1)
    config = dataclasses.replace(CONFIG, weights_sum_to_one=weights_sum_to_one)
    actual = route(to_device(scores), to_device(correction), config)
    assert_close(actual, expected, 1e-6)


def test_cache_holds_latent_features():
    cache = eqx.filter_eval_shape(DeepseekV3.init_cache, make(), 2, 9)
    assert (cache.k.shape, cache.v.shape) == ((3, 2, 9, 1, 8), (3, 2, 9, 1, 4))


@pytest.mark.thorough
def test_cache_is_as_all_at_once():
    """One token after the other, too, for which keys and values are not expanded."""
    one = {"dense_layers": 0, "layers": 1, "groups": 1, "chosen_groups": 1}
    check_cache(make(rope_scaling=None, q_rank=None, **one))


@pytest.mark.thorough
def test_cache_of_both_kinds_of_layers():
    check_cache(make())


@pytest.mark.thorough
def test_adapted_keys_and_values_are_decoded():
    model = lora.add_adapters(make(), 2, targets="/w[qkvo]$", key=jax.random.key(0))
    noise = lambda x: to_device(np.random.default_rng(0).normal(0, 0.3, x.shape), x.dtype)
    check_cache(lora.with_adapters(model, jax.tree.map(noise, lora.adapters(model))))


@pytest.mark.thorough
def test_padding_changes_nothing():
    check_padding(make())


@pytest.mark.thorough
def test_segments_are_as_rows_of_their_own():
    check_segments(make())


@pytest.mark.thorough
def test_remat_changes_no_gradient():
    check_remat(lambda remat: make(remat=remat))


@pytest.mark.thorough
def test_experts_are_split():
    sizes = {"vocab": 256, "width": 64, "hidden": 128, "expert_hidden": 64, "heads": 8}
    plan = check_split(make(**sizes, q_rank=32, kv_rank=32, plain_size=8, value_size=8))
    layers = plan.shardings.layers
    assert all("model" in leaf.spec for leaf in (layers.gate, layers.up, layers.down))


def test_published_settings_are_read_and_written():
    config = read_config(DeepseekV3Config, SETTINGS)
    assert config == DeepseekV3Config(
        vocab=129280, width=7168, layers=61, heads=128, hidden=18432, expert_hidden=2048,
        rope_scaling=Yarn(40, 4096), score_scaling=1.0, context=163840, bos=0, eos=(1,),
    )  # fmt: skip
    assert read_config(DeepseekV3Config, write_config(config)) == config
    assert read_config(DeepseekV3Config, write_config(CONFIG)) == CONFIG


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_bias": True}, "`attention_bias`"),
        ({"scoring_func": "softmax"}, "`scoring_func` is 'softmax'"),
        ({"num_key_value_heads": 64}, "`num_key_value_heads` is 64, but only 128"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "only 'default' and 'yarn'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "original_max_position_embed"),
        ({"rope_scaling": {"type": "yarn", "speed": 2.0}}, "unknown settings: .'speed'"),
    ],
)
def test_settings_that_are_not_implemented_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        read_config(DeepseekV3Config, SETTINGS | change)


def test_tables_name_every_array_and_layers_without_experts_come_first():
    for changes in ({}, {"tied": True, "q_rank": None, "dense_layers": 0}):
        config = dataclasses.replace(CONFIG, **changes)
        model = eqx.filter_eval_shape(DeepseekV3, config, key=jax.random.key(0))
        leaves = {
            jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape
            for path, leaf in jax.tree_util.tree_leaves_with_path(model)
        }
        assert leaves.keys() == hf_deepseek_v3.tensors(config).keys()
    table = hf_deepseek_v3.tensors(CONFIG)
    model = eqx.filter_eval_shape(DeepseekV3, CONFIG, key=jax.random.key(0))
    names = tensor_names(table["layers/gate"], model.layers.gate.shape)
    assert names[1, 5] == "model.layers.2.mlp.experts.5.gate_proj.weight"
    assert {*tensor_names(table["dense/gate"], model.dense.gate.shape).values()} == {
        "model.layers.0.mlp.gate_proj.weight"
    }
    # Keys and values, and latent and rotated features, are in one tensor.
    assert tensor_shape(table["layers/wk"], model.layers.wk.shape) == (4 * 11, 8)
    assert tensor_shape(table["layers/k_rope"], model.layers.k_rope.shape) == (12, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_size": 3}, "`rope_size` must be even"),
        ({"route_scale": 0}, "`route_scale` must be positive"),
        ({"dense_layers": 3}, "less than `layers`, but they are 3 and 3"),
        ({"groups": 8}, "at least two for each, but they are 8 and 8"),
        ({"groups": 3}, "`experts` must be a multiple of `groups`"),
        ({"chosen_groups": 5}, "`chosen_groups` must be at most `groups`"),
        ({"chosen": 5}, "`chosen` must be at most 4, the experts of `chosen_groups` groups"),
        ({"q_rank": 0}, "`q_rank` must be at least 1"),
    ],
)
def test_values_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


@pytest.mark.thorough
def test_adapters_of_some_layers_are_named_one_by_one(tmp_path):
    """In the patterns of an adapter's ranks, because other layers have modules of the same name."""
    model = lora.add_adapters(make(), 2, targets="dense/wo", key=jax.random.key(0))
    model = lora.add_adapters(model, 3, targets="layers/wo", key=jax.random.key(0))
    lora.save_adapters(model, tmp_path / "adapters")
    settings = json.loads((tmp_path / "adapters/adapter_config.json").read_text())
    names = [rf"model\.layers\.{i}\.self_attn\.o_proj" for i in range(3)]
    ranks = {names[0]: 2} if settings["r"] == 3 else {"|".join(names[1:]): 3}
    assert settings["rank_pattern"] == ranks
    again = lora.load_adapters(make(), tmp_path / "adapters")
    assert jax.tree.structure(lora.adapters(again)) == jax.tree.structure(lora.adapters(model))
