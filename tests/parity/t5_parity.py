"""T5 and mT5 against `transformers`."""

# pyright: reportMissingImports=false

import pytest
import torch
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


def untied(model):
    """The class with a head of its own, as in published files; its constructor ties every head."""

    class Untied(model):
        _tied_weights_keys = {  # noqa: RUF012
            name: tied for name, tied in model._tied_weights_keys.items() if "lm_head" not in name
        }

        def __init__(self, config):
            super().__init__(config)
            self.lm_head.weight = torch.nn.Parameter(self.lm_head.weight.detach().clone())

    return Untied


T5, MT5 = untied(T5ForConditionalGeneration), untied(MT5ForConditionalGeneration)
CASES = [
    Case("t5", T5ForConditionalGeneration, SIZES),
    # More layers in the decoder than in the encoder, and the reference's own cache is too small.
    Case("t5 v1.1", T5, SIZES | GATED | {"num_layers": 3, "num_decoder_layers": 2}),
    Case("t5 v1.1 tied", T5ForConditionalGeneration, SIZES | GATED),
    Case("t5 gated silu", T5ForConditionalGeneration, SIZES | {"feed_forward_proj": "gated-silu"}),
    Case("mt5", MT5, SIZES | GATED | {"vocab_size": 51}),
    Case("mt5 tied", MT5ForConditionalGeneration, SIZES | {"relative_attention_max_distance": 128}),
]


@pytest.mark.parametrize("check", [check_generation, check_outputs, check_training])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_t5(case, check, tmp_path):
    check(case, tmp_path)
