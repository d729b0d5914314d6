"""Captioners against `transformers`: ViT and GPT-2, of one width and of two."""

# pyright: reportMissingImports=false

import pytest
from harness import Case, check_generation, check_outputs, check_training
from transformers import GPT2Config, VisionEncoderDecoderModel, ViTConfig

VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
VISION |= {"intermediate_size": 56, "image_size": 16, "patch_size": 8}
TEXT = {"vocab_size": 48, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40}
TEXT |= {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "is_decoder": True}


def settings(vision, text, **whole):
    return {
        "encoder": ViTConfig(**VISION | vision).to_dict(),
        "decoder": GPT2Config(**TEXT | text, add_cross_attention=True).to_dict(),
        "pad_token_id": 0,
        "decoder_start_token_id": 2,
        **whole,
    }


CASES = [
    Case("captioner", VisionEncoderDecoderModel, settings({}, {})),
    Case(
        "captioner bridged",
        VisionEncoderDecoderModel,
        settings({"hidden_size": 24}, {"tie_word_embeddings": False, "vocab_size": 51}),
    ),
    Case(
        "captioner by layer",
        VisionEncoderDecoderModel,
        settings({"qkv_bias": False}, {"scale_attn_by_inverse_layer_idx": True, "n_inner": 56}),
    ),
]


@pytest.mark.parametrize("check", [check_outputs, check_generation, check_training])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_captioner(case, check, tmp_path):
    check(case, tmp_path)
