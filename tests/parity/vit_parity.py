"""ViT against `transformers`: logits and gradients, and the pooler of oblong images."""

# pyright: reportMissingImports=false

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from harness import TOLERANCE, Case, check_outputs, check_training, make_reference
from published import uniform
from transformers import ViTForImageClassification, ViTModel

from redcoast import load_pretrained

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 56, "image_size": 16, "patch_size": 4}

CASES = [
    Case("vit labels", ViTForImageClassification, SIZES | {"num_labels": 5}),
    Case(
        "vit regression",
        ViTForImageClassification,
        SIZES | {"num_labels": 1, "num_channels": 1, "patch_size": 8, "hidden_act": "gelu_new"},
    ),
    Case("vit without biases", ViTForImageClassification, SIZES | {"qkv_bias": False}),
]


@pytest.mark.parametrize("check", [check_outputs, check_training])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_vit(case, check, tmp_path):
    check(case, tmp_path)


def test_vit_without_head(tmp_path):
    shapes = {"image_size": (8, 12), "patch_size": (4, 2), "pooler_output_size": 7}
    reference = make_reference(Case("vit", ViTModel, SIZES | shapes), tmp_path)
    model = load_pretrained(tmp_path)
    pixels = uniform("pixels", 2 * 3 * 8 * 12).reshape(2, 3, 8, 12).astype(np.float32)
    with torch.no_grad():
        out = reference(torch.tensor(pixels))
    hidden = model(jnp.asarray(pixels))
    for theirs, ours in ((out[0], hidden), (out[1], model.pool(hidden))):
        assert np.abs(np.asarray(ours) - theirs.numpy()).max() < TOLERANCE
