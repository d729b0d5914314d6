"""ViT against NumPy, what must leave it unchanged, and what published files say of it."""

import dataclasses

import decoder_helpers as helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoder_helpers import close, make, slow_attention, slow_norm
from grids import few_of
from random_models import to_device
from safetensors.numpy import load_file, save_file

import redcoast as rc
from redcoast.models.vit import ViT, ViTConfig
from redcoast.pretrained._registry import read_config, write_config
from redcoast.pretrained.hf import vit as hf_vit

CONFIG = ViTConfig(width=16, layers=2, heads=4, hidden=24, image=(4, 6), patch=(2, 3))
PIXELS = to_device(np.random.default_rng(0).normal(0, 1, (2, 3, 4, 6)), np.float32)
MODEL = make(ViT, CONFIG, pooler=True, pooler_size=5)


@helpers.jit
def results_of(model, pixels, key=None):
    return model(pixels, key=key)


def slow_hidden(model, image):
    c, w = model.config, helpers.in_numpy(model)
    (high, wide), (rows, columns) = c.patch, c.grid
    x = [w.cls_token]
    for row in range(rows):
        for column in range(columns):
            at = (slice(high * row, high * (row + 1)), slice(wide * column, wide * (column + 1)))
            x.append(np.einsum("cpq,cpqd->d", image[:, *at], w.patch_embed) + w.patch_bias)
    x = np.stack(x) + w.position_embed
    for index in range(c.layers):
        layer = helpers.one_layer(w.layers, index)
        y = slow_norm(x, layer.attention_norm, layer.attention_norm_shift, c.norm_eps)
        project = lambda w, b, y=y: np.einsum("sd,dhk->shk", y, w) + (0 if b is None else b)
        qkv = [(layer.wq, layer.bq), (layer.wk, layer.bk), (layer.wv, layer.bv)]
        out = slow_attention(*(project(*pair) for pair in qkv), scale=0.5, causal=False)
        x = x + np.einsum("shk,hkd->sd", out, layer.wo) + layer.bo
        y = slow_norm(x, layer.mlp_norm, layer.mlp_norm_shift, c.norm_eps)
        x = x + helpers.slow_gelu(y @ layer.up + layer.up_bias) @ layer.down + layer.down_bias
    return slow_norm(x, w.norm, w.norm_shift, c.norm_eps)


@pytest.mark.few("changes0")
@pytest.mark.parametrize("changes", [{}, {"qkv_bias": False, "patch": (4, 2)}])
def test_matches_numpy(changes):
    model = make(ViT, CONFIG, **changes)
    for image, actual in zip(np.asarray(PIXELS), results_of(model, PIXELS), strict=True):
        close(actual, slow_hidden(model, image), 1e-4)


@pytest.mark.thorough
def test_pooler_and_head_match_numpy():
    labels = make(ViT, CONFIG, head="classification", labels=3)
    pooled, logits = MODEL.pool(MODEL.hidden(PIXELS)), results_of(labels, PIXELS)
    for row, image in enumerate(np.asarray(PIXELS)):
        w = helpers.in_numpy(MODEL).pooler
        close(pooled[row], np.tanh(slow_hidden(MODEL, image)[0] @ w.w + w.b), 1e-4)
        w = helpers.in_numpy(labels).head
        close(logits[row], slow_hidden(labels, image)[0] @ w.w + w.b, 1e-4)


def test_a_pooler_that_is_not_there_is_refused():
    for changes in ({}, {"pooler": True, "head": "classification"}):
        with pytest.raises(ValueError, match="This model has no pooler"):
            make(ViT, CONFIG, **changes).pool(jnp.zeros((1, 5, 16)))


@pytest.mark.parametrize("shape", [(2, 1, 4, 6), (2, 3, 6, 4), (2, 4, 6, 3)])
def test_images_of_other_sizes_are_refused(shape):
    with pytest.raises(ValueError, match=r"the model takes \(3, 4, 6\): channels, height and wid"):
        MODEL(jnp.zeros(shape))


@pytest.mark.thorough
def test_dropout_by_key():
    plain = results_of(MODEL, PIXELS)
    for rate in ("dropout", "attention_dropout"):
        model = make(ViT, MODEL.config, **{rate: 0.5})
        # Keys of this kind take less to compile.
        keys = (jax.random.key(seed, impl="unsafe_rbg") for seed in (0, 1))
        one, two = (results_of(model, PIXELS, key=key) for key in keys)
        assert min(jnp.max(jnp.abs(one - plain)), jnp.max(jnp.abs(one - two))) > 1e-3
    model = make(ViT, MODEL.config, dropout=0.5, attention_dropout=0.5)
    close(results_of(model, PIXELS), plain)


def loss_of(model, pixels):
    return jnp.mean(jnp.sin(model(pixels)))


gradient_of = helpers.jit(jax.grad(loss_of))


@pytest.mark.thorough
def test_remat_changes_no_gradient():
    expected = gradient_of(MODEL, PIXELS)
    actual = gradient_of(make(ViT, MODEL.config, remat="full"), PIXELS)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    few_of([(jnp.bfloat16, 0.04), (jnp.float16, 0.006)], (jnp.bfloat16, 0.04), several=True),
)
@pytest.mark.thorough
def test_half_precision_is_close_to_float32(dtype, tolerance):
    half = helpers.cast(make(ViT, CONFIG, norm_eps=1e-6), dtype)
    exact = results_of(helpers.cast(half, jnp.float32), PIXELS)
    actual = results_of(half, PIXELS)
    assert actual.dtype == dtype
    assert jnp.max(jnp.abs(actual.astype(jnp.float32) - exact)) < tolerance * jnp.max(exact)
    assert helpers.finite(gradient_of(half, PIXELS))


@pytest.mark.thorough
def test_is_split_over_a_mesh():
    model = make(ViT, CONFIG, width=32, hidden=128, head="classification", labels=4)
    pixels = jnp.tile(PIXELS, (2, 1, 1, 1))
    mesh = rc.make_mesh(data=2, model=4)
    plan = rc.plan_shardings(model, mesh, fn=loss_of, args=(pixels,))
    leaves, places = jax.tree.leaves(model), jax.tree.leaves(plan.shardings)
    split = sum(x.size for x, s in zip(leaves, places, strict=True) if "model" in str(s.spec))
    assert split >= 0.9 * sum(x.size for x in leaves)
    loss = helpers.jit(loss_of)(model, pixels)
    planned = helpers.jit(plan.constrain(loss_of))(jax.device_put(model, plan.shardings), pixels)
    assert abs(float(loss) - float(planned)) < 1e-5


@pytest.mark.thorough
def test_initial_deviation():
    sizes = {"width": 64, "hidden": 64, "image": (32, 32), "patch": (8, 8), "labels": 50}
    config = dataclasses.replace(CONFIG, head="classification", **sizes)
    # A key of this kind takes less to compile.
    key = jax.random.key(0, impl="unsafe_rbg")
    model = jax.jit(ViT, static_argnums=0)(config, key=key)
    for array in (model.patch_embed, model.position_embed, model.layers.up, model.head.w):
        np.testing.assert_allclose(jnp.std(array), 0.02, rtol=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3}, "16 is not a multiple of 3"),
        ({"patch": (3, 3)}, r"\(4, 6\) is not a multiple of \(3, 3\)"),
        ({"patch": (0, 3)}, r"\(4, 6\) is not a multiple of \(0, 3\)"),
        ({"channels": 0}, "`channels` must be at least 1"),
        ({"labels": 0}, "`labels` must be at least 1"),
        ({"attention_dropout": -0.1}, "`attention_dropout` must be at least 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


# As https://huggingface.co/google/vit-large-patch16-224-in21k has it.
PUBLISHED = {
    "architectures": ["ViTModel"],
    "attention_probs_dropout_prob": 0.0,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "hidden_size": 1024,
    "image_size": 224,
    "initializer_range": 0.02,
    "intermediate_size": 4096,
    "layer_norm_eps": 1e-12,
    "model_type": "vit",
    "num_attention_heads": 16,
    "num_channels": 3,
    "num_hidden_layers": 24,
    "patch_size": 16,
}


def test_published_settings_are_read():
    config = ViTConfig(1024, 24, 16, 4096, pooler=True)
    assert read_config(ViTConfig, PUBLISHED) == config
    labels = PUBLISHED | {
        "architectures": ["ViTForImageClassification"],
        "id2label": {"0": "tench", "1": "goldfish", "2": "shark"},
        "label2id": {"tench": 0, "goldfish": 1, "shark": 2},
        "qkv_bias": False,
    }
    changes = {"head": "classification", "labels": 3, "qkv_bias": False, "pooler": False}
    names = ("tench", "goldfish", "shark")
    expected = dataclasses.replace(config, **changes, label_names=names)
    assert read_config(ViTConfig, labels) == expected


@pytest.mark.parametrize("head", [None, "classification"])
def test_settings_are_read_back(head):
    changes = {"activation": "relu", "norm_eps": 1e-6, "dropout": 0.1, "attention_dropout": 0.2}
    changes |= {"pooler_size": 5, "qkv_bias": False, "channels": 1, "image": (6, 6), "labels": 3}
    changes = changes if head else {k: v for k, v in changes.items() if k != "labels"}
    config = dataclasses.replace(CONFIG, head=head, pooler=head is None, **changes)
    assert write_config(config)["image_size"] == 6
    assert read_config(ViTConfig, write_config(config)) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rotary": True}, "`rotary`, which is True, is unknown"),
        ({"model_type": "deit"}, "`model_type` is 'deit'"),
        ({"pooler_act": "relu"}, "`pooler_act` is 'relu'"),
        ({"hidden_act": "mish"}, "Unknown activation function 'mish'"),
        ({"architectures": ["ViTForMaskedImageModeling"]}, "only ViTModel or ViTForImageClassific"),
    ],
)
def test_settings_that_would_change_results_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        read_config(ViTConfig, PUBLISHED | change)


def test_names_of_tensors_settle_whether_there_is_a_pooler():
    config = dataclasses.replace(CONFIG, pooler=True)
    assert hf_vit.settle(config, ["pooler.dense.weight"]) == config
    assert hf_vit.settle(config, ["vit.layernorm.weight"]) == CONFIG


@pytest.mark.parametrize(
    ("changes", "some"),
    [
        ({"pooler": True}, ("pooler.dense.bias", "embeddings.patch_embeddings.projection.weight")),
        (
            {"head": "classification"},
            ("classifier.weight", "vit.encoder.layer.1.attention.attention.query.weight"),
        ),
    ],
)
def test_is_saved_under_published_names_and_read_back(changes, some, tmp_path):
    model = make(ViT, CONFIG, **changes)
    rc.save_pretrained(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors.keys() >= set(some)
    prefix = "vit." if "head" in changes else ""
    assert tensors[prefix + "embeddings.cls_token"].shape == (1, 1, 16)
    if not prefix:
        # A base may have its prefix all the same.
        tensors = {f"vit.{name}": x for name, x in tensors.items()}
        save_file(tensors, tmp_path / "model.safetensors")
    actual = rc.load_pretrained(tmp_path)
    assert actual.config == model.config
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(a, b)


def test_example_inputs_are_images():
    (pixels,) = hf_vit.example_inputs(CONFIG, 4)
    assert pixels.shape == (4, 3, 4, 6)
