"""DINOv3 against `transformers`: biases, gated layers, backbones and images of other sizes."""

# pyright: reportMissingImports=false

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from harness import TOLERANCE, Case, check_outputs, check_training, make_reference
from published import uniform
from transformers import DINOv3ViTBackbone, DINOv3ViTModel

from redcoast import load_pretrained

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 56, "image_size": 16, "patch_size": 4, "num_register_tokens": 4}
GATED = SIZES | {"use_gated_mlp": True, "hidden_act": "silu", "num_channels": 1}
GATED |= {"query_bias": False, "value_bias": False, "mlp_bias": False, "proj_bias": False}
ODD = {"hidden_size": 36, "num_attention_heads": 3, "num_register_tokens": 1, "key_bias": True}
ODD |= {"rope_theta": 20.0, "num_hidden_layers": 3, "image_size": 20, "layer_norm_eps": 1e-6}

CASES = [
    Case("dinov3", DINOv3ViTModel, SIZES),
    Case("dinov3 gated", DINOv3ViTModel, GATED),
    Case("dinov3 odd", DINOv3ViTModel, SIZES | ODD),
]
STAGES = {"out_features": ["stem", "stage1", "stage2"]}


@pytest.mark.parametrize("check", [check_outputs, check_training])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_dinov3(case, check, tmp_path):
    check(case, tmp_path)


def images(*shape):
    return uniform("pixels", int(np.prod(shape))).reshape(shape).astype(np.float32)


@pytest.mark.parametrize("size", [(16, 16), (8, 32), (24, 12)])
def test_maps_of_images_of_any_size(size, tmp_path):
    reference = make_reference(Case("maps", DINOv3ViTBackbone, SIZES | STAGES), tmp_path)
    model, pixels = load_pretrained(tmp_path), images(2, 3, *size)
    with torch.no_grad():
        expected = reference(torch.tensor(pixels)).feature_maps
    maps = model.features(jnp.asarray(pixels), [0, 1, 2])
    for ours, theirs in zip(maps, expected, strict=True):
        error = np.abs(np.moveaxis(np.asarray(ours), 3, 1) - theirs.numpy()).max()
        print(f"{size}: {error:.1e}")
        assert error < TOLERANCE


def test_masked_patches(tmp_path):
    reference = make_reference(CASES[0], tmp_path)
    masked = uniform("masked", 32).reshape(2, 16) > 0.2
    pixels = images(2, 3, 16, 16)
    with torch.no_grad():
        out = reference(torch.tensor(pixels), bool_masked_pos=torch.tensor(masked))
    actual = load_pretrained(tmp_path)(jnp.asarray(pixels), masked=jnp.asarray(masked))
    assert np.abs(np.asarray(actual) - out[0].numpy()).max() < TOLERANCE
