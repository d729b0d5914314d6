"""The text part of Gemma 4 against `transformers`."""

# pyright: reportMissingImports=false

import pytest
from harness import Case, check_generation, check_outputs, check_training
from transformers import Gemma4ForCausalLM

NEAR, FAR = "sliding_attention", "full_attention"
SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "max_position_embeddings": 64,
    "sliding_window": 4,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 48,
}
INPUTS = {"hidden_size_per_layer_input": 32, "hidden_size": 64}
EXPERTS = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3}
EXPERTS |= {"moe_intermediate_size": 12}
ROPE = {NEAR: {"rope_type": "default", "rope_theta": 20.0}}
ROPE |= {FAR: {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.5}}

CASES = [
    # As E2B and E4B, the 31B and the 26B-A4B have them.
    Case(
        "gemma4",
        Gemma4ForCausalLM,
        SIZES
        | INPUTS
        | {
            # With more layers and larger heads, rounding alone makes `transformers` differ from
            # itself in float64 by 1e-3.
            "layer_types": [NEAR, FAR] * 2,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "head_dim": 4,
            "global_head_dim": 8,
            "use_double_wide_mlp": True,
            "num_key_value_heads": 1,
            "final_logit_softcapping": 8.0,
        },
    ),
    Case(
        "gemma4 keys as values",
        Gemma4ForCausalLM,
        SIZES
        | {
            "num_hidden_layers": 4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "rope_parameters": ROPE,
            "use_bidirectional_attention": "vision",
        },
    ),
    Case(
        "gemma4 moe",
        Gemma4ForCausalLM,
        SIZES
        | EXPERTS
        | {
            "layer_types": [NEAR, FAR] * 2,
            "num_hidden_layers": 4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ),
    Case(
        "gemma4 untied",
        Gemma4ForCausalLM,
        SIZES
        | INPUTS
        | {
            "layer_types": [FAR] * 3,
            "num_hidden_layers": 3,
            "tie_word_embeddings": False,
            "vocab_size": 51,
            "vocab_size_per_layer_input": 51,
            "num_kv_shared_layers": 1,
        },
    ),
]


@pytest.mark.parametrize("check", [check_outputs, check_generation, check_training])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gemma4(case, check, tmp_path):
    check(case, tmp_path)
