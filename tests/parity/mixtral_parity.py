"""Mixtral and Qwen3-MoE against `transformers`."""

# pyright: reportMissingImports=false

import pytest
from harness import Case, check_generation, check_outputs, check_training
from transformers import MixtralForCausalLM, Qwen3MoeForCausalLM

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "max_position_embeddings": 64,
}

QWEN3 = {name: value for name, value in SIZES.items() if name != "num_local_experts"}
QWEN3 |= {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 12}

CASES = [
    Case("mixtral", MixtralForCausalLM, SIZES),
    Case("mixtral window", MixtralForCausalLM, SIZES | {"sliding_window": 4, "head_dim": 16}),
    Case(
        "mixtral tied",
        MixtralForCausalLM,
        SIZES | {"tie_word_embeddings": True, "vocab_size": 51, "num_key_value_heads": 4},
    ),
    Case(
        "mixtral three of six",
        MixtralForCausalLM,
        SIZES | {"num_local_experts": 6, "num_experts_per_tok": 3},
    ),
    Case("qwen3 moe", Qwen3MoeForCausalLM, QWEN3 | {"norm_topk_prob": True}),
    Case("qwen3 moe as it is", Qwen3MoeForCausalLM, QWEN3 | {"tie_word_embeddings": True}),
]


@pytest.mark.parametrize("check", [check_generation, check_outputs, check_training])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_mixtral(case, check, tmp_path):
    check(case, tmp_path)
