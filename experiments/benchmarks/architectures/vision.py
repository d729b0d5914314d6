"""Images as patches: ViT, shifted windows (Swin), MLP-Mixer, and linear attention (Performer)."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .case import Case
from .layers import (
    cross_entropy,
    dot_product_attention,
    linear,
    make_arrays,
    merge_heads,
)
from .megatron import megatron_specs
from .sizes import SMALL, Sizes, token_batch
from .transformers import (
    attention_shapes,
    block_shapes,
    mlp,
    mlp_shapes,
    norm,
    norm_shapes,
    project,
)

PATCH, CLASSES, WINDOW, FEATURES = 4, 1024, 4, 64


def image_batch(size: int = 64, count: int = 16) -> PyTree:
    """Colour images, `batch height width 3`, and their classes."""
    rng = np.random.default_rng(0)
    images = rng.normal(size=(count, size, size, 3)).astype(np.float32)
    return {"images": images, "labels": rng.integers(0, CLASSES, count).astype(np.int32)}


def patches(images: jax.Array) -> jax.Array:
    """Reshapes `batch height width 3` to `batch rows columns (patch patch 3)`."""
    batch, height, width, channels = images.shape
    x = images.reshape(batch, height // PATCH, PATCH, width // PATCH, PATCH, channels)
    x = jnp.transpose(x, (0, 1, 3, 2, 4, 5))
    return x.reshape(*x.shape[:3], PATCH * PATCH * channels)


def patch_shapes(s: Sizes, layer: PyTree) -> PyTree:
    """The shapes of the embedding and the head, which all of these models share."""
    return {
        "patches": (PATCH * PATCH * 3, s.width),
        "layers": [layer] * s.layers,
        "classifier": (s.width, CLASSES),
        **norm_shapes(s, "norm"),
    }


def classify(params: PyTree, x: jax.Array, labels: jax.Array) -> jax.Array:
    """Computes the classification loss from features `batch seq width`."""
    x = jnp.mean(norm(params, "norm", x), axis=1)
    return cross_entropy(x @ params["classifier"], labels)


def vit_shapes(s: Sizes) -> PyTree:
    return patch_shapes(s, block_shapes(s)) | {"positions": (16 * 16, s.width)}


def vit_loss(params: PyTree, batch: PyTree, key: jax.Array, *, heads: int) -> jax.Array:
    x = patches(batch["images"]) @ params["patches"]
    x = x.reshape(x.shape[0], -1, x.shape[-1])
    x = x + params["positions"][None]
    for p in params["layers"]:
        attended = dot_product_attention(*project(p, norm(p, "norm1", x), heads))
        x = x + linear(attended, p["wo"], p["bo"])
        x = x + mlp(p, norm(p, "norm2", x), jax.nn.gelu)
    return classify(params, x, batch["labels"])


def windows(x: jax.Array) -> jax.Array:
    """Reshapes `batch rows columns width` to `(batch windows) seq width`."""
    batch, rows, columns, width = x.shape
    x = x.reshape(batch, rows // WINDOW, WINDOW, columns // WINDOW, WINDOW, width)
    return jnp.transpose(x, (0, 1, 3, 2, 4, 5)).reshape(-1, WINDOW * WINDOW, width)


def unwindows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    batch, rows, columns, width = shape
    x = x.reshape(batch, rows // WINDOW, columns // WINDOW, WINDOW, WINDOW, width)
    return jnp.transpose(x, (0, 1, 3, 2, 4, 5)).reshape(shape)


def swin_shapes(s: Sizes) -> PyTree:
    return patch_shapes(s, block_shapes(s) | {"distances": ((2 * WINDOW - 1) ** 2, s.heads)})


def window_distances() -> np.ndarray:
    """The index of the relative position of each pair in a window, `seq seq`."""
    places = np.stack(np.meshgrid(np.arange(WINDOW), np.arange(WINDOW), indexing="ij"), -1)
    places = places.reshape(-1, 2)
    step = places[:, None] - places[None] + WINDOW - 1
    return step[..., 0] * (2 * WINDOW - 1) + step[..., 1]


def swin_block(p: PyTree, x: jax.Array, shift: int, heads: int) -> jax.Array:
    """Window attention; the windows of every second layer are shifted (arXiv:2103.14030)."""
    y = norm(p, "norm1", jnp.roll(x, (-shift, -shift), axis=(1, 2)))
    q, k, v = project(p, windows(y), heads)
    bias = jnp.transpose(p["distances"][window_distances()], (2, 0, 1))[None]
    y = linear(dot_product_attention(q, k, v, bias=bias), p["wo"], p["bo"])
    x = x + jnp.roll(unwindows(y, x.shape), (shift, shift), axis=(1, 2))
    return x + mlp(p, norm(p, "norm2", x), jax.nn.gelu)


def swin_loss(params: PyTree, batch: PyTree, key: jax.Array, *, heads: int) -> jax.Array:
    x = patches(batch["images"]) @ params["patches"]
    for index, p in enumerate(params["layers"]):
        x = swin_block(p, x, WINDOW // 2 * (index % 2), heads)
    return classify(params, x.reshape(x.shape[0], -1, x.shape[-1]), batch["labels"])


def mixer_shapes(s: Sizes) -> PyTree:
    """The shapes of MLP-Mixer: a layer has an MLP over patches and one over channels."""
    seq = 16 * 16
    mix = {"w_in": (seq, 512), "b_in": (512,), "w_out": (512, seq), "b_out": (seq,)}
    return patch_shapes(
        s, {"patches": mix, "channels": mlp_shapes(s), **norm_shapes(s, "norm1", "norm2")}
    )


def mixer_loss(params: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
    x = patches(batch["images"]) @ params["patches"]
    x = x.reshape(x.shape[0], -1, x.shape[-1])
    for p in params["layers"]:
        y = jnp.swapaxes(norm(p, "norm1", x), 1, 2)
        x = x + jnp.swapaxes(mlp(p["patches"], y, jax.nn.gelu), 1, 2)
        x = x + mlp(p["channels"], norm(p, "norm2", x), jax.nn.gelu)
    return classify(params, x, batch["labels"])


def performer_shapes(s: Sizes) -> PyTree:
    layer = attention_shapes(s) | mlp_shapes(s) | norm_shapes(s, "norm1", "norm2")
    return {"embed": (s.vocab, s.width), "layers": [layer] * s.layers} | norm_shapes(s, "norm")


def random_features(x: jax.Array) -> jax.Array:
    """Positive random features, whose products approximate the exponentials of softmax."""
    x = x * x.shape[-1] ** -0.25
    directions = jax.random.normal(jax.random.key(7), (x.shape[-1], FEATURES))
    return jnp.exp(x @ directions - jnp.sum(x**2, axis=-1, keepdims=True) / 2)


def linear_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Linear attention with positive random features (arXiv:2009.14794)."""
    q, k = random_features(q), random_features(k)
    memory = jnp.einsum("bshd,bshe->bhde", k, v)
    total = jnp.einsum("bshd,bhd->bsh", q, jnp.sum(k, axis=1))
    return merge_heads(jnp.einsum("bshd,bhde->bshe", q, memory) / total[..., None])


def performer_loss(params: PyTree, batch: PyTree, key: jax.Array, *, heads: int) -> jax.Array:
    x = params["embed"][batch["tokens"]]
    for p in params["layers"]:
        attended = linear_attention(*project(p, norm(p, "norm1", x), heads))
        x = x + linear(attended, p["wo"], p["bo"])
        x = x + mlp(p, norm(p, "norm2", x), jax.nn.gelu)
    return cross_entropy(norm(params, "norm", x) @ params["embed"].T, batch["labels"])


def arrays(shapes: PyTree) -> PyTree:
    return ft.partial(make_arrays, shapes=shapes)


def with_heads(loss: Any) -> Any:
    return ft.partial(loss, heads=SMALL.heads)


VIT = Case(
    "ViT",
    "transformer",
    arrays(vit_shapes(SMALL)),
    with_heads(vit_loss),
    image_batch,
    megatron_specs,
)
VISION = [
    Case(
        "windowed attention",
        "other",
        arrays(swin_shapes(SMALL)),
        with_heads(swin_loss),
        image_batch,
    ),
    Case("MLP-Mixer", "other", arrays(mixer_shapes(SMALL)), mixer_loss, image_batch),
    Case(
        "linear attention",
        "other",
        arrays(performer_shapes(SMALL)),
        with_heads(performer_loss),
        token_batch(SMALL),
    ),
]
