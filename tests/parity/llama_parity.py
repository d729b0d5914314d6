"""LLaMA and the models that are LLaMA with options against `transformers`."""

# pyright: reportMissingImports=false

import pytest
from harness import Case, check_generation, check_outputs, check_training
from transformers import (
    GraniteForCausalLM,
    GraniteMoeHybridForCausalLM,
    LlamaForCausalLM,
    Ministral3ForCausalLM,
    MistralForCausalLM,
    Olmo2ForCausalLM,
    Olmo3ForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    SmolLM3ForCausalLM,
)

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
SMOLLM3 = SIZES | {"bos_token_id": 1, "eos_token_id": 2}
LINEAR = {"rope_type": "linear", "factor": 2.5, "rope_theta": 100.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 500.0}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
FACTORS = {"embedding_multiplier": 3.0, "residual_multiplier": 0.22}
FACTORS |= {"attention_multiplier": 0.4, "logits_scaling": 1.7}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
YARN |= {"rope_theta": 100.0}
BY_TYPE = {"full_attention": YARN}
BY_TYPE |= {"sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}
MINISTRAL3 = YARN | {"original_max_position_embeddings": 3, "llama_4_scaling_beta": 0.4}
MINISTRAL3 |= {"mscale": 1.0, "mscale_all_dim": 1.0}
GRANITE4 = SIZES | FACTORS | {"layer_types": 2 * ["full_attention"], "num_local_experts": 0}
GRANITE4 |= {"shared_intermediate_size": 56, "mamba_n_heads": 8, "eos_token_id": 2}

CASES = [
    Case("llama", LlamaForCausalLM, SIZES | {"num_key_value_heads": 4}),
    Case("llama tied", LlamaForCausalLM, SIZES | {"tie_word_embeddings": True, "vocab_size": 51}),
    Case("llama linear", LlamaForCausalLM, SIZES | {"rope_parameters": LINEAR, "head_dim": 16}),
    Case("llama llama3", LlamaForCausalLM, SIZES | {"rope_parameters": LLAMA3}),
    Case("mistral", MistralForCausalLM, SIZES | {"sliding_window": 4}),
    Case("qwen2", Qwen2ForCausalLM, SIZES | {"num_key_value_heads": 1}),
    Case("qwen3", Qwen3ForCausalLM, SIZES | {"head_dim": 12, "tie_word_embeddings": True}),
    Case("olmo2", Olmo2ForCausalLM, SIZES),
    Case(
        "olmo2 tied",
        Olmo2ForCausalLM,
        SIZES | {"tie_word_embeddings": True, "rope_parameters": LLAMA3},
    ),
    Case(
        "olmo3",
        Olmo3ForCausalLM,
        SIZES
        | {"sliding_window": 3, "rope_parameters": BY_TYPE}
        | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    Case(
        "olmo3 tied", Olmo3ForCausalLM, SIZES | {"sliding_window": 4, "tie_word_embeddings": True}
    ),
    Case(
        "ministral3", Ministral3ForCausalLM, SIZES | {"rope_parameters": MINISTRAL3, "head_dim": 8}
    ),
    Case("granite", GraniteForCausalLM, SIZES | FACTORS),
    Case("granite tied", GraniteForCausalLM, SIZES | FACTORS | {"tie_word_embeddings": True}),
    Case("granite 4", GraniteMoeHybridForCausalLM, GRANITE4 | {"position_embedding_type": "rope"}),
    Case("granite 4 plain", GraniteMoeHybridForCausalLM, GRANITE4 | {"tie_word_embeddings": True}),
    Case("smollm3", SmolLM3ForCausalLM, SMOLLM3 | {"no_rope_layer_interval": 2}),
    Case(
        "smollm3 listed",
        SmolLM3ForCausalLM,
        SMOLLM3 | {"no_rope_layers": [0, 1], "tie_word_embeddings": False},
    ),
]

WAYS = {
    "yarn": YARN,
    "yarn of other rotations": YARN | {"beta_fast": 8, "beta_slow": 2, "attention_factor": 1.3},
    "yarn of two sizes": YARN | {"mscale": 0.7, "mscale_all_dim": 0.5},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 100.0},
}
# One row is longer than this context. `transformers` would keep the base of its dynamic embeddings
# for other rows beyond it.
CONTEXT = 10
LONG = [
    Case(f"{model.config_class.model_type} {name}", model, SIZES | {"rope_parameters": rope} | more)
    for model in (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
    for name, rope in WAYS.items()
    for more in [{"max_position_embeddings": CONTEXT, "head_dim": 8}]
]


@pytest.mark.parametrize("case", LONG, ids=str)
def test_long_contexts(case, tmp_path):
    check_outputs(case, tmp_path)


@pytest.mark.parametrize("check", [check_outputs, check_generation, check_training])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_llama(case, check, tmp_path):
    check(case, tmp_path)
