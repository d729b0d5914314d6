"""Qwen3.5 and its mixtures of experts against `transformers`."""

# pyright: reportMissingImports=false

import pytest
from harness import Case, check_generation, check_outputs, check_training
from transformers import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    # The outputs of a first token have the size of one product of a query and a key. Without more
    # in the norm behind it, rounding of a product that is nearly zero would be all there is.
    "rms_norm_eps": 0.01,
}
EXPERTS = {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 16, "num_experts": 8}
EXPERTS |= {"num_experts_per_tok": 3}
ROUTED = {k: v for k, v in SIZES.items() if k != "intermediate_size"} | EXPERTS
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 50.0, "beta_fast": 2.0, "beta_slow": 0.5}
YARN |= {"original_max_position_embeddings": 16, "partial_rotary_factor": 0.5}

CASES = [
    Case("qwen3.5", Qwen3_5ForCausalLM, SIZES),
    Case(
        "qwen3.5 tied",
        Qwen3_5ForCausalLM,
        SIZES
        | {
            "tie_word_embeddings": True,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "linear_num_value_heads": 4,
            "linear_conv_kernel_dim": 3,
            "vocab_size": 51,
            "rope_parameters": YARN,
        },
    ),
    Case(
        "qwen3.5 two groups",
        Qwen3_5ForCausalLM,
        SIZES
        | {
            "layer_types": ["linear_attention"] * 2 + ["full_attention"],
            "num_hidden_layers": 3,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
    Case(
        "qwen3.5 moe",
        Qwen3_5MoeForCausalLM,
        ROUTED | {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
    ),
    Case(
        "qwen3.5 moe tied",
        Qwen3_5MoeForCausalLM,
        ROUTED
        | {
            "tie_word_embeddings": True,
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
            "num_hidden_layers": 3,
            "linear_num_value_heads": 4,
            "num_experts_per_tok": 2,
        },
    ),
]


@pytest.mark.parametrize("check", [check_outputs, check_generation, check_training])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_qwen3_5(case, check, tmp_path):
    check(case, tmp_path)
