"""Encoders of images and text: attention pooling, and a contrastive loss."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .case import Case
from .layers import (
    cross_entropy,
    dot_product_attention,
    like,
    linear,
    make_arrays,
    split_heads,
)
from .sizes import Sizes, token_batch
from .transformers import block_shapes, norm, norm_shapes, project
from .vision import PATCH, image_batch, patches

SIZES = Sizes(layers=2, width=64, heads=4, kv_heads=4, hidden=256, vocab=512, seq=16, batch=64)
SIDE, CLASSES, FEATURES = 16, 64, 128


def encoder_shapes(s: Sizes) -> PyTree:
    return {"layers": [block_shapes(s)] * s.layers, **norm_shapes(s, "norm")}


def encode(params: PyTree, x: jax.Array, heads: int) -> jax.Array:
    for p in params["layers"]:
        attended = dot_product_attention(*project(p, norm(p, "norm1", x), heads))
        x = x + linear(attended, p["wo"], p["bo"])
        y = norm(p, "norm2", x)
        x = x + linear(jax.nn.gelu(linear(y, p["w_in"], p["b_in"])), p["w_out"], p["b_out"])
    return norm(params, "norm", x)


def image_shapes(s: Sizes) -> PyTree:
    ends = {"patches": (PATCH * PATCH * 3, s.width), "positions": ((SIDE // PATCH) ** 2, s.width)}
    return ends | encoder_shapes(s)


def encode_images(params: PyTree, images: jax.Array, heads: int) -> jax.Array:
    x = patches(images) @ params["patches"]
    x = x.reshape(x.shape[0], -1, x.shape[-1])
    return encode(params, x + params["positions"][None], heads)


def text_shapes(s: Sizes) -> PyTree:
    return {"embed": (s.vocab, s.width), "positions": (s.seq, s.width), **encoder_shapes(s)}


def encode_text(params: PyTree, tokens: jax.Array, heads: int) -> jax.Array:
    return encode(params, params["embed"][tokens] + params["positions"][None], heads)


def pooled_shapes(s: Sizes) -> PyTree:
    pool = {"probe": (s.width,), **{f"w{x}": (s.width, s.width) for x in "qkvo"}}
    return {**image_shapes(s), "pool": pool, "classifier": (s.width, CLASSES)}


def pooled_loss(params: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
    """The loss of a vision transformer with attention pooling (arXiv:2303.15343)."""
    x, p = encode_images(params, batch["images"], SIZES.heads), params["pool"]
    q = split_heads(like(p["probe"], x[:, :1]) @ p["wq"], SIZES.heads)
    k, v = (split_heads(x @ p[name], SIZES.heads) for name in ("wk", "wv"))
    x = (dot_product_attention(q, k, v) @ p["wo"])[:, 0]
    return cross_entropy(x @ params["classifier"], batch["labels"] % CLASSES)


def clip_shapes(s: Sizes) -> PyTree:
    joint = dict.fromkeys(("image_features", "text_features"), (s.width, FEATURES))
    return {"image": image_shapes(s), "text": text_shapes(s), **joint, "scale": ()}


def clip_loss(params: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
    """CLIP's contrastive loss between images and texts (arXiv:2103.00020)."""
    images = encode_images(params["image"], batch["images"], SIZES.heads)
    text = encode_text(params["text"], batch["tokens"], SIZES.heads)
    a = unit(jnp.mean(images, axis=1) @ params["image_features"])
    b = unit(jnp.mean(text, axis=1) @ params["text_features"])
    logits = params["scale"] * (a @ b.T)
    labels = jnp.arange(logits.shape[0])
    return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2


def unit(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.sum(x**2, axis=-1, keepdims=True))


def pair_batch() -> PyTree:
    return token_batch(SIZES)() | image_batch(SIDE, SIZES.batch)


def case(name: str, shapes: PyTree, loss: Any) -> Case:
    return Case(name, "other", ft.partial(make_arrays, shapes=shapes), loss, pair_batch)


CONTRASTIVE = [
    case("ViT, pooled by attention", pooled_shapes(SIZES), pooled_loss),
    case("CLIP", clip_shapes(SIZES), clip_loss),
]
