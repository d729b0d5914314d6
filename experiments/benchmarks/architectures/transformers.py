"""Decoders: GPT-2, OPT, GPT-J and LLaMA."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .case import Case
from .layers import (
    causal_mask,
    cross_entropy,
    dot_product_attention,
    layer_norm,
    linear,
    make_arrays,
    merge_heads,
    rms_norm,
    rotate,
    split_heads,
    stack_shapes,
)
from .megatron import megatron_specs
from .sizes import GROUPED, LLAMA_7B, OPT_66B, SMALL, Sizes, abstract_batch, token_batch

Shapes = dict[str, tuple[int, ...]]


def attention_shapes(s: Sizes, *, fused: bool = False) -> Shapes:
    d = s.width
    inner = {"wqkv": (d, 3 * d), "bqkv": (3 * d,)}
    if not fused:
        inner = {f"w{x}": (d, d) for x in "qkv"} | {f"b{x}": (d,) for x in "qkv"}
    return inner | {"wo": (d, d), "bo": (d,)}


def mlp_shapes(s: Sizes) -> Shapes:
    d, h = s.width, s.hidden
    return {"w_in": (d, h), "b_in": (h,), "w_out": (h, d), "b_out": (d,)}


def norm_shapes(s: Sizes, *names: str) -> Shapes:
    return {f"{name}_{part}": (s.width,) for name in names for part in ("scale", "shift")}


def norm(p: PyTree, name: str, x: jax.Array) -> jax.Array:
    return layer_norm(x, p[f"{name}_scale"], p[f"{name}_shift"])


def project(p: PyTree, x: jax.Array, heads: int) -> list[jax.Array]:
    """Computes queries, keys and values with one matrix or with three."""
    if "wqkv" in p:
        parts = jnp.split(linear(x, p["wqkv"], p["bqkv"]), 3, axis=-1)
    else:
        parts = [linear(x, p[f"w{n}"], p.get(f"b{n}")) for n in "qkv"]
    return [split_heads(part, heads) for part in parts]


def mlp(p: PyTree, x: jax.Array, activation: Any) -> jax.Array:
    return linear(activation(linear(x, p["w_in"], p["b_in"])), p["w_out"], p["b_out"])


def block(p: PyTree, x: jax.Array, *, heads: int, activation: Any) -> jax.Array:
    """The pre-norm layer of GPT-2 and OPT."""
    mask = causal_mask(x.shape[1])
    attended = dot_product_attention(*project(p, norm(p, "norm1", x), heads), mask=mask)
    x = x + linear(attended, p["wo"], p["bo"])
    return x + mlp(p, norm(p, "norm2", x), activation)


def block_shapes(s: Sizes, *, fused: bool = False) -> Shapes:
    return attention_shapes(s, fused=fused) | mlp_shapes(s) | norm_shapes(s, "norm1", "norm2")


def layers_of(s: Sizes, layer: Shapes, *, scanned: bool) -> PyTree:
    """The shapes of all layers: stacked for a scan, or a list."""
    if scanned:
        return stack_shapes(s.layers, layer)
    return [layer] * s.layers


def learned_shapes(s: Sizes, *, fused: bool, scanned: bool) -> PyTree:
    """The shapes of GPT-2 or OPT, with learned positions and a tied head."""
    return {
        "embed": (s.vocab, s.width),
        "positions": (s.seq, s.width),
        "layers": layers_of(s, block_shapes(s, fused=fused), scanned=scanned),
        **norm_shapes(s, "norm"),
    }


def learned_loss(
    params: PyTree, batch: PyTree, key: jax.Array, *, heads: int, activation: Any
) -> jax.Array:
    x = params["embed"][batch["tokens"]]
    x = x + params["positions"][None, : x.shape[1]]
    apply = ft.partial(block, heads=heads, activation=activation)
    x = run_layers(apply, params["layers"], x)
    return cross_entropy(norm(params, "norm", x) @ params["embed"].T, batch["labels"])


def run_layers(apply: Any, layers: Any, x: jax.Array) -> jax.Array:
    """Applies a list of layers in a loop, and stacked layers in a rematerialised scan."""
    if isinstance(layers, list):
        for layer in layers:
            x = apply(layer, x)
        return x
    return jax.lax.scan(jax.checkpoint(lambda x, p: (apply(p, x), None)), x, layers)[0]


def gptj_block(p: PyTree, x: jax.Array, *, heads: int) -> jax.Array:
    """The layer of GPT-J: attention and the MLP in parallel, after one normalisation."""
    y = norm(p, "norm", x)
    q, k, v = project(p, y, heads)
    attended = dot_product_attention(rotate(q), rotate(k), v, mask=causal_mask(x.shape[1]))
    return x + attended @ p["wo"] + mlp(p, y, jax.nn.gelu)


def gptj_shapes(s: Sizes) -> PyTree:
    d = s.width
    layer = {f"w{x}": (d, d) for x in "qkvo"} | mlp_shapes(s) | norm_shapes(s, "norm")
    head = {"head": (d, s.vocab), "head_bias": (s.vocab,)}
    ends = {"embed": (s.vocab, d), **head, **norm_shapes(s, "norm")}
    return {"layers": [layer] * s.layers, **ends}


def gptj_loss(params: PyTree, batch: PyTree, key: jax.Array, *, heads: int) -> jax.Array:
    x = params["embed"][batch["tokens"]]
    x = run_layers(ft.partial(gptj_block, heads=heads), params["layers"], x)
    logits = linear(norm(params, "norm", x), params["head"], params["head_bias"])
    return cross_entropy(logits, batch["labels"])


def grouped_attention(p: PyTree, x: jax.Array, heads: int, kv_heads: int) -> jax.Array:
    """Grouped-query attention (arXiv:2305.13245)."""
    q, k, v = (
        split_heads(x @ p[name], count)
        for name, count in (("wq", heads), ("wk", kv_heads), ("wv", kv_heads))
    )
    q, k = rotate(q), rotate(k)
    if heads == kv_heads:
        return dot_product_attention(q, k, v, mask=causal_mask(x.shape[1])) @ p["wo"]
    q = q.reshape(*q.shape[:2], kv_heads, heads // kv_heads, q.shape[-1])
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k) / q.shape[-1] ** 0.5
    weights = jax.nn.softmax(jnp.where(causal_mask(x.shape[1])[None], scores, -1e9), axis=-1)
    y = merge_heads(jnp.einsum("bhgqk,bkhd->bqhgd", weights, v))
    return merge_heads(y) @ p["wo"]


def llama_block(p: PyTree, x: jax.Array, *, heads: int, kv_heads: int) -> jax.Array:
    x = x + grouped_attention(p, rms_norm(x, p["norm1_scale"]), heads, kv_heads)
    y = rms_norm(x, p["norm2_scale"])
    return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]


def llama_shapes(s: Sizes, *, scanned: bool) -> PyTree:
    d, kv = s.width, s.width // s.heads * s.kv_heads
    attention = {"wq": (d, d), "wk": (d, kv), "wv": (d, kv), "wo": (d, d)}
    feed = {"gate": (d, s.hidden), "up": (d, s.hidden), "down": (s.hidden, d)}
    layer = attention | feed | {"norm1_scale": (d,), "norm2_scale": (d,)}
    layers = layers_of(s, layer, scanned=scanned)
    ends = {"embed": (s.vocab, d), "head": (d, s.vocab), "norm_scale": (d,)}
    return {"layers": layers, **ends}


def llama_loss(
    params: PyTree, batch: PyTree, key: jax.Array, *, heads: int, kv_heads: int
) -> jax.Array:
    x = params["embed"][batch["tokens"]]
    apply = ft.partial(llama_block, heads=heads, kv_heads=kv_heads)
    x = run_layers(apply, params["layers"], x)
    return cross_entropy(rms_norm(x, params["norm_scale"]) @ params["head"], batch["labels"])


def decoder(name: str, shapes: PyTree, loss: Any, sizes: Sizes, **options: Any) -> Case:
    if options.get("abstract"):
        batch = abstract_batch(sizes)
    else:
        batch = token_batch(sizes)
    init = ft.partial(make_arrays, shapes=shapes)
    return Case(name, "transformer", init, loss, batch, megatron_specs, **options)


def learned(
    name: str,
    sizes: Sizes,
    activation: Any,
    *,
    fused: Any = False,
    scanned: Any = False,
    **options: Any,
) -> Case:
    loss = ft.partial(learned_loss, heads=sizes.heads, activation=activation)
    shapes = learned_shapes(sizes, fused=fused, scanned=scanned)
    return decoder(name, shapes, loss, sizes, **options)


def llama(name: str, sizes: Sizes, *, scanned: bool, **options: Any) -> Case:
    loss = ft.partial(llama_loss, heads=sizes.heads, kv_heads=sizes.kv_heads)
    return decoder(name, llama_shapes(sizes, scanned=scanned), loss, sizes, **options)


def opt_layers(layers: int) -> Case:
    """OPT of any depth, to measure how planning grows with it."""
    sizes = Sizes(layers=layers)
    return learned(f"OPT, {layers} layers", sizes, jax.nn.relu, compiled=False)


DECODERS = [
    learned("GPT-2", SMALL, jax.nn.gelu),
    learned("GPT-2, fused QKV", SMALL, jax.nn.gelu, fused=True),
    decoder("GPT-J", gptj_shapes(SMALL), ft.partial(gptj_loss, heads=SMALL.heads), SMALL),
    llama("LLaMA, GQA", GROUPED, scanned=False),
    llama("LLaMA, GQA, scanned", GROUPED, scanned=True),
    learned("OPT", SMALL, jax.nn.relu),
]
LARGE = [
    llama("LLaMA-7B, scanned", LLAMA_7B, scanned=True, abstract=True),
    learned("OPT-66B, scanned", OPT_66B, jax.nn.relu, scanned=True, abstract=True),
    learned("OPT-66B", OPT_66B, jax.nn.relu, abstract=True, compiled=False),
]
