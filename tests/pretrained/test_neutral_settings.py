"""Settings that change nothing are passed over, and all others are refused by name."""

import math

import pytest

from redcoast.models import LlamaConfig, RopeScaling, Yarn
from redcoast.pretrained._registry import find_family, read_config, write_config

LLAMA = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
PLAIN = read_config(LlamaConfig, LLAMA)
NEUTRAL = {
    "off": {"use_mrope": False, "alibi": False, "num_experts": 0, "clip_qkv": None, "extra": {}},
    "off in another way": {"attention_bias": None, "mlp_bias": 0, "is_encoder_decoder": None},
    "nothing": {"rope_scaling": {}, "quantization_config": None, "layer_types": None},
    "factors of 1": {"logit_scale": 1.0, "residual_multiplier": 1, "rotary_pct": 1.0},
    "lengths": {"max_sequence_length": 2048, "model_max_length": 4096, "n_ctx": 2048},
    "tokens": {"bos_token": "<s>", "padding_side": "left", "image_token_id": 5},
    "training": {"router_aux_loss_coef": 0.1, "resid_pdrop": 0.1, "neftune_noise_alpha": 5},
    "tools": {"unsloth_version": "2024.9", "_flash_attn_2_enabled": True, "use_flash_attn": True},
    "history": {"base_model": "x", "license": "mit", "_commit_hash": "0a1b"},
    "same function": {"hidden_act": "swish"},
    "no dropout": {"attention_dropout": None},
    "no ties": {"tie_word_embeddings": None},
    "default rope": {"rope_scaling": {"type": "default", "factor": 4.0, "mrope_section": [1, 1]}},
    "nulls in rope": {"rope_parameters": {"rope_type": None, "rope_theta": None, "factor": None}},
}
MEANT = {
    "attention_bias": True,
    "use_qk_norm": True,
    "alibi": True,
    "logit_scale": 0.06,
    "embedding_multiplier": 12,
    "num_experts": 8,
    "final_logit_softcapping": 30.0,
    "rotary_pct": 0.25,
    "is_causal": False,
    "use_rope": False,
    "hidden_act": "gelu",
    "sliding_window_pattern": 6,
    "num_register_tokens": 4,
    "position_embedding_type": "alibi",
    "quantization_config": {"quant_method": "hqq"},
    "is_encoder_decoder": True,
    "rope_scaling": {"type": "linear", "factor": 2.0, "speed": 2.0},
    "something_new": 1,
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_what_changes_nothing_is_passed_over(name):
    assert read_config(LlamaConfig, {**LLAMA, **NEUTRAL[name]}) == PLAIN


@pytest.mark.parametrize("name", MEANT)
def test_what_might_change_results_is_refused_by_name(name):
    word = "quantised" if "quant" in name else "speed" if "rope_s" in name else f"`{name}`"
    with pytest.raises(ValueError, match=word):
        find_family({**LLAMA, name: MEANT[name]}, "file")


YARN = {"factor": 4.0, "original_max_position_embeddings": 512}
SCALED = {
    "yarn": (YARN, Yarn(4.0, 512, amplitude=0.1 * math.log(4.0) + 1)),
    "yarn of its context": (
        {"factor": 4.0, "beta_fast": None, "attention_factor": 1.5},
        Yarn(4.0, 2048, amplitude=1.5),
    ),
    "yarn by lengths": (
        {"original_max_position_embeddings": 512, "attention_factor": 1.5},
        Yarn(4.0, 512, amplitude=1.5),
    ),
    "dynamic": ({"factor": 3.0}, RopeScaling("dynamic", 3.0, original=2048)),
}


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral"])
def test_long_contexts_are_read_and_written(name, kind):
    rope, expected = SCALED[name]
    rope = {"type": name.split()[0], **rope}
    settings = LLAMA | {"model_type": kind, "rope_scaling": rope, "head_dim": 4}
    settings |= {"num_key_value_heads": 4}
    if kind in ("qwen3_moe", "mixtral"):
        settings |= {"num_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
        settings |= {"norm_topk_prob": True} if kind == "qwen3_moe" else {}
        settings |= {"num_local_experts": settings.pop("num_experts")} if kind == "mixtral" else {}
        settings.pop("moe_intermediate_size") if kind == "mixtral" else None
    family, config = find_family(settings, "file")
    actual = config.rope_scaling
    assert type(actual) is type(expected)
    assert vars(actual) == vars(expected)
    assert read_config(family.config, write_config(config)) == config


def test_dynamic_embeddings_of_another_length_cannot_be_saved():
    scaling = RopeScaling("dynamic", 2.0, original=64)
    config = LlamaConfig(32, 16, 2, 4, 4, 24, rope_scaling=scaling, context=128)
    with pytest.raises(ValueError, match="is 64, and `context` is 128"):
        write_config(config)
