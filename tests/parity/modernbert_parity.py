"""ModernBERT against `transformers`: heads, biases and which layers have a window."""

# pyright: reportMissingImports=false

import pytest
from harness import Case, check_outputs, check_training
from transformers import (
    ModernBertForMaskedLM,
    ModernBertForSequenceClassification,
    ModernBertForTokenClassification,
    ModernBertModel,
)

SIZES = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 56, "local_attention": 4, "pad_token_id": 0}
SIZES |= {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
BIASES = dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"), True)
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
TURNS = {
    "full_attention": {"rope_type": "default", "rope_theta": 500.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
}
LISTED = {"num_hidden_layers": 3, "layer_types": TYPES, "rope_parameters": TURNS}
OTHER = {"hidden_activation": "silu", "classifier_activation": "relu", "decoder_bias": False}

CASES = [
    Case("modernbert masked", ModernBertForMaskedLM, SIZES),
    Case("modernbert biases", ModernBertForMaskedLM, SIZES | BIASES | {"local_attention": 7}),
    Case("modernbert listed", ModernBertForMaskedLM, SIZES | LISTED | OTHER),
    Case("modernbert labels", ModernBertForSequenceClassification, SIZES | {"num_labels": 5}),
    Case(
        "modernbert mean",
        ModernBertForSequenceClassification,
        SIZES | BIASES | {"num_labels": 1, "classifier_pooling": "mean"},
    ),
    Case("modernbert tokens", ModernBertForTokenClassification, SIZES | BIASES | {"num_labels": 5}),
    Case("modernbert", ModernBertModel, SIZES | {"global_attn_every_n_layers": 2}),
    Case("modernbert one layer", ModernBertModel, SIZES | {"num_hidden_layers": 1}),
]


@pytest.mark.parametrize("check", [check_outputs, check_training])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_modernbert(case, check, tmp_path):
    check(case, tmp_path)
