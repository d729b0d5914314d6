"""Norms, activation functions, dropout and the initialisation of weights."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer, PRNGKeyArray

from ..core._errors import short_repr
from ..core._target import target
from ._inputs import AnyArray, Key


def wide(dtype: np.dtype) -> np.dtype:
    """Promotes to at least float32, for computations that need more precision than bfloat16."""
    return np.promote_types(dtype, np.float32)


def recomputed(fn: Callable[..., Array]) -> Callable[..., Array]:
    """Returns the function, recomputed in the backward pass, for which only its arguments are
    saved."""

    def call(*args: Array | None) -> Array:
        # Without a barrier the compilers for GPUs and TPUs fuse more. They do not undo the
        # rematerialisation by CSE, since the two passes over the layers are separate loops.
        return jax.checkpoint(fn, prevent_cse=target().platform == "cpu")(*args)

    return call


def rms_norm(x: Float[Array, "..."], scale: Float[Array, "..."], eps: float) -> Float[Array, "..."]:
    """RMSNorm (Zhang and Sennrich, 2019) over the last dimensions, as many as `scale` has."""
    axes = tuple(range(-scale.ndim, 0))  # such as all heads, where a norm is over them

    @recomputed
    def norm(x, scale):
        y = x.astype(wide(x.dtype))
        # In a wide dtype until here, as the published models compute it: the scale is applied after
        # rounding.
        y = y * jax.lax.rsqrt(jnp.mean(y**2, axis=axes, keepdims=True) + eps)
        return y.astype(x.dtype) * _along(scale, x)

    return norm(x, scale)


def wide_rms_norm(
    x: Float[Array, "..."], scale: Float[Array, " size"] | None, eps: float, *, offset: int = 0
) -> Float[Array, "..."]:
    """RMSNorm over the last dimension with the scale `offset + scale`, or without one. Products
    with the scale are not rounded to a narrow dtype before."""
    y = x.astype(wide(x.dtype))
    y = y * jax.lax.rsqrt(jnp.mean(y**2, axis=-1, keepdims=True) + eps)
    if scale is not None:
        y = y * (offset + _along(scale.astype(y.dtype), x))
    return y.astype(x.dtype)


def layer_norm(
    x: Float[Array, "*rows width"],
    scale: Float[Array, " width"],
    shift: Float[Array, " width"] | None,
    eps: float,
) -> Float[Array, "*rows width"]:
    """Layer norm (Ba et al., 2016) over the last dimension, with or without a shift."""

    @recomputed
    def norm(x, scale, shift):
        y = x.astype(wide(x.dtype))
        # The variance is of centred numbers: the mean of squares less the square of the mean would
        # cancel.
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y**2, axis=-1, keepdims=True) + eps)
        y = y.astype(x.dtype) * _along(scale, x)
        if shift is None:
            return y
        return y + _along(shift, x)

    return norm(x, scale, shift)


def _along(scale: Array, x: Array) -> Array:
    # Explicit, because rank promotion may be set to raise.
    return scale.reshape((1,) * (x.ndim - scale.ndim) + scale.shape)


_gelu = recomputed(partial(jax.nn.gelu, approximate=False))
_gelu_tanh = recomputed(partial(jax.nn.gelu, approximate=True))

# Some names only differ in how PyTorch computes the function.
ACTIVATIONS: dict[str, Callable[[Float[Array, "..."]], Float[Array, "..."]]] = {
    "gelu": _gelu,
    "gelu_python": _gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_accurate": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu_python_tanh": _gelu_tanh,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "tanh": jnp.tanh,
}


def activate_gated(
    activation: str, gate: Float[Array, "*rows hidden"], up: Float[Array, "*rows hidden"]
) -> Float[Array, "*rows hidden"]:
    """Returns `activation(gate) * up`. Only `gate` and `up` are saved for the backward pass."""
    return recomputed(lambda gate, up: ACTIVATIONS[activation](gate) * up)(gate, up)


def softcap(x: Float[Array, "..."], cap: int | float | None) -> Float[Array, "..."]:
    """Returns `cap * tanh(x / cap)`, or `x` without a cap."""
    # Near 0 it is the identity, so that a cap changes only large scores.
    if cap is None:
        return x
    return cap * jnp.tanh(x / cap)


def check_activation(name: str) -> None:
    """Raises if the activation function is unknown."""
    if name not in ACTIVATIONS:
        known = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(
            f"Unknown activation function {short_repr(name)}. Supported functions: {known}."
        )


def normal(
    key: PRNGKeyArray, shape: tuple[int, ...], *, fan_in: int, scale: float = 1.0
) -> Float[Array, "..."]:
    """Samples a normal distribution with variance `scale**2 / fan_in`, truncated at three
    standard deviations."""
    return jax.random.truncated_normal(key, -3, 3, shape) * (scale / math.sqrt(fan_in))


def small_normal(
    key: PRNGKeyArray, shape: tuple[int, ...], scale: float = 1.0
) -> Float[Array, "..."]:
    """Samples a normal distribution with standard deviation `0.02 * scale`, truncated at three
    standard deviations, as GPT-2, BART, BERT and ViT are initialised."""
    return normal(key, shape, fan_in=1, scale=0.02 * scale)


def zeros(shape: tuple[int, ...], *, when: bool) -> Float[Array, "..."] | None:
    """Returns initial biases, or None where a model has none."""
    if when:
        return jnp.zeros(shape)
    return None


def ones(shape: tuple[int, ...], *, when: bool) -> Float[Array, "..."] | None:
    """Returns initial scales of a norm, or None where a model has none."""
    if when:
        return jnp.ones(shape)
    return None


def output_scale(layers: int) -> float:
    """Returns the factor of the initial output projections of `layers` decoder layers.

    Each layer adds two outputs to the residual stream. With this factor their total variance does
    not depend on the number of layers.
    """
    return 1 / math.sqrt(2 * layers)


def initial_tables(
    config: Any, embed: PRNGKeyArray, head: PRNGKeyArray
) -> tuple[Float[Array, "vocab width"], Float[Array, "width vocab"] | None]:
    """Returns the initial embedding of a decoder, and its output head unless it is tied."""
    table = normal(embed, (config.vocab, config.width), fan_in=config.width)
    if config.tied:
        return table, None
    return table, normal(head, (config.width, config.vocab), fan_in=config.width)


def initial_mlp(
    config: Any, gate: PRNGKeyArray, up: PRNGKeyArray, down: PRNGKeyArray, *experts: int
) -> tuple[Float[Array, "..."], ...]:
    """Returns the initial gate, up and down projections of all layers, or of all their experts."""
    c, stack = config, (config.layers, *experts)
    # Such as (layers, experts, width, hidden).
    into, out = (*stack, c.width, c.hidden), (*stack, c.hidden, c.width)
    return (
        normal(gate, into, fan_in=c.width),
        normal(up, into, fan_in=c.width),
        normal(down, out, fan_in=c.hidden, scale=output_scale(c.layers)),
    )


def initial_stacks(layers: int, key: PRNGKeyArray, most: int) -> Callable[..., Float[Array, "..."]]:
    """Returns `make(fan_in, *shape, scale=1.0)`, which returns initial weights, stacked over the
    layers, and can be called `most` times."""
    # All keys at once, so that the first weights do not depend on how many follow.
    keys = iter(jax.random.split(key, most))

    def make(fan_in: int, *shape: int, scale: float = 1.0) -> Float[Array, "..."]:
        return normal(next(keys), (layers, *shape), fan_in=fan_in, scale=scale)

    return make


def look_up(table: Any, ids: Integer[AnyArray, "#batch seq"]) -> Float[Array, "..."]:
    """Returns rows of an array, and NaN for ids outside it: indexing would clamp large ones, and
    count negative ones from the end."""
    return jnp.asarray(table).at[ids].get(mode="fill", wrap_negative_indices=False)


def dropout(x: Float[Array, "..."], rate: float, key: Key) -> Float[Array, "..."]:
    """Dropout (Srivastava et al., 2014): zeroes elements with probability `rate` and divides the
    others by `1 - rate`. Returns `x` unchanged if `key` is None."""
    if key is None or rate == 0:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), jnp.zeros((), x.dtype))


def split_key(key: Key, count: int) -> list[Key]:
    """Splits a key into a list of `count` keys; None gives a list of None."""
    if key is None:
        return [None] * count
    return list(jax.random.split(key, count))
