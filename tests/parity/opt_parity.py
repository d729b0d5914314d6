"""OPT against `transformers`."""

# pyright: reportMissingImports=false

import pytest
from harness import Case, check_generation, check_outputs, check_training
from transformers import OPTForCausalLM

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "ffn_dim": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}

CASES = [
    Case("opt", OPTForCausalLM, SIZES),
    Case(
        "opt post-norm",  # as the one of 350 million parameters
        OPTForCausalLM,
        SIZES | {"do_layer_norm_before": False, "word_embed_proj_dim": 24},
    ),
    Case("opt untied", OPTForCausalLM, SIZES | {"vocab_size": 51, "tie_word_embeddings": False}),
    Case(
        "opt plain",
        OPTForCausalLM,
        SIZES | {"enable_bias": False, "layer_norm_elementwise_affine": False},
    ),
]


@pytest.mark.parametrize("check", [check_generation, check_outputs, check_training])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_opt(case, check, tmp_path):
    check(case, tmp_path)
