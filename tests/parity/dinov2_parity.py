"""DINOv2 against `transformers`: registers, gated layers, backbones and images of other sizes."""

# pyright: reportMissingImports=false

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from harness import TOLERANCE, Case, check_outputs, check_training, make_reference
from published import uniform
from transformers import (
    Dinov2Backbone,
    Dinov2ForImageClassification,
    Dinov2Model,
    Dinov2WithRegistersBackbone,
    Dinov2WithRegistersForImageClassification,
)

from redcoast import load_pretrained

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "mlp_ratio": 2}
SIZES |= {"image_size": 16, "patch_size": 4}
GATED = SIZES | {"use_swiglu_ffn": True, "mlp_ratio": 3, "qkv_bias": False}

CASES = [
    Case("dinov2 labels", Dinov2ForImageClassification, SIZES | {"num_labels": 5}),
    Case("dinov2 gated", Dinov2Model, GATED | {"use_mask_token": False, "num_channels": 1}),
    Case(
        "dinov2 registers",
        Dinov2WithRegistersForImageClassification,
        SIZES | {"num_register_tokens": 3, "num_labels": 1, "hidden_act": "gelu_new"},
    ),
]
STAGES = {"out_features": ["stem", "stage1", "stage2"], "use_swiglu_ffn": True}
BACKBONES = [
    Case("dinov2 maps", Dinov2Backbone, SIZES | STAGES),
    Case("dinov2 plain maps", Dinov2Backbone, SIZES | STAGES | {"apply_layernorm": False}),
    Case("dinov2 register maps", Dinov2WithRegistersBackbone, SIZES | STAGES),
]


@pytest.mark.parametrize("check", [check_outputs, check_training])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_dinov2(case, check, tmp_path):
    check(case, tmp_path)


def images(*shape):
    return uniform("pixels", int(np.prod(shape))).reshape(shape).astype(np.float32)


@pytest.mark.parametrize("size", [(16, 16), (8, 32), (24, 12), (28, 36)])
@pytest.mark.parametrize("case", BACKBONES, ids=str)
def test_maps_of_images_of_any_size(case, size, tmp_path):
    reference = make_reference(case, tmp_path)
    model, pixels = load_pretrained(tmp_path), images(2, 3, *size)
    with torch.no_grad():
        expected = reference(torch.tensor(pixels)).feature_maps
    maps = model.features(
        jnp.asarray(pixels), [0, 1, 2], normalise=case.settings.get("apply_layernorm", True)
    )
    for ours, theirs in zip(maps, expected, strict=True):
        error = np.abs(np.moveaxis(np.asarray(ours), 3, 1) - theirs.numpy()).max()
        print(f"{case} {size}: {error:.1e}")
        assert error < TOLERANCE


def test_masked_patches(tmp_path):
    reference = make_reference(Case("dinov2", Dinov2Model, SIZES), tmp_path)
    masked = uniform("masked", 32).reshape(2, 16) > 0.2
    pixels = images(2, 3, 16, 16)
    with torch.no_grad():
        out = reference(torch.tensor(pixels), bool_masked_pos=torch.tensor(masked))
    actual = load_pretrained(tmp_path)(jnp.asarray(pixels), masked=jnp.asarray(masked))
    assert np.abs(np.asarray(actual) - out[0].numpy()).max() < TOLERANCE
