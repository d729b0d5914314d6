"""GPT-2 against `transformers`."""

# pyright: reportMissingImports=false

import pytest
from harness import Case, check_generation, check_outputs, check_training
from transformers import GPT2LMHeadModel

SIZES = {
    "vocab_size": 48,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "bos_token_id": 2,
    "eos_token_id": 2,
}

CASES = [
    Case("gpt2", GPT2LMHeadModel, SIZES),
    Case("gpt2 untied", GPT2LMHeadModel, SIZES | {"vocab_size": 51, "tie_word_embeddings": False}),
    Case(
        "gpt2 scaled by layer",
        GPT2LMHeadModel,
        SIZES | {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
    ),
    Case(
        "gpt2 relu",
        GPT2LMHeadModel,
        SIZES | {"activation_function": "relu", "scale_attn_weights": False, "n_inner": 40},
    ),
]


@pytest.mark.parametrize("check", [check_generation, check_outputs, check_training])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gpt2(case, check, tmp_path):
    check(case, tmp_path)
