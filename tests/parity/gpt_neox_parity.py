"""GPT-NeoX against `transformers`."""

# pyright: reportMissingImports=false

import pytest
from harness import Case, check_generation, check_outputs, check_training
from transformers import GPTNeoXForCausalLM

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
HALF = {"rope_theta": 50.0, "partial_rotary_factor": 0.5, "rope_type": "default"}
TIED = SIZES | {"tie_word_embeddings": True, "attention_bias": False, "vocab_size": 51}

CASES = [
    Case("gpt neox", GPTNeoXForCausalLM, SIZES),
    Case(
        "gpt neox in turn",
        GPTNeoXForCausalLM,
        SIZES | {"use_parallel_residual": False, "rope_parameters": HALF},
    ),
    Case("gpt neox tied", GPTNeoXForCausalLM, TIED | {"hidden_act": "gelu_new"}),
]


@pytest.mark.parametrize("check", [check_generation, check_outputs, check_training])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gpt_neox(case, check, tmp_path):
    check(case, tmp_path)
