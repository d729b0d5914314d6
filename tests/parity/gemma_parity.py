"""Gemma, Gemma 2 and the text part of Gemma 3 against `transformers`."""

# pyright: reportMissingImports=false

import pytest
from harness import Case, check_generation, check_outputs, check_training
from transformers import Gemma2ForCausalLM, Gemma3ForCausalLM, GemmaForCausalLM

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "sliding_window": 4,
    "query_pre_attn_scalar": 20,
    # Of "eager" alone it has the caps of scores.
    "attn_implementation": "eager",
}
FIRST = {k: v for k, v in SIZES.items() if k not in ("sliding_window", "query_pre_attn_scalar")}
NEAR = {"rope_type": "default", "rope_theta": 20.0}
FAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}

CASES = [
    Case("gemma", GemmaForCausalLM, FIRST),
    Case(
        "gemma untied",
        GemmaForCausalLM,
        FIRST | {"tie_word_embeddings": False, "num_key_value_heads": 1, "vocab_size": 51},
    ),
    Case("gemma2", Gemma2ForCausalLM, SIZES),
    Case(
        "gemma2 capped low",
        Gemma2ForCausalLM,
        SIZES | {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 8.0},
    ),
    Case(
        "gemma2 without caps",
        Gemma2ForCausalLM,
        SIZES
        | {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
        },
    ),
    Case("gemma3", Gemma3ForCausalLM, SIZES | {"num_hidden_layers": 7, "num_key_value_heads": 1}),
    Case(
        "gemma3 stretched",
        Gemma3ForCausalLM,
        SIZES
        | {
            "rope_parameters": {"sliding_attention": NEAR, "full_attention": FAR},
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "final_logit_softcapping": 8.0,
            "tie_word_embeddings": False,
        },
    ),
]


@pytest.mark.parametrize("check", [check_outputs, check_generation, check_training])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gemma(case, check, tmp_path):
    check(case, tmp_path)
