"""Phi-3 and Phi-4 against `transformers`."""

# pyright: reportMissingImports=false

import pytest
from harness import Case, check_generation, check_outputs, check_training
from transformers import Phi3ForCausalLM

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PART = {"rope_theta": 100.0, "partial_rotary_factor": 0.5}
SHORT, LONG = [1.0, 1.2, 1.5, 2.0], [1.0, 2.0, 6.0, 9.0]
SCALED = {"rope_type": "longrope", "rope_theta": 100.0, "short_factor": SHORT, "long_factor": LONG}


def scaled(original):
    return SIZES | {"rope_parameters": SCALED, "original_max_position_embeddings": original}


CASES = [
    Case("phi3", Phi3ForCausalLM, SIZES | {"sliding_window": 4}),
    Case("phi3 groups", Phi3ForCausalLM, SIZES | {"num_key_value_heads": 2}),
    Case(
        "phi4 mini",
        Phi3ForCausalLM,
        SIZES | {"num_key_value_heads": 1, "tie_word_embeddings": True, "rope_parameters": PART},
    ),
    Case("phi3 short", Phi3ForCausalLM, scaled(40)),
    Case("phi3 long", Phi3ForCausalLM, scaled(2)),
]
# Some of the rows are longer than the original context.
BOTH = Case("phi3 short and long", Phi3ForCausalLM, scaled(8) | {"num_key_value_heads": 2})


@pytest.mark.parametrize("check", [check_generation, check_outputs, check_training])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_phi3(case, check, tmp_path):
    check(case, tmp_path)


def test_each_row_has_the_factors_of_its_length(tmp_path):
    check_outputs(BOTH, tmp_path)
