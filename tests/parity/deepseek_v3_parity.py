"""DeepSeek-V3 against `transformers`."""

# pyright: reportMissingImports=false

import pytest
from harness import Case, check_generation, check_outputs, check_training
from transformers import DeepseekV3ForCausalLM

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 50.0, "beta_fast": 2.0, "beta_slow": 0.5}
YARN |= {"original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 1.3}
KIMI = SIZES | {"rope_parameters": YARN | {"beta_fast": 1.0, "beta_slow": 1.0}}
KIMI |= {"n_group": 1, "topk_group": 1, "n_shared_experts": 1}

CASES = [
    Case("deepseek v3", DeepseekV3ForCausalLM, SIZES),
    Case(
        "deepseek v3 yarn",
        DeepseekV3ForCausalLM,
        SIZES | {"rope_parameters": YARN, "q_lora_rank": None, "first_k_dense_replace": 2},
    ),
    Case("kimi k2", DeepseekV3ForCausalLM, KIMI),
    Case(
        "deepseek v3 epsilon",  # of all norms but those of the compressed features
        DeepseekV3ForCausalLM,
        SIZES | {"rms_norm_eps": 0.01},
    ),
    Case(
        "deepseek v3 tied",
        DeepseekV3ForCausalLM,
        SIZES
        | {
            "tie_word_embeddings": True,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "routed_scaling_factor": 0.8,
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
            "num_hidden_layers": 2,
        },
    ),
]


@pytest.mark.parametrize("check", [check_outputs, check_generation, check_training])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_deepseek_v3(case, check, tmp_path):
    check(case, tmp_path)
