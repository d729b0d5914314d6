"""Mixtures of experts with eight experts, two of which process each token."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .case import Case
from .layers import causal_mask, cross_entropy, dot_product_attention, make_arrays
from .sizes import SMALL, Sizes, token_batch
from .transformers import norm, norm_shapes, project

EXPERTS, CHOICES, ROOM = 8, 2, 1.25


def shapes(s: Sizes) -> PyTree:
    d, h = s.width, s.hidden // 2
    attention = {f"w{x}": (d, d) for x in "qkvo"}
    experts = {"router": (d, EXPERTS), "w_in": (EXPERTS, d, h), "w_out": (EXPERTS, h, d)}
    layer = attention | experts | norm_shapes(s, "norm1", "norm2")
    ends = {"embed": (s.vocab, d), "head": (d, s.vocab), **norm_shapes(s, "norm")}
    return {"layers": [layer] * s.layers, **ends}


def route(p: PyTree, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the experts of each token, their weights, and a load-balancing loss."""
    probabilities = jax.nn.softmax(x @ p["router"], axis=-1)
    weights, experts = jax.lax.top_k(probabilities, CHOICES)
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    share = jnp.mean(jax.nn.one_hot(experts[..., 0], EXPERTS).reshape(-1, EXPERTS), axis=0)
    mean = jnp.mean(probabilities.reshape(-1, EXPERTS), axis=0)
    return experts, weights, EXPERTS * jnp.sum(share * mean)


def run_experts(p: PyTree, x: jax.Array) -> jax.Array:
    """Applies one MLP to each slice of `experts ... width`."""
    return jax.nn.gelu(x @ p["w_in"]) @ p["w_out"]


def dense_dispatch(p: PyTree, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Dispatches the tokens of each sequence by a one-hot array (arXiv:2006.16668)."""
    batch, seq, width = x.shape
    room = int(ROOM * CHOICES * seq / EXPERTS)
    experts, weights, balance = route(p, x)
    chosen = jax.nn.one_hot(experts, EXPERTS).reshape(batch, seq * CHOICES, EXPERTS)
    place = jnp.cumsum(chosen, axis=1) * chosen - 1
    # Tokens over the capacity have an index past the end, whose one-hot vector is zero.
    slots = jax.nn.one_hot(place.astype(jnp.int32), room)
    slots = slots.reshape(batch, seq, CHOICES, EXPERTS, room)
    dispatch = jnp.sum(slots, axis=2)
    combine = jnp.einsum("bskec,bsk->bsec", slots, weights)
    inputs = jnp.einsum("bsec,bsd->ebcd", dispatch, x).reshape(EXPERTS, batch * room, width)
    outputs = run_experts(p, inputs).reshape(EXPERTS, batch, room, width)
    return jnp.einsum("bsec,ebcd->bsd", combine, outputs), balance


def sorted_dispatch(p: PyTree, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Dispatches all tokens by sorting them by their expert."""
    width = x.shape[-1]
    tokens = x.reshape(-1, width)
    experts, weights, balance = route(p, tokens)
    experts, weights = experts.reshape(-1), weights.reshape(-1)
    room = int(ROOM * experts.size / EXPERTS)
    order = jnp.argsort(experts)
    owner, ordered = order // CHOICES, experts[order]
    first = jnp.searchsorted(ordered, jnp.arange(EXPERTS, dtype=ordered.dtype))
    place = jnp.arange(experts.size, dtype=first.dtype) - first[ordered]
    inputs = jnp.zeros((EXPERTS, room, width), x.dtype)
    inputs = inputs.at[ordered, place].set(tokens[owner], mode="drop")
    outputs = run_experts(p, inputs)
    weighted = outputs.at[ordered, place].get(mode="fill", fill_value=0)
    weighted = weighted * weights[order][:, None]
    return jnp.zeros_like(tokens).at[owner].add(weighted).reshape(x.shape), balance


def loss(params: PyTree, batch: PyTree, key: jax.Array, *, dispatch: Any) -> tuple[jax.Array, Any]:
    x = params["embed"][batch["tokens"]]
    mask, balances = causal_mask(x.shape[1]), []
    for p in params["layers"]:
        heads = project(p, norm(p, "norm1", x), SMALL.heads)
        x = x + dot_product_attention(*heads, mask=mask) @ p["wo"]
        y, balance = dispatch(p, norm(p, "norm2", x))
        x = x + y
        balances.append(balance)
    entropy = cross_entropy(norm(params, "norm", x) @ params["head"], batch["labels"])
    balance = jnp.mean(jnp.stack(balances))
    return entropy + 0.01 * balance, {"balance": balance}


def case(name: str, dispatch: Any) -> Case:
    init = ft.partial(make_arrays, shapes=shapes(SMALL))
    return Case(name, "other", init, ft.partial(loss, dispatch=dispatch), token_batch(SMALL))


EXPERT_MIXTURES = [
    case("experts, dense dispatch", dense_dispatch),
    case("experts, sorted", sorted_dispatch),
]
