"""The language models within models of images, against `transformers` with texts alone."""

# pyright: reportMissingImports=false

import json

import jax
import numpy as np
import pytest
import torch
from agreement import record
from harness import NEW, TOLERANCE, Case, difference, new_ids, reference_ids
from published import (
    PROMPT,
    make_tokens,
    ragged,
    rows_of,
    settings_of,
    shapes_of,
    write_weights,
)
from safetensors.numpy import load_file, save_file
from transformers import (
    Gemma3ForConditionalGeneration,
    Gemma4ForConditionalGeneration,
    Idefics3ForConditionalGeneration,
    InternVLForConditionalGeneration,
    Kimi_K25ForConditionalGeneration,
    LlavaForConditionalGeneration,
    Mistral3ForConditionalGeneration,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLForConditionalGeneration,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeForConditionalGeneration,
    SmolVLMForConditionalGeneration,
    VoxtralForConditionalGeneration,
)

import redcoast as rc

TEXT = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
SIGLIP = VISION | {"model_type": "siglip_vision_model"}
PIXTRAL = VISION | {"model_type": "pixtral", "head_dim": 8}
GEMMA = TEXT | {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
QWEN_VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "patch_size": 8}
MROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 2]}
QWEN3_VISION = QWEN_VISION | {"intermediate_size": 24, "out_hidden_size": 32}
QWEN3_VISION |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}


EXPERTS = {"moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6}
DELTA |= {"linear_value_head_dim": 4, "layer_types": ["linear_attention", "full_attention"]}
DELTA |= {"rms_norm_eps": 0.1, "head_dim": 16}
DELTA |= {"rope_parameters": MROPE | {"mrope_interleaved": True, "partial_rotary_factor": 0.5}}
LATENT = {"model_type": "deepseek_v3", "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4}
LATENT |= {"qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "n_group": 2}
LATENT |= {"topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
LATENT |= {"first_k_dense_replace": 1, "num_key_value_heads": 4}
GEMMA4 = GEMMA | {"global_head_dim": 8, "hidden_size_per_layer_input": 16}
GEMMA4 |= {"vocab_size_per_layer_input": 48}


def case(name, model, text, vision, **more):
    return Case(name, model, {"text_config": text, "vision_config": vision, **more})


CLIP = VISION | {"model_type": "clip_vision_model", "projection_dim": 16}
LLAMA, MISTRAL = TEXT | {"model_type": "llama"}, TEXT | {"model_type": "mistral"}
VISIONS = [
    case("gemma3", Gemma3ForConditionalGeneration, GEMMA, SIGLIP, mm_tokens_per_image=4),
    case("llava", LlavaForConditionalGeneration, LLAMA, CLIP, image_token_index=47),
    case("idefics3", Idefics3ForConditionalGeneration, LLAMA, VISION, image_token_id=47),
    case("mistral3", Mistral3ForConditionalGeneration, MISTRAL, PIXTRAL, image_token_index=47),
    case(
        "qwen2 vl",
        Qwen2VLForConditionalGeneration,
        {k: v for k, v in TEXT.items() if k != "head_dim"} | {"rope_parameters": MROPE},
        {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 8},
    ),
    case(
        "qwen2.5 vl tied",
        Qwen2_5_VLForConditionalGeneration,
        {k: v for k, v in TEXT.items() if k != "head_dim"} | {"rope_parameters": MROPE},
        QWEN_VISION | {"intermediate_size": 24, "out_hidden_size": 32},
        tie_word_embeddings=True,
    ),
    case("gemma4", Gemma4ForConditionalGeneration, GEMMA4, {**VISION, "head_dim": 8}),
    case(
        "internvl",
        InternVLForConditionalGeneration,
        TEXT | {"model_type": "qwen2"},
        VISION | {"image_size": [16, 16], "patch_size": [8, 8]},
        image_token_id=47,
    ),
    case("smolvlm", SmolVLMForConditionalGeneration, LLAMA, VISION, image_token_id=47),
    case(
        "kimi k2.5",
        Kimi_K25ForConditionalGeneration,
        {k: v for k, v in TEXT.items() if k != "head_dim"} | LATENT,
        VISION | {"pos_emb_height": 4, "pos_emb_width": 4},
        projection_hidden_size=16,
        image_token_id=3,
    ),
    Case(
        "voxtral",
        VoxtralForConditionalGeneration,
        {
            "text_config": LLAMA,
            "audio_config": VISION | {"model_type": "voxtral_encoder", "num_mel_bins": 8},
            "audio_token_id": 47,
        },
    ),
    case(
        "qwen3.5",
        Qwen3_5ForConditionalGeneration,
        TEXT | DELTA,
        QWEN_VISION | {"intermediate_size": 24, "out_hidden_size": 32},
    ),
    case(
        "qwen3.5 moe",
        Qwen3_5MoeForConditionalGeneration,
        TEXT | DELTA | EXPERTS | {"shared_expert_intermediate_size": 8},
        QWEN_VISION | {"intermediate_size": 24, "out_hidden_size": 32},
    ),
    case(
        "qwen3 vl moe",
        Qwen3VLMoeForConditionalGeneration,
        TEXT | EXPERTS | {"rope_parameters": MROPE | {"mrope_interleaved": True}},
        QWEN3_VISION,
    ),
    case(
        "qwen3 vl",
        Qwen3VLForConditionalGeneration,
        TEXT | {"rope_parameters": MROPE | {"mrope_interleaved": True}},
        QWEN3_VISION,
    ),
]
NAMED = {case.name: case for case in VISIONS}
OLDER = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
OLDER |= {"model.vision_tower.": "vision_tower."}


def make_wrapped(case: Case, directory):
    """A model of `transformers` whose language model has the formula's weights."""
    model = case.model(case.model.config_class(**case.settings))
    model.save_pretrained(directory)
    write_weights(directory, shapes_of(directory))
    reference = case.model.from_pretrained(directory).eval()
    reference.config.pad_token_id = TEXT["pad_token_id"]
    return reference


@pytest.mark.parametrize("case", VISIONS, ids=str)
def test_the_language_model_is_loaded(case, tmp_path):
    reference = make_wrapped(case, tmp_path / "theirs")
    tokens, mask = make_tokens("tokens", TEXT["vocab_size"] - 1), ragged((0, 3, -3, 5))
    rows = [
        reference(input_ids=torch.tensor(row[real == 1].astype(np.int64))[None]).logits[0]
        for row, real in zip(tokens, mask, strict=True)
    ]
    with pytest.warns(UserWarning, match="only the language model is loaded"):
        model = rc.load_pretrained(tmp_path / "theirs")
    logits = jax.jit(lambda tokens, mask: model(tokens, mask=mask))(tokens, mask)
    error = difference(rows_of(logits, {"mask": mask}), rows)
    record(case, "logits", error)
    record(case, "configurations")
    assert error < TOLERANCE
    prompts = make_tokens("prompts", TEXT["vocab_size"] - 1, PROMPT)
    real = ragged((0, 3, 1, 6), PROMPT)
    expected = reference_ids(reference, prompts, real, eos=2, beams=1)
    assert expected.shape == (4, NEW)
    np.testing.assert_array_equal(new_ids(model, prompts, real, eos=2, beams=1), expected)
    record(case, "decoding")


@pytest.mark.parametrize("case", [NAMED[name] for name in ("gemma3", "llava", "mistral3")], ids=str)
def test_older_names_are_read(case, tmp_path):
    make_wrapped(case, tmp_path)
    with pytest.warns(UserWarning, match="only the language model is loaded"):
        newer = rc.load_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for new, old in OLDER.items():
        tensors = {
            old + name.removeprefix(new) if name.startswith(new) else name: x
            for name, x in tensors.items()
        }
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match="Left out: .* of vision_tower"):
        older = rc.load_pretrained(tmp_path)
    assert jax.tree.all(jax.tree.map(np.array_equal, newer, older))


def test_the_settings_of_the_first_files_stand_side_by_side(tmp_path):
    reference = make_wrapped(NAMED["qwen2.5 vl tied"], tmp_path)
    settings = settings_of(tmp_path)
    rope = settings["text_config"].pop("rope_parameters")
    flat = {**settings.pop("text_config"), **settings, "rope_theta": rope["rope_theta"]}
    flat |= {"rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    with pytest.warns(UserWarning, match="Left out: .* of visual"):
        model = rc.load_pretrained(tmp_path)
    tokens = make_tokens("tokens", TEXT["vocab_size"] - 1)
    expected = reference(input_ids=torch.tensor(tokens.astype(np.int64))).logits
    assert difference([np.asarray(model(tokens))], [expected]) < TOLERANCE
