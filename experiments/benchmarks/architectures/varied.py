"""Models of many kinds that are small enough to compile in about a second."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from . import experts
from .case import Case
from .contrastive import CONTRASTIVE
from .convolutional import conv, separable_block, separable_shapes
from .layers import cross_entropy, make_arrays
from .recurrent import lstm_loss, lstm_shapes
from .sizes import Sizes, token_batch
from .transformers import llama, norm, norm_shapes
from .unusual import UNUSUAL
from .vision import image_batch

TINY = Sizes(layers=2, width=64, heads=8, kv_heads=8, hidden=256, vocab=512, seq=32, batch=16)
# At this size, tensor parallelism and data parallelism over all devices cost about the same.
EVEN = Sizes(layers=4, width=256, heads=8, kv_heads=8, hidden=1024, vocab=1024, seq=64, batch=32)
CLASSES = 64


def convnext_shapes() -> PyTree:
    n = TINY.width
    ends = {"stem": (3, 3, 3, n), "classifier": (n, CLASSES), **norm_shapes(TINY, "norm")}
    return {"blocks": [separable_shapes(n, n)] * 2, **ends}


def convnext_loss(params: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
    x = conv(batch["images"], params["stem"], stride=2)
    for p in params["blocks"]:
        x = separable_block(p, x)
    x = norm(params, "norm", jnp.mean(x, axis=(1, 2)))
    return cross_entropy(x @ params["classifier"], batch["labels"] % CLASSES)


def case(name: str, shapes: PyTree, loss: Any, batch: PyTree) -> Case:
    return Case(name, "other", ft.partial(make_arrays, shapes=shapes), loss, batch)


TOKENS = token_batch(TINY)


VARIED: tuple[Case, ...] = (
    llama("decoder", TINY, scanned=False),
    llama("decoder, scanned", EVEN, scanned=True),
    case("LSTM", lstm_shapes(TINY), lstm_loss, TOKENS),
    case("ConvNeXt", convnext_shapes(), convnext_loss, ft.partial(image_batch, 16)),
    case(
        "experts",
        experts.shapes(TINY),
        ft.partial(experts.loss, dispatch=experts.dense_dispatch),
        TOKENS,
    ),
    *CONTRASTIVE,
    *UNUSUAL,
)
