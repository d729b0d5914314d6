"""T5 and mT5 against `transformers`."""

# pyright: reportMissingImports=false

import pytest
from harness import Case, check_generation, check_outputs, check_training
from transformers import MT5ForConditionalGeneration, T5ForConditionalGeneration

# Few buckets, and a distance shorter than the texts, so that all of the buckets are used.
SIZES = {
    "vocab_size": 48,
    "d_model": 32,
    "d_kv": 12,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 9,
    "decoder_start_token_id": 0,
}
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}

CASES = [
    Case("t5", T5ForConditionalGeneration, SIZES),
    Case("t5 v1.1", T5ForConditionalGeneration, SIZES | GATED | {"num_decoder_layers": 3}),
    Case("t5 gated silu", T5ForConditionalGeneration, SIZES | {"feed_forward_proj": "gated-silu"}),
    Case("mt5", MT5ForConditionalGeneration, SIZES | GATED | {"vocab_size": 51}),
]


@pytest.mark.parametrize("check", [check_generation, check_outputs, check_training])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_t5(case, check, tmp_path):
    check(case, tmp_path)
