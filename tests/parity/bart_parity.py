"""BART against `transformers`."""

# pyright: reportMissingImports=false

import pytest
from harness import Case, check_generation, check_outputs, check_training
from transformers import BartForConditionalGeneration

SIZES = {
    "vocab_size": 48,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 32,
}

CASES = [
    Case("bart", BartForConditionalGeneration, SIZES),
    Case("bart scaled", BartForConditionalGeneration, SIZES | {"scale_embedding": True}),
    Case(
        "bart odd vocabulary",
        BartForConditionalGeneration,
        SIZES | {"vocab_size": 51, "decoder_layers": 3, "activation_function": "relu"},
    ),
]


@pytest.mark.parametrize("check", [check_generation, check_outputs, check_training])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bart(case, check, tmp_path):
    check(case, tmp_path)
