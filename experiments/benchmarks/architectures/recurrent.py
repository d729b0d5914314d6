"""Recurrent networks for text: an LSTM, and two versions of a gated linear recurrence."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .case import Case
from .layers import cross_entropy, like, linear, make_arrays, rms_norm
from .sizes import SMALL, Sizes, token_batch


def ends(s: Sizes) -> PyTree:
    return {"embed": (s.vocab, s.width), "head": (s.width, s.vocab)}


def lstm_shapes(s: Sizes) -> PyTree:
    """The shapes of two layers, whose four gates are concatenated."""
    d = s.width
    layer = {"w_input": (d, 4 * d), "w_hidden": (d, 4 * d), "b_gates": (4 * d,)}
    return {"layers": [layer] * 2, **ends(s)}


def lstm_layer(p: PyTree, x: jax.Array) -> jax.Array:
    """An LSTM layer on `batch seq width`, which projects the inputs of all steps at once."""

    def step(carry: PyTree, projected: jax.Array) -> PyTree:
        hidden, cell = carry
        gates = projected + linear(hidden, p["w_hidden"], p["b_gates"])
        i, f, g, o = jnp.split(gates, 4, axis=-1)
        cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
        hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
        return (hidden, cell), hidden

    start = jnp.zeros((x.shape[0], x.shape[-1]), x.dtype)
    projected = jnp.swapaxes(x @ p["w_input"], 0, 1)
    return jnp.swapaxes(jax.lax.scan(step, (start, start), projected)[1], 0, 1)


def lstm_loss(params: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
    x = params["embed"][batch["tokens"]]
    for p in params["layers"]:
        x = lstm_layer(p, x)
    return cross_entropy(x @ params["head"], batch["labels"])


def gated_shapes(s: Sizes) -> PyTree:
    d, h = s.width, 2 * s.width
    inner = dict.fromkeys(("w_value", "w_forget", "w_gate"), (d, h))
    layer = {**inner, "b_forget": (h,), "w_out": (h, d), "norm_scale": (d,)}
    return {"layers": [layer] * s.layers, "norm_scale": (s.width,), **ends(s)}


def by_scan(decay: jax.Array, value: jax.Array) -> jax.Array:
    """Computes `h = decay * h + value` over the second dimension with a scan."""

    def step(h: jax.Array, now: PyTree) -> PyTree:
        h = now[0] * h + now[1]
        return h, h

    first = (jnp.swapaxes(decay, 0, 1), jnp.swapaxes(value, 0, 1))
    return jnp.swapaxes(jax.lax.scan(step, jnp.zeros_like(value[:, 0]), first)[1], 0, 1)


def by_associative_scan(decay: jax.Array, value: jax.Array) -> jax.Array:
    """Computes the same recurrence with an associative scan."""

    def join(left: PyTree, right: PyTree) -> PyTree:
        return left[0] * right[0], right[0] * left[1] + right[1]

    return jax.lax.associative_scan(join, (decay, value), axis=1)[1]


def gated_loss(params: PyTree, batch: PyTree, key: jax.Array, *, recur: Any) -> jax.Array:
    """A linear recurrence whose decay depends on the input (arXiv:2402.19427)."""
    x = params["embed"][batch["tokens"]]
    for p in params["layers"]:
        y = rms_norm(x, p["norm_scale"])
        forget = y @ p["w_forget"]
        decay = jax.nn.sigmoid(forget + like(p["b_forget"], forget))
        h = recur(decay, (1 - decay) * (y @ p["w_value"]))
        x = x + (h * jax.nn.silu(y @ p["w_gate"])) @ p["w_out"]
    return cross_entropy(rms_norm(x, params["norm_scale"]) @ params["head"], batch["labels"])


def case(name: str, shapes: PyTree, loss: Any) -> Case:
    init = ft.partial(make_arrays, shapes=shapes)
    return Case(name, "other", init, loss, token_batch(SMALL))


RECURRENT = [
    case("gated recurrence, scan", gated_shapes(SMALL), ft.partial(gated_loss, recur=by_scan)),
    case(
        "gated recurrence, associative",
        gated_shapes(SMALL),
        ft.partial(gated_loss, recur=by_associative_scan),
    ),
    case("LSTM", lstm_shapes(SMALL), lstm_loss),
]
