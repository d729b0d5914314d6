"""Convolutional networks on 32 x 32 images of shape `batch height width channels`."""

import functools as ft
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .case import Case
from .layers import (
    cross_entropy,
    dot_product_attention,
    layer_norm,
    like,
    linear,
    make_arrays,
    split_heads,
)
from .vision import CLASSES, image_batch

CHANNELS = (64, 128, 256)
GROUPS = 8
HEADS = 8
MOMENTUM = 0.9

Shapes = dict[str, Any]


def conv(
    x: jax.Array, kernel: jax.Array, *, stride: int = 1, groups: int = 1, up: int = 1
) -> jax.Array:
    """A convolution; with `up`, a transposed convolution with this factor and an even kernel."""
    half = kernel.shape[0] // 2
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        "SAME" if up == 1 else [(half, half)] * 2,
        lhs_dilation=(up, up),
        feature_group_count=groups,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def scales(name: str, width: int) -> Shapes:
    return {f"{name}_scale": (width,), f"{name}_shift": (width,)}


def group_norm(p: PyTree, name: str, x: jax.Array) -> jax.Array:
    """Group normalisation (arXiv:1803.08494)."""
    grouped = x.reshape(*x.shape[:-1], GROUPS, x.shape[-1] // GROUPS)
    mean = jnp.mean(grouped, axis=(1, 2, 4), keepdims=True)
    variance = jnp.mean((grouped - mean) ** 2, axis=(1, 2, 4), keepdims=True)
    y = ((grouped - mean) * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape)
    return y * like(p[f"{name}_scale"], y) + like(p[f"{name}_shift"], y)


def residual_shapes(n: int, m: int) -> Shapes:
    """The shapes of a residual block from `n` to `m` channels."""
    shapes = {"conv1": (3, 3, n, m), "conv2": (3, 3, m, m), **scales("norm1", n)}
    shapes |= scales("norm2", m)
    if n != m:
        shapes["skip"] = (1, 1, n, m)
    return shapes


def residual_block(p: PyTree, x: jax.Array, *, stride: int = 1) -> jax.Array:
    y, skip = jax.nn.silu(group_norm(p, "norm1", x)), x
    if "skip" in p:
        skip = conv(y, p["skip"], stride=stride)
    y = conv(y, p["conv1"], stride=stride)
    return skip + conv(jax.nn.silu(group_norm(p, "norm2", y)), p["conv2"])


def stages(block: Any) -> list[list[Any]]:
    """Two blocks of each width; the first of a stage widens."""
    widths = (CHANNELS[0], *CHANNELS)
    return [[block(n, m), block(m, m)] for n, m in itertools.pairwise(widths)]


def ends(norm: Shapes) -> Shapes:
    return {"stem": (3, 3, 3, CHANNELS[0]), "classifier": (CHANNELS[-1], CLASSES), **norm}


def stride_of(stage: int, block: int) -> int:
    """The first block of each stage but the first halves the image."""
    if stage > 0 and block == 0:
        return 2
    return 1


def resnet_loss(params: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
    x = conv(batch["images"], params["stem"])
    for index, stage in enumerate(params["stages"]):
        for place, p in enumerate(stage):
            x = residual_block(p, x, stride=stride_of(index, place))
    x = jnp.mean(jax.nn.silu(group_norm(params, "norm", x)), axis=(1, 2))
    return cross_entropy(x @ params["classifier"], batch["labels"])


def separable_shapes(n: int, m: int) -> Shapes:
    """The shapes of a ConvNeXt block from `n` to `m` channels (arXiv:2201.03545)."""
    shapes = {"depthwise": (7, 7, 1, m), "expand": (m, 4 * m), "project": (4 * m, m)}
    shapes |= scales("norm", m) | {"b_expand": (4 * m,), "b_project": (m,)}
    if n != m:
        shapes["widen"] = (2, 2, n, m)
    return shapes


def separable_block(p: PyTree, x: jax.Array) -> jax.Array:
    if "widen" in p:
        x = conv(x, p["widen"], stride=2)
    y = conv(x, p["depthwise"], groups=x.shape[-1])
    y = layer_norm(y, p["norm_scale"], p["norm_shift"])
    y = jax.nn.gelu(linear(y, p["expand"], p["b_expand"]))
    return x + linear(y, p["project"], p["b_project"])


def separable_loss(params: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
    x = conv(batch["images"], params["stem"])
    for p in jax.tree.leaves(params["stages"], is_leaf=lambda p: isinstance(p, dict)):
        x = separable_block(p, x)
    x = layer_norm(jnp.mean(x, axis=(1, 2)), params["norm_scale"], params["norm_shift"])
    return cross_entropy(x @ params["classifier"], batch["labels"])


def attention_shapes(m: int) -> Shapes:
    return {f"w{x}": (m, m) for x in "qkvo"} | scales("norm", m)


def attention_block(p: PyTree, x: jax.Array) -> jax.Array:
    """Attention over all positions of an image."""
    y = group_norm(p, "norm", x).reshape(x.shape[0], -1, x.shape[-1])
    q, k, v = (split_heads(y @ p[name], HEADS) for name in ("wq", "wk", "wv"))
    return x + (dot_product_attention(q, k, v) @ p["wo"]).reshape(x.shape)


def unet_shapes() -> Shapes:
    """The shapes of a U-Net with attention at the lowest resolution."""
    a, b, c = CHANNELS
    return {
        "stem": (3, 3, 3, a),
        "down": [residual_shapes(a, b), residual_shapes(b, c)],
        "middle": residual_shapes(c, c),
        "attention": attention_shapes(c),
        "enlarge": [(4, 4, c, b), (4, 4, b, a)],
        "up": [residual_shapes(2 * b, b), residual_shapes(2 * a, a)],
        "last": (3, 3, a, 3),
    }


def unet_loss(params: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
    """The loss of predicting the noise that was added to the images (arXiv:2006.11239)."""
    noise = jax.random.normal(key, batch["images"].shape)
    x = conv(batch["images"] + noise, params["stem"])
    skips = []
    for p in params["down"]:
        skips.append(x)
        x = residual_block(p, x, stride=2)
    x = attention_block(params["attention"], residual_block(params["middle"], x))
    for kernel, p in zip(params["enlarge"], params["up"], strict=True):
        x = conv(x, kernel, up=2)
        x = residual_block(p, jnp.concatenate([x, skips.pop()], axis=-1))
    return jnp.mean((conv(x, params["last"]) - noise) ** 2)


def batch_norm(p: PyTree, state: PyTree, name: str, x: jax.Array) -> tuple[jax.Array, Any]:
    """Batch normalisation and updated running averages (arXiv:1502.03167)."""
    mean = jnp.mean(x, axis=(0, 1, 2))
    variance = jnp.mean(x**2, axis=(0, 1, 2)) - mean**2
    y = (x - like(mean, x)) * like(jax.lax.rsqrt(variance + 1e-5), x)
    moved = {
        key: MOMENTUM * state[key] + (1 - MOMENTUM) * jax.lax.stop_gradient(value)
        for key, value in ((f"{name}_mean", mean), (f"{name}_variance", variance))
    }
    return y * like(p[f"{name}_scale"], y) + like(p[f"{name}_shift"], y), moved


def batchnorm_shapes() -> Shapes:
    def block(n: int, m: int) -> Shapes:
        return {"conv": (3, 3, n, m), **scales("norm", m)}

    def averages(n: int, m: int) -> Shapes:
        return {"norm_mean": (m,), "norm_variance": (m,)}

    return {"net": {"stages": stages(block), **ends({})}, "state": stages(averages)}


def batchnorm_loss(params: PyTree, batch: PyTree, key: jax.Array) -> tuple[jax.Array, Any, Any]:
    net, moved = params["net"], []
    x = conv(batch["images"], net["stem"])
    for index, (stage, averages) in enumerate(zip(net["stages"], params["state"], strict=True)):
        moved.append([])
        for place, (p, state) in enumerate(zip(stage, averages, strict=True)):
            x = conv(x, p["conv"], stride=stride_of(index, place))
            x, state = batch_norm(p, state, "norm", x)
            moved[-1].append(state)
            x = jax.nn.silu(x)
    logits = jnp.mean(x, axis=(1, 2)) @ net["classifier"]
    loss = cross_entropy(logits, batch["labels"])
    accuracy = jnp.mean(jnp.argmax(logits, axis=-1).astype(jnp.int32) == batch["labels"])
    return loss, {"accuracy": accuracy}, {"net": net, "state": moved}


def case(name: str, shapes: Shapes, loss: Any) -> Case:
    images = ft.partial(image_batch, size=32)
    return Case(name, "other", ft.partial(make_arrays, shapes=shapes), loss, images)


RESNET = {"stages": stages(residual_shapes), **ends(scales("norm", CHANNELS[-1]))}
SEPARABLE = {"stages": stages(separable_shapes), **ends(scales("norm", CHANNELS[-1]))}
CONVOLUTIONAL = [
    case("residual convolutions", RESNET, resnet_loss),
    case("depthwise separable", SEPARABLE, separable_loss),
    case("U-Net with attention", unet_shapes(), unet_loss),
    case("BatchNorm with state", batchnorm_shapes(), batchnorm_loss),
]
