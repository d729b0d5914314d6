"""GPT-J against `transformers`."""

# pyright: reportMissingImports=false

import pytest
from harness import Case, check_generation, check_outputs, check_training
from transformers import GPTJForCausalLM

SIZES = {
    "vocab_size": 48,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "rotary_dim": 4,
    "bos_token_id": 2,
    "eos_token_id": 2,
}

CASES = [
    Case("gptj", GPTJForCausalLM, SIZES),
    Case("gptj odd vocabulary", GPTJForCausalLM, SIZES | {"vocab_size": 51, "rotary_dim": 8}),
    Case("gptj tied", GPTJForCausalLM, SIZES | {"tie_word_embeddings": True, "n_inner": 48}),
]


@pytest.mark.parametrize("check", [check_generation, check_outputs, check_training])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gptj(case, check, tmp_path):
    check(case, tmp_path)
