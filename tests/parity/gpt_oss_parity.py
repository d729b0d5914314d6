"""GPT-OSS against `transformers`."""

# pyright: reportMissingImports=false

import pytest
from harness import Case, check_generation, check_outputs, check_training
from transformers import GptOssForCausalLM

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "sliding_window": 4,
    "pad_token_id": 0,
    # The clamps bite.
    "swiglu_limit": 0.6,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 50.0}
YARN |= {
    "original_max_position_embeddings": 16,
    "beta_fast": 2.0,
    "beta_slow": 0.5,
    "truncate": False,
}

CASES = [
    Case("gpt oss", GptOssForCausalLM, SIZES),
    Case("gpt oss yarn", GptOssForCausalLM, SIZES | {"rope_parameters": YARN}),
    Case(
        "gpt oss rounded",
        GptOssForCausalLM,
        SIZES
        | {
            "rope_parameters": YARN | {"attention_factor": 1.2, "truncate": True},
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "tie_word_embeddings": True,
            "num_experts_per_tok": 3,
            "num_key_value_heads": 4,
        },
    ),
]


@pytest.mark.parametrize("check", [check_outputs, check_generation, check_training])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gpt_oss(case, check, tmp_path):
    check(case, tmp_path)
