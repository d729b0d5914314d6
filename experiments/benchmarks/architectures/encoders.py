"""BERT, and the encoder-decoders BART and T5."""

import functools as ft
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .case import Case
from .layers import (
    causal_mask,
    cross_entropy,
    dot_product_attention,
    like,
    linear,
    make_arrays,
    rms_norm,
    split_heads,
)
from .megatron import megatron_specs
from .sizes import SMALL, Sizes, token_batch
from .transformers import attention_shapes, mlp, mlp_shapes, norm, norm_shapes

BUCKETS = 32
MAX_DISTANCE = 128


def attend(p: PyTree, x: jax.Array, source: jax.Array, heads: int, **options: Any) -> jax.Array:
    """Attention from `x` to `source`, with optional biases."""
    read = {"q": x, "k": source, "v": source}
    q, k, v = (
        split_heads(linear(y, p[f"w{name}"], p.get(f"b{name}")), heads) for name, y in read.items()
    )
    return linear(dot_product_attention(q, k, v, **options), p["wo"], p.get("bo"))


def dropout(key: jax.Array, x: jax.Array, rate: float = 0.1) -> jax.Array:
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), 0)


def bert_shapes(s: Sizes) -> PyTree:
    layer = attention_shapes(s) | mlp_shapes(s) | norm_shapes(s, "norm1", "norm2")
    transform = {"w_transform": (s.width, s.width), "b_transform": (s.width,)}
    return {
        "embed": (s.vocab, s.width),
        "positions": (s.seq, s.width),
        "segments": (2, s.width),
        "layers": [layer] * s.layers,
        "head_bias": (s.vocab,),
        **transform,
        **norm_shapes(s, "norm", "transform"),
    }


def bert_loss(params: PyTree, batch: PyTree, key: jax.Array, *, heads: int) -> jax.Array:
    """The loss of masked language modelling, with dropout after each sublayer."""
    tokens, segments = batch["tokens"], batch["segments"] % 2
    x = params["embed"][tokens] + params["segments"][segments]
    x = norm(params, "norm", x + like(params["positions"], x))
    for index, p in enumerate(params["layers"]):
        key1, key2 = jax.random.split(jax.random.fold_in(key, index))
        x = norm(p, "norm1", x + dropout(key1, attend(p, x, x, heads)))
        x = norm(p, "norm2", x + dropout(key2, mlp(p, x, jax.nn.gelu)))
    x = jax.nn.gelu(linear(x, params["w_transform"], params["b_transform"]))
    logits = linear(norm(params, "transform", x), params["embed"].T, params["head_bias"])
    return cross_entropy(logits, batch["labels"])


def bart_shapes(s: Sizes) -> PyTree:
    """Half of the layers encode and half decode."""
    attention = attention_shapes(s)
    encoder = {"self": attention, "mlp": mlp_shapes(s), **norm_shapes(s, "norm1", "norm2")}
    decoder = encoder | {"cross": attention, **norm_shapes(s, "norm3")}
    return {
        "embed": (s.vocab, s.width),
        "head_bias": (s.vocab,),
        "encoder": bart_stack(s, encoder),
        "decoder": bart_stack(s, decoder),
    }


def bart_stack(s: Sizes, layer: PyTree) -> PyTree:
    layers = [layer] * (s.layers // 2)
    return {"positions": (s.seq, s.width), "layers": layers, **norm_shapes(s, "norm")}


def bart_stack_run(
    params: PyTree, x: jax.Array, memory: jax.Array | None, *, heads: int
) -> jax.Array:
    """The encoder or, with a memory, the decoder; post-norm."""
    mask = None
    if memory is not None:
        mask = causal_mask(x.shape[1])
    x = norm(params, "norm", x + like(params["positions"], x))
    for p in params["layers"]:
        x = norm(p, "norm1", x + attend(p["self"], x, x, heads, mask=mask))
        if memory is not None:
            x = norm(p, "norm3", x + attend(p["cross"], x, memory, heads))
        x = norm(p, "norm2", x + mlp(p["mlp"], x, jax.nn.gelu))
    return x


def bart_loss(params: PyTree, batch: PyTree, key: jax.Array, *, heads: int) -> jax.Array:
    embed, run = params["embed"], ft.partial(bart_stack_run, heads=heads)
    memory = run(params["encoder"], embed[batch["source"]], None)
    x = run(params["decoder"], embed[batch["tokens"]], memory)
    return cross_entropy(linear(x, embed.T, params["head_bias"]), batch["labels"])


def t5_shapes(s: Sizes) -> PyTree:
    """Half of the layers encode and half decode; without biases and learned positions."""
    d, h = s.width, s.hidden
    attention = {f"w{x}": (d, d) for x in "qkvo"}
    gated = {"gate": (d, h), "up": (d, h), "down": (h, d)}
    encoder = {"self": attention, "mlp": gated, "norm1_scale": (d,), "norm2_scale": (d,)}
    decoder = encoder | {"cross": attention, "norm3_scale": (d,)}

    def stack(layer: PyTree) -> PyTree:
        ends = {"distances": (BUCKETS, s.heads), "norm_scale": (d,)}
        return {"layers": [layer] * (s.layers // 2), **ends}

    ends = {"embed": (s.vocab, d), "head": (d, s.vocab)}
    return {"encoder": stack(encoder), "decoder": stack(decoder), **ends}


def relative_buckets(seq: int, *, both_ways: bool) -> jax.Array:
    """The bucket of each relative position, `seq seq`: exact if near, logarithmic if far."""
    places = jnp.arange(seq, dtype=jnp.int32)
    distance = places[None] - places[:, None]
    if both_ways:
        count = BUCKETS // 2
        side = jnp.where(distance > 0, count, 0)
        far = jnp.abs(distance)
    else:
        count = BUCKETS
        side = jnp.zeros_like(distance)
        far = jnp.maximum(-distance, 0)
    exact = count // 2
    ratio = jnp.maximum(far, 1).astype(jnp.float32) / exact
    steps = jnp.log(ratio) / math.log(MAX_DISTANCE / exact) * (count - exact)
    coarse = jnp.minimum(exact + steps.astype(jnp.int32), count - 1)
    return side + jnp.where(far < exact, far, coarse)


def t5_stack_run(
    params: PyTree, x: jax.Array, memory: jax.Array | None, *, heads: int
) -> jax.Array:
    """The encoder or, with a memory, the decoder."""
    seq = x.shape[1]
    buckets = relative_buckets(seq, both_ways=memory is None)
    bias = jnp.transpose(params["distances"][buckets], (2, 0, 1))[None]
    mask = None
    if memory is not None:
        mask = causal_mask(seq)
    for p in params["layers"]:
        y = rms_norm(x, p["norm1_scale"])
        x = x + attend(p["self"], y, y, heads, bias=bias, mask=mask, scaled=False)
        if memory is not None:
            y = rms_norm(x, p["norm3_scale"])
            x = x + attend(p["cross"], y, memory, heads, scaled=False)
        x = x + gated_mlp(p["mlp"], rms_norm(x, p["norm2_scale"]))
    return rms_norm(x, params["norm_scale"])


def gated_mlp(p: PyTree, x: jax.Array) -> jax.Array:
    return (jax.nn.gelu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def t5_loss(params: PyTree, batch: PyTree, key: jax.Array, *, heads: int) -> jax.Array:
    embed, run = params["embed"], ft.partial(t5_stack_run, heads=heads)
    memory = run(params["encoder"], embed[batch["source"]], None)
    x = run(params["decoder"], embed[batch["tokens"]], memory)
    return cross_entropy(x @ params["head"], batch["labels"])


def encoder_case(name: str, shapes: PyTree, loss: Any, *inputs: str, std: float = 0.05) -> Case:
    init = ft.partial(make_arrays, shapes=shapes(SMALL), std=std)
    loss = ft.partial(loss, heads=SMALL.heads)
    batch = token_batch(SMALL, *inputs)
    return Case(name, "transformer", init, loss, batch, megatron_specs)


ENCODERS = [
    encoder_case("BERT, dropout", bert_shapes, bert_loss, "segments"),
    encoder_case("BART", bart_shapes, bart_loss, "source"),
    # T5 does not scale the attention scores, and has smaller initial weights instead.
    encoder_case("T5", t5_shapes, t5_loss, "source", std=0.02),
]
