"""Mamba-2 against `transformers`."""

# pyright: reportMissingImports=false

import pytest
from harness import Case, check_generation, check_outputs, check_training
from transformers import Mamba2ForCausalLM

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 8,
    "head_dim": 8,
    "state_size": 6,
    "n_groups": 2,
    "chunk_size": 5,
    "pad_token_id": 0,
}

CASES = [
    Case("mamba2", Mamba2ForCausalLM, SIZES),
    Case(
        "mamba2 tied",
        Mamba2ForCausalLM,
        SIZES | {"tie_word_embeddings": True, "n_groups": 1, "vocab_size": 51, "chunk_size": 64},
    ),
    Case(
        "mamba2 narrow",
        Mamba2ForCausalLM,
        SIZES
        | {
            "expand": 1,
            "num_heads": 4,
            "n_groups": 4,
            "conv_kernel": 3,
            "residual_in_fp32": False,
            "num_hidden_layers": 3,
        },
    ),
]


@pytest.mark.parametrize("check", [check_outputs, check_generation, check_training])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_mamba2(case, check, tmp_path):
    check(case, tmp_path)
