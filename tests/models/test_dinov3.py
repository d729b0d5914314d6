"""DINOv3: coordinates in training, and what published files say of it.
(`test_fixtures.py` has its outputs, and `nox -s parity` compares maps with `transformers`.)"""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sharding_helpers import mesh_of

import redcoast as rc
from redcoast.models import Dinov3, Dinov3Config
from redcoast.models.dinov3 import _angles, _changed
from redcoast.pretrained._registry import find_family, read_config, write_config

CONFIG = Dinov3Config(64, 3, 8, 256, image=16, patch=4)
# As in the published small size.
SETTINGS = {
    "apply_layernorm": True,
    "architectures": ["DINOv3ViTModel"],
    "attention_dropout": 0.0,
    "drop_path_rate": 0.0,
    "hidden_act": "gelu",
    "hidden_size": 384,
    "image_size": 224,
    "initializer_range": 0.02,
    "intermediate_size": 1536,
    "key_bias": False,
    "layer_norm_eps": 1e-05,
    "layerscale_value": 1.0,
    "mlp_bias": True,
    "model_type": "dinov3_vit",
    "num_attention_heads": 6,
    "num_channels": 3,
    "num_hidden_layers": 12,
    "num_register_tokens": 4,
    "out_features": ["stage12"],
    "out_indices": [12],
    "patch_size": 16,
    "pos_embed_jitter": None,
    "pos_embed_rescale": 2.0,
    "pos_embed_shift": None,
    "proj_bias": True,
    "query_bias": True,
    "reshape_hidden_states": True,
    "rope_theta": 100.0,
    "stage_names": ["stem", *(f"stage{i}" for i in range(1, 13))],
    "torch_dtype": "float32",
    "use_gated_mlp": False,
    "value_bias": True,
}
read = lambda **changes: find_family({**SETTINGS, **changes}, "It")[1]


@pytest.mark.thorough
def test_coordinates_change_only_in_training_and_within_their_bounds():
    points = jnp.array([[1.0, -1.0], [0.5, 0.5]])
    assert _changed(points, CONFIG, None) is points
    keys = jax.random.split(jax.random.key(0), 20)
    change = lambda **fields: np.asarray(
        jax.vmap(lambda key: _changed(points, dataclasses.replace(CONFIG, **fields), key))(keys)
    )
    ratio = change() / points[None]
    np.testing.assert_allclose(ratio, np.broadcast_to(ratio[:, :1, :1], ratio.shape), rtol=1e-5)
    assert 0.5 <= ratio.min() < 0.8 < 1.3 < ratio.max() <= 2
    moved = change(rescale=None, shift=0.1) - points[None]
    assert 0.05 < np.abs(moved).max() <= 0.1 + 1e-6
    assert np.abs(moved[:, 0] - moved[:, 1]).max() < 1e-6 < np.ptp(moved[:, 0], axis=1).max()
    stretched = change(rescale=None, jitter=1.5) / points[None]
    assert 1 / 1.5 <= stretched.min() < 0.9 < 1.1 < stretched.max() <= 1.5 + 1e-6


@pytest.mark.thorough
def test_the_first_tokens_are_not_rotated():
    cos, sin = _angles(CONFIG, (2, 3), jnp.float32, None)
    assert cos.shape == sin.shape == (1, 5 + 6, 1, 4)
    np.testing.assert_array_equal(cos[:, :5], 1)
    np.testing.assert_array_equal(sin[:, :5], 0)
    # The centre of the middle column, whose row is above the centre.
    np.testing.assert_allclose(sin[0, 5 + 1, 0, 2:], 0, atol=1e-6)
    np.testing.assert_allclose(cos[0, 5 + 1, 0, 0], np.cos(np.pi), atol=1e-6)


def test_images_and_layers_that_do_not_fit_are_refused():
    model = eqx.filter_eval_shape(Dinov3, CONFIG, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"shape \(3, 16, 14\), but .* multiples of 4. Resize"):
        model(jnp.zeros((1, 3, 16, 14)))
    with pytest.raises(ValueError, match=r"`layers` has 4, but the model has 3 layers"):
        model.features(jnp.zeros((1, 3, 16, 16)), [1, 4])


@pytest.mark.thorough
def test_the_plan_is_megatrons():
    """On 2 x 4 devices, heads and hidden features are split."""
    config = dataclasses.replace(CONFIG, width=384, hidden=1536, gated=True)
    model = eqx.filter_eval_shape(Dinov3, config, key=jax.random.key(0))
    pixels = jax.ShapeDtypeStruct((16, 3, 32, 32), jnp.float32)
    loss = lambda model, pixels: jnp.mean(jax.nn.logsumexp(model(pixels), axis=-1))
    plan = rc.plan_shardings(model, mesh_of(2, 1, 4), fn=loss, args=(pixels,))
    paths = [row.path for row in plan.report.arrays]
    actual = dict(zip(paths, plan.compute.dims, strict=True))
    expected = {"wq": 2, "wk": 2, "wv": 2, "wo": 1, "gate": 2, "up": 2, "down": 1}
    assert {name: actual["layers/" + name] for name in expected} == expected
    assert not plan.report.program.unknown


def test_published_settings():
    config = read()
    assert (config.hidden, config.registers, config.k_bias, config.rescale) == (1536, 4, False, 2.0)
    assert read_config(Dinov3Config, write_config(config)) == config
    with pytest.raises(ValueError, match="only squares are implemented"):
        read(image_size=[224, 336])
    with pytest.raises(ValueError, match="`registers` must be at least 1"):
        read(num_register_tokens=0)
