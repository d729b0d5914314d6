"""Mixtral against `transformers`."""

# pyright: reportMissingImports=false

import pytest
from harness import Case, check_generation, check_outputs, check_training
from transformers import MixtralForCausalLM

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
]


@pytest.mark.parametrize("check", [check_generation, check_outputs, check_training])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_mixtral(case, check, tmp_path):
    check(case, tmp_path)
