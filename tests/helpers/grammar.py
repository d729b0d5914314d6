"""Programs put together from layers of many kinds, for tests that make them at random.

A layer takes arrays `p` and activations `x` of shape (batch, time, width), and keeps the shape. Its
result is bounded, so that gradients of a chain of them neither vanish nor explode.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from sharding_helpers import array

product = jax.custom_vjp(jnp.dot)
product.defvjp(
    lambda x, w: (x @ w, (x, w)),
    lambda r, g: (g @ r[1].T, jnp.einsum("btd,bte->de", r[0], g)),
)


row = lambda v: v[None, None]


@dataclass(frozen=True)
class Sizes:
    batch: int = 8
    time: int = 4
    width: int = 8
    hidden: int = 16
    heads: int = 4
    experts: int = 4
    vocabulary: int = 16


def norm(p, x):
    x = x - jnp.mean(x, -1, keepdims=True)
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 0.1) * row(p["scale"])


def mlp(p, x):
    return x + jnp.tanh(x @ p["up"]) @ p["down"]


def gated(p, x):
    return x + (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def fused(p, x):
    a, b = jnp.split(x @ p["both"], 2, -1)
    return jnp.tanh(a * jax.nn.sigmoid(b)) @ p["down"]


def joined(p, x):
    return jnp.concatenate([x, jnp.tanh(x @ p["up"])], -1) @ p["down"]


def attend(q, k, v):
    return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k)), v)


def attention(p, x):
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, p[name]) for name in "qkv")
    return x + jnp.einsum("bthk,hkd->btd", attend(q, k, v), p["o"])


def merged_heads(p, x):
    """Heads as parts of one dimension, as many models have them."""
    heads = (*x.shape[:2], 4, -1)
    q, k, v = ((x @ p[name]).reshape(heads) for name in "qkv")
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return x + y.reshape(*x.shape[:2], -1) @ p["o"]


def experts(p, x):
    weights = jax.nn.softmax(x @ p["router"])
    y = jnp.tanh(jnp.einsum("btd,edf->btef", x, p["up"]))
    return jnp.einsum("bte,btef,efd->btd", weights, y, p["down"])


def layers(p, x):
    return lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, p["stack"])[0]


def recurrence(p, x):
    step = lambda h, x: ((y := jnp.tanh(h @ p["w"] + x)), y)
    start = jnp.zeros((x.shape[0], x.shape[2]), x.dtype)
    return jnp.swapaxes(lax.scan(step, start, jnp.swapaxes(x, 0, 1))[1], 0, 1)


def gates(p, x):
    """A long short-term memory, with one of its matrices transposed."""

    def step(state, x):
        h, c = state
        i, f, g, o = jnp.split(x @ p["into"] + h @ p["back"].T + p["b"][None], 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (h := jax.nn.sigmoid(o) * jnp.tanh(c), c), h

    start = jnp.zeros((x.shape[0], x.shape[2]), x.dtype)
    return jnp.swapaxes(lax.scan(step, (start, start), jnp.swapaxes(x, 0, 1))[1], 0, 1)


def looped(p, x):
    return lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ p["w"]), x)


def solver(p, x):
    body = lambda c: (c[0] + 1, jnp.tanh(c[1] @ p["w"]))
    loop = eqx.internal.while_loop
    return loop(lambda c: c[0] < 3, body, (jnp.int32(0), x), kind="checkpointed", max_steps=4)[1]


def either(p, x):
    return lax.cond(x[0, 0, 0] > 0, lambda: x @ p["a"], lambda: jnp.sin(x @ p["b"]))


def channels(p, x):
    pad = jnp.pad(x, ((0, 0), (1, 1), (0, 0)))
    dims = ("NTC", "TIO", "NTC")
    groups = x.shape[2] // p["kernel"].shape[1]
    return lax.conv_general_dilated(
        pad, p["kernel"], (1,), "VALID", dimension_numbers=dims, feature_group_count=groups
    )


def chosen(p, x):
    values, places = lax.top_k(x @ p["w"], 2)
    return jnp.tanh(jnp.sum(values, -1, keepdims=True)) * p["table"][places[..., 0]]


def inner_step(p, x):
    loss = lambda x: jnp.sum(jnp.tanh(x @ p["w"]) ** 2)
    return x - 0.1 * jax.grad(loss)(x)


def scattered(p, x):
    rows = jnp.arange(x.shape[1])[::-1]
    return jnp.zeros_like(x).at[:, rows].add(x) * row(p["scale"])


D, F = "width", "hidden"
# For each layer its function and its arrays, by the names of their sizes.
LAYERS = {
    "norm": (norm, {"scale": (D,)}),
    "bias": (lambda p, x: x + row(p["b"]), {"b": (D,)}),
    "dense": (lambda p, x: jnp.tanh(x @ p["w"]), {"w": (D, D)}),
    "transposed": (lambda p, x: jnp.tanh(x @ p["w"].T), {"w": (D, D)}),
    "tied": (lambda p, x: jnp.tanh(x @ p["w"]) @ p["w"].T, {"w": (D, F)}),
    "mlp": (mlp, {"up": (D, F), "down": (F, D)}),
    "remat": (jax.checkpoint(mlp), {"up": (D, F), "down": (F, D)}),
    "jit": (jax.jit(mlp), {"up": (D, F), "down": (F, D)}),
    "gated": (gated, {"gate": (D, F), "up": (D, F), "down": (F, D)}),
    "fused": (fused, {"both": (D, "halves"), "down": (F, D)}),
    "joined": (joined, {"up": (D, F), "down": ("sum", D)}),
    "custom": (lambda p, x: jnp.tanh(product(x, p["w"])), {"w": (D, D)}),
    "attention": (
        attention,
        {**dict.fromkeys("qkv", (D, "heads", "head")), "o": ("heads", "head", D)},
    ),
    "merged heads": (
        merged_heads,
        dict.fromkeys("qkvo", (D, D)),
    ),
    "experts": (
        experts,
        {"router": (D, "experts"), "up": ("experts", D, F), "down": ("experts", F, D)},
    ),
    "time mixing": (
        lambda p, x: x + jnp.einsum("btd,ts->bsd", x, p["w"]),
        {"w": ("time", "time")},
    ),
    "layers": (layers, {"stack": (2, D, D)}),
    "recurrence": (recurrence, {"w": (D, D)}),
    "gates": (gates, {"into": (D, "gates"), "back": ("gates", D), "b": ("gates",)}),
    "looped": (looped, {"w": (D, D)}),
    "solver": (solver, {"w": (D, D)}),
    "either": (either, {"a": (D, D), "b": (D, D)}),
    "depthwise": (channels, {"kernel": (3, 1, D)}),
    "convolution": (channels, {"kernel": (3, D, D)}),
    "chosen": (chosen, {"w": (D, "experts"), "table": ("experts", D)}),
    "inner step": (inner_step, {"w": (D, F)}),
    "scattered": (scattered, {"scale": (D,)}),
    "roll": (lambda p, x: x * row(p["scale"]) + jnp.roll(x, 1, -1), {"scale": (D,)}),
    "cumulative": (lambda p, x: jnp.cumsum(x, 1) / x.shape[1] * row(p["scale"]), {"scale": (D,)}),
    "sorted": (lambda p, x: jnp.sort(x, -1) * row(p["scale"]), {"scale": (D,)}),
    "shuffled": (
        lambda p, x: x[..., jnp.arange(x.shape[2])[::-1]] * row(p["scale"]),
        {"scale": (D,)},
    ),
    "spectrum": (
        lambda p, x: jnp.real(jnp.fft.ifft(jnp.fft.fft(x, axis=1) * 0.5, axis=1)) * row(p["scale"]),
        {"scale": (D,)},
    ),
}


def program(names: Sequence[str], sizes: Sizes = Sizes()):
    """A loss of tokens `fn(model, batch, key)` with these layers; its model and batch, as shapes.

    The model is a dict by layer; the batch has the keys "tokens" and "next".
    """
    known = {
        **vars(sizes),
        "head": sizes.width // sizes.heads,
        "halves": 2 * sizes.hidden,
        "gates": 4 * sizes.width,
        "sum": sizes.width + sizes.hidden,
    }
    size = lambda dim: known[dim] if isinstance(dim, str) else dim
    model: dict[str, Any] = {"embed": array(sizes.vocabulary, sizes.width)}
    for i, name in enumerate(names):
        shapes = LAYERS[name][1].items()
        model[f"{i} {name}"] = {key: array(*map(size, shape)) for key, shape in shapes}

    def loss_fn(model, batch, key):
        x = model["embed"][batch["tokens"]]
        for i, name in enumerate(names):
            x = LAYERS[name][0](model[f"{i} {name}"], x)
        logits = jax.nn.log_softmax(x @ model["embed"].T)
        return -jnp.mean(jnp.take_along_axis(logits, batch["next"][..., None], -1))

    tokens = jax.ShapeDtypeStruct((sizes.batch, sizes.time), jnp.int32)
    return loss_fn, model, {"tokens": tokens, "next": tokens}
