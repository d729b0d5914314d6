"""DINOv2: images of other sizes, maps, masked patches, and what published files say of it.
(`test_fixtures.py` has its outputs, and `nox -s parity` compares maps with `transformers`.)"""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoder_checks import assert_close
from random_models import random_model, to_device
from sharding_helpers import mesh_of

import redcoast as rc
from redcoast.models import Dinov2, Dinov2Config, with_head
from redcoast.models._patches import cubic_weights, resample
from redcoast.pretrained._registry import find_family, read_config, write_config

CONFIG = Dinov2Config(width=8, layers=2, heads=2, mlp_ratio=2, image=8, patch=4, registers=2)
PIXELS = to_device(np.random.default_rng(0).normal(0, 1, (2, 3, 8, 8)), np.float32)
# As in the published base size.
SETTINGS = {
    "apply_layernorm": True,
    "architectures": ["Dinov2Model"],
    "attention_probs_dropout_prob": 0.0,
    "drop_path_rate": 0.0,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "hidden_size": 768,
    "image_size": 518,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-06,
    "layerscale_value": 1.0,
    "mlp_ratio": 4,
    "model_type": "dinov2",
    "num_attention_heads": 12,
    "num_channels": 3,
    "num_hidden_layers": 12,
    "out_features": ["stage12"],
    "out_indices": [12],
    "patch_size": 14,
    "qkv_bias": True,
    "reshape_hidden_states": True,
    "stage_names": ["stem", *(f"stage{i}" for i in range(1, 13))],
    "torch_dtype": "float32",
    "use_swiglu_ffn": False,
}
read = lambda **changes: find_family({**SETTINGS, **changes}, "It")[1]


@pytest.mark.thorough
def test_maps_labels_and_masks_agree_with_hidden_states():
    model = random_model(Dinov2, CONFIG)
    hidden = eqx.filter_jit(lambda model: model(PIXELS))(model)
    maps = eqx.filter_jit(lambda model: model.features(PIXELS, [2, 0, 1]))(model)
    assert_close(maps[0].reshape(2, 4, 8), hidden[:, 3:])
    assert jnp.max(jnp.abs(maps[0] - maps[2])) > 0.01
    classifier = with_head(model, labels=3, key=jax.random.key(0))
    both = jnp.concatenate([hidden[:, 0], hidden[:, 3:].mean(1)], axis=1)
    logits = eqx.filter_jit(lambda model: model(PIXELS))(classifier)
    assert_close(logits, both @ classifier.head.w, 1e-5)
    # What masked patches show does not matter.
    masked = jnp.array([[True, False, False, False]] * 2)
    other = PIXELS.at[:, :, :4, :4].set(9.0)
    run = eqx.filter_jit(lambda pixels: model(pixels, masked=masked))
    np.testing.assert_array_equal(run(PIXELS), run(other))


def test_images_that_do_not_fit_are_refused():
    model = random_model(Dinov2, dataclasses.replace(CONFIG, registers=0, mask_token=False))
    with pytest.raises(ValueError, match=r"shape \(3, 8, 6\), but .* multiples of 4. Resize"):
        model(PIXELS[..., :6])
    with pytest.raises(ValueError, match=r"`layers` has 3, but the model has 2 layers"):
        model.features(PIXELS, [1, 3])
    with pytest.raises(ValueError, match="`masked` needs a mask token"):
        model(PIXELS, masked=jnp.ones((2, 4), bool))


# Of a table of four positions (0, 1, 4, 9), by `torch.nn.functional.interpolate`.
RESAMPLED = {
    (2, False): [0.21875, 6.78125],
    (6, False): [-0.08681, 0.21875, 1.43055, 3.15278, 6.78125, 9.43403],
    (2, True): [0.60331, 6.08264],
    (6, True): [-0.06579, 0.29412, 1.36111, 3.36111, 6.82353, 9.32895],
}


@pytest.mark.parametrize(("new", "filtered"), RESAMPLED)
def test_positions_are_resampled_as_pytorch_does(new, filtered):
    actual = cubic_weights(4, new, filtered) @ np.array([0.0, 1.0, 4.0, 9.0])
    np.testing.assert_allclose(actual, RESAMPLED[new, filtered], atol=1e-5)


def test_a_grid_of_the_same_size_is_the_table():
    table = jnp.arange(18.0).reshape(9, 2)
    assert resample(table, 3, (3, 3), filtered=False) is table
    # With other sides, rows stay apart from columns.
    rows = resample(jnp.repeat(jnp.arange(3.0), 3)[:, None], 3, (3, 5), filtered=False)
    np.testing.assert_allclose(rows[:, 0], np.repeat(np.arange(3.0), 5), atol=1e-6)


@pytest.mark.thorough
def test_the_plan_is_megatrons():
    """On 2 x 4 devices, heads and hidden features are split."""
    config = Dinov2Config(384, 3, 8, image=56, head="classification", labels=10)
    model = eqx.filter_eval_shape(Dinov2, config, key=jax.random.key(0))
    pixels = jax.ShapeDtypeStruct((16, 3, 56, 56), jnp.float32)
    loss = lambda model, pixels: jnp.mean(jax.nn.logsumexp(model(pixels), axis=-1))
    plan = rc.plan_shardings(model, mesh_of(2, 1, 4), fn=loss, args=(pixels,))
    paths = [row.path for row in plan.report.arrays]
    actual = dict(zip(paths, plan.compute.dims, strict=True))
    expected = {"wq": 2, "wk": 2, "wv": 2, "wo": 1, "up": 2, "down": 1}
    assert {name: actual["layers/" + name] for name in expected} == expected
    assert not plan.report.program.unknown


def test_published_settings():
    config = read()
    assert (config.image, config.hidden, config.registers) == (518, 3072, 0)
    assert read_config(Dinov2Config, write_config(config)) == config
    giant = read(hidden_size=1536, num_attention_heads=24, use_swiglu_ffn=True)
    assert giant.hidden == 4096
    more = {"model_type": "dinov2_with_registers", "num_register_tokens": 4}
    config = read(**more, architectures=["Dinov2WithRegistersForImageClassification"])
    assert (config.registers, config.head) == (4, "classification")
    assert read_config(Dinov2Config, write_config(config)) == config


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"image_size": [518, 224]}, "only squares are implemented"),
        ({"architectures": ["Dinov2WithRegistersModel"]}, "`architectures` is"),
        ({"num_register_tokens": 4}, "`num_register_tokens`, which is 4, is unknown"),
    ],
)
def test_settings_that_are_not_implemented(changes, says):
    with pytest.raises(ValueError, match=says):
        read(**changes)
