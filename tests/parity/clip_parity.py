"""CLIP against `transformers`: logits of all images and texts, and gradients."""

# pyright: reportMissingImports=false

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from harness import TOLERANCE, Case, batch_for, check_outputs, check_training, make_reference
from transformers import CLIPModel

from redcoast import load_pretrained

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 56}
IMAGE, TEXT = SIZES | {"image_size": 16, "patch_size": 4}, SIZES | {"vocab_size": 48}
TEXT |= {"max_position_embeddings": 12, "bos_token_id": 1, "eos_token_id": 47, "pad_token_id": 1}
OTHER = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 3, "hidden_act": "gelu"}
ODD = {"image_size": 15, "num_channels": 1}

CASES = [
    Case("clip", CLIPModel, {"vision_config": IMAGE, "text_config": TEXT, "projection_dim": 20}),
    Case(
        "clip first",  # whose texts end with the largest token
        CLIPModel,
        {"vision_config": IMAGE | ODD, "text_config": TEXT | OTHER | {"eos_token_id": 2}},
    ),
]


@pytest.mark.parametrize("check", [check_outputs, check_training])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_clip(case, check, tmp_path):
    check(case, tmp_path)


def test_masked_texts(tmp_path):
    reference = make_reference(CASES[0], tmp_path)
    tokens = batch_for(reference, tmp_path)["tokens"]
    mask = (np.arange(12)[None] < np.arange(12, 8, -1)[:, None]).astype(np.int32)
    tokens = np.where(mask == 1, tokens, 47)
    inputs = (torch.tensor(x.astype(np.int64)) for x in (tokens, mask))
    with torch.no_grad():
        out = reference.get_text_features(*inputs).pooler_output
    ours = load_pretrained(tmp_path).encode_texts(jnp.asarray(tokens), mask=jnp.asarray(mask))
    assert np.abs(np.asarray(ours) - out.numpy()).max() < TOLERANCE
