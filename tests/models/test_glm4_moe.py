"""GLM-4's mixtures of experts: what holds for every decoder, and their files."""

import dataclasses

import equinox as eqx
import jax
import pytest
from decoder_checks import check_cache, check_padding, check_remat, check_segments, check_split
from random_models import random_model

from redcoast.models import Glm4Moe, Glm4MoeConfig, RopeScaling
from redcoast.pretrained._registry import find_family, read_config, write_config
from redcoast.pretrained.hf import glm4_moe as hf_glm4_moe

CONFIG = Glm4MoeConfig(
    vocab=16, width=16, layers=3, heads=4, kv_heads=2, hidden=24, expert_hidden=8, experts=8,
    chosen=3, shared=2, groups=4, chosen_groups=2, head_size=6, rotary_dim=4, qkv_bias=True,
    qk_norm=True,
)  # fmt: skip
# What the file of GLM-4.5 says.
SETTINGS = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338],
    "first_k_dense_replace": 3,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 92,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 151329,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0",
    "use_cache": True,
    "use_qk_norm": True,
    "vocab_size": 151552,
}


def make(**changes):
    return random_model(Glm4Moe, dataclasses.replace(CONFIG, **changes))


@pytest.mark.thorough
def test_cache_of_both_kinds_of_layers():
    check_cache(make())


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
def test_heads_and_experts_are_split():
    sizes = {"vocab": 256, "width": 64, "hidden": 128, "expert_hidden": 64, "head_size": 8}
    plan = check_split(make(**sizes, heads=8, kv_heads=4))
    layers = plan.shardings.layers
    split = (layers.wq, layers.wo, layers.gate, layers.up, layers.down)
    assert all("model" in leaf.spec for leaf in split)


def test_published_settings_are_read_and_written():
    family, config = find_family(SETTINGS, "glm")
    assert family.model is Glm4Moe
    assert config == Glm4MoeConfig(
        vocab=151552, width=5120, layers=92, heads=96, kv_heads=8, hidden=12288,
        expert_hidden=1536, dense_layers=3, experts=160, route_scale=2.5, head_size=128,
        rotary_dim=64, rope_base=1000000, qkv_bias=True, qk_norm=True, pad=151329,
        eos=(151329, 151336, 151338),
    )  # fmt: skip
    scaled = dataclasses.replace(CONFIG, rope_scaling=RopeScaling("linear", 2.0))
    for each in (config, CONFIG, scaled):
        assert read_config(Glm4MoeConfig, write_config(each)) == each


def test_the_part_of_a_head_that_rotates_is_read_from_either_place():
    rope = {"rope_type": "default", "rope_theta": 1e4}
    for change, expected in (
        ({"partial_rotary_factor": None}, 64),  # half of a head, as in `transformers`
        ({"partial_rotary_factor": 0.25}, 32),
        ({"rope_parameters": rope | {"partial_rotary_factor": 1.0}}, None),
    ):
        assert read_config(Glm4MoeConfig, SETTINGS | change).rotary_dim == expected
    with pytest.raises(ValueError, match="A `rotary_dim` of 30 cannot be saved"):
        write_config(dataclasses.replace(CONFIG, head_size=44, rotary_dim=30))


def test_tables_name_every_array():
    for changes in ({}, {"tied": True, "qkv_bias": False, "qk_norm": False, "dense_layers": 0}):
        config = dataclasses.replace(CONFIG, **changes)
        model = eqx.filter_eval_shape(Glm4Moe, config, key=jax.random.key(0))
        leaves = {
            jax.tree_util.keystr(path, simple=True, separator="/")
            for path, _ in jax.tree_util.tree_leaves_with_path(model)
        }
        assert leaves == hf_glm4_moe.tensors(config).keys()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rotary_dim": 8}, "`rotary_dim` must be even, positive and at most the head size 6"),
        ({"kv_heads": 3}, "`heads` must be a multiple of `kv_heads`"),
        ({"kv_heads": 0}, "`kv_heads` must be at least 1"),
        ({"dense_layers": 3}, "less than `layers`, but they are 3 and 3"),
        ({"chosen": 5}, "`chosen` must be at most 4, the experts of `chosen_groups` groups"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)
