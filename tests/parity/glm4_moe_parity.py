"""GLM-4's mixtures of experts against `transformers`."""

# pyright: reportMissingImports=false

import pytest
from harness import Case, check_generation, check_outputs, check_training
from transformers import Glm4MoeForCausalLM

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 50.0, "beta_fast": 2.0, "beta_slow": 0.5}
YARN |= {"original_max_position_embeddings": 16}

CASES = [
    # As GLM-4.5 and GLM-4.6 have them, and with groups of experts.
    Case(
        "glm4 moe",
        Glm4MoeForCausalLM,
        SIZES
        | {
            "head_dim": 12,
            "attention_bias": True,
            "use_qk_norm": True,
            "routed_scaling_factor": 2.5,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
        },
    ),
    Case("glm4 moe air", Glm4MoeForCausalLM, SIZES | {"attention_bias": True}),
    Case(
        "glm4 moe tied",
        Glm4MoeForCausalLM,
        SIZES
        | {
            "tie_word_embeddings": True,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "rope_parameters": YARN,
        },
    ),
]


@pytest.mark.parametrize("check", [check_outputs, check_generation, check_training])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_glm4_moe(case, check, tmp_path):
    check(case, tmp_path)
