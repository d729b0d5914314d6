"""SigLIP: its loss, how it is split, and what published files say of it.
(`test_fixtures.py` has its outputs.)"""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_models import to_device
from sharding_helpers import mesh_of

import redcoast as rc
from redcoast.losses import pairwise_sigmoid
from redcoast.models import Siglip, SiglipConfig, SiglipImageConfig, SiglipTextConfig
from redcoast.pretrained._registry import find_family, read_config, write_config

IMAGE = SiglipImageConfig(384, 3, 8, 1536, image=32)
TEXT = SiglipTextConfig(4096, 384, 3, 8, 1536, positions=16)
# As in the published base size, whose other settings are the defaults.
SETTINGS: dict[str, Any] = {
    "architectures": ["SiglipModel"],
    "initializer_factor": 1.0,
    "model_type": "siglip",
    "text_config": {"model_type": "siglip_text_model", "vocab_size": 32000},
    "torch_dtype": "float32",
    "vision_config": {"model_type": "siglip_vision_model"},
}
read = lambda **changes: find_family({**SETTINGS, **changes}, "It")[1]


def test_the_loss_is_that_of_all_pairs():
    logits = np.random.default_rng(0).normal(0, 3, (4, 4))
    right = np.where(np.eye(4) == 1, logits, -logits)
    expected = np.log1p(np.exp(-right)).sum() / 4
    np.testing.assert_allclose(pairwise_sigmoid(to_device(logits)), expected, rtol=1e-6)
    half = pairwise_sigmoid(to_device(logits, jnp.bfloat16))
    assert half.dtype == jnp.float32
    with pytest.raises(ValueError, match=r"one row and one column for each pair.*\(3, 4\)"):
        pairwise_sigmoid(jnp.zeros((3, 4)))


@pytest.mark.thorough
def test_the_plan_is_megatrons():
    """On 2 x 4 devices, heads and hidden features of both encoders are split."""
    config = SiglipConfig(IMAGE, TEXT)
    model = eqx.filter_eval_shape(Siglip, config, key=jax.random.key(0))
    pixels = jax.ShapeDtypeStruct((16, 3, 32, 32), jnp.float32)
    tokens = jax.ShapeDtypeStruct((16, 16), jnp.int32)
    loss = lambda model, pixels, tokens: pairwise_sigmoid(model(pixels, tokens))
    plan = rc.plan_shardings(model, mesh_of(2, 1, 4), fn=loss, args=(pixels, tokens))
    paths = [row.path for row in plan.report.arrays]
    actual = dict(zip(paths, plan.compute.dims, strict=True))
    expected = {"wq": 2, "wk": 2, "wv": 2, "wo": 1, "up": 2, "down": 1}
    for part in ("image", "text"):
        assert {name: actual[f"{part}/layers/{name}"] for name in expected} == expected
    assert not plan.report.program.unknown


def test_a_square_may_be_written_as_two_sides():
    sides = {"model_type": "siglip_vision_model", "image_size": [64, 64], "patch_size": [16, 16]}
    image = read(vision_config=sides).image
    assert (image.image, image.patch) == (64, 16)


def test_published_settings():
    config = read()
    assert (config.image.patch, config.text.positions, config.text.pad) == (16, 64, 1)
    assert read_config(SiglipConfig, write_config(config)) == config
    wide = SiglipConfig(IMAGE, dataclasses.replace(TEXT, width=64, outputs=384))
    assert read_config(SiglipConfig, write_config(wide)) == wide


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["SiglipForImageClassification"]}, "`architectures` is"),
        ({"vision_config": {"vision_use_head": False}}, "`vision_use_head` is False"),
        ({"vision_config": {"image_size": [32, 16]}}, "only squares are implemented"),
        ({"vision_config": {"image_size": 8}}, "`image` must be at least `patch`"),
        ({"text_config": {"hidden_size": 384}}, "must have the same size, but the width of"),
        ({"text_config": {"num_hidden_layers": 0}}, "`layers` must be at least 1"),
    ],
)
def test_settings_that_are_not_implemented(changes, says):
    with pytest.raises(ValueError, match=says):
        read(**changes)
