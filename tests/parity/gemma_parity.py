"""Gemma against `transformers`."""

# pyright: reportMissingImports=false

import pytest
from harness import Case, check_generation, check_outputs, check_training
from transformers import Gemma2ForCausalLM, Gemma3ForCausalLM, GemmaForCausalLM

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
}

CASES = [
    Case("gemma", GemmaForCausalLM, SIZES | {"num_key_value_heads": 1}),
    Case("gemma2", Gemma2ForCausalLM, SIZES | {"sliding_window": 4, "query_pre_attn_scalar": 7}),
    Case("gemma3", Gemma3ForCausalLM, SIZES | {"sliding_window": 4, "num_hidden_layers": 7}),
]


@pytest.mark.parametrize("check", [check_generation, check_outputs, check_training])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gemma(case, check, tmp_path):
    check(case, tmp_path)
