"""What an attention multiplies by, where all its weights are stacked over layers."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ._init import normal
from ._product import product


class Projections(eqx.Module):
    """The projections, biases and norm of an attention in all layers; without `biased` the norm
    is an RMSNorm, and nothing has a bias."""

    norm: Float[Array, "layers width"]
    norm_shift: Float[Array, "layers width"] | None
    wq: Float[Array, "layers width heads head_dim"]
    wk: Float[Array, "layers width heads head_dim"]
    wv: Float[Array, "layers width heads head_dim"]
    wo: Float[Array, "layers heads head_dim width"]
    bq: Float[Array, "layers heads head_dim"] | None
    bk: Float[Array, "layers heads head_dim"] | None
    bv: Float[Array, "layers heads head_dim"] | None
    bo: Float[Array, "layers width"] | None

    def __init__(
        self,
        config: Any,
        layers: int,
        *,
        scales: tuple[float, float, float, float],
        biased: bool = True,
        key: PRNGKeyArray,
    ):
        """Initial parameters by `key`: normal with deviations of `scales` for queries, keys,
        values and outputs, truncated at three of them."""
        stream, head = (layers, config.width), (config.heads, config.head_dim)
        shapes = [(*stream, *head)] * 3 + [(layers, *head, config.width)]
        keys = jax.random.split(key, 4)
        weights = zip(keys, shapes, scales, strict=True)
        self.wq, self.wk, self.wv, self.wo = (
            normal(k, s, fan_in=1, scale=x) for k, s, x in weights
        )
        zeros = (lambda shape: jnp.zeros(shape)) if biased else (lambda shape: None)
        self.bq, self.bk, self.bv = (zeros((layers, *head)) for _ in range(3))
        self.norm, self.norm_shift, self.bo = jnp.ones(stream), zeros(stream), zeros(stream)


def queries(layer: Any, x: Float[Array, "batch seq width"]) -> Float[Array, "batch seq heads k"]:
    """What asks, in the layer that `layer` is a slice of."""
    return product("bsd,dhk->bshk", x, layer.wq, layer.bq)


def keys_values(
    layer: Any, x: Float[Array, "batch seq in_width"]
) -> tuple[Float[Array, "batch seq heads k"], Float[Array, "batch seq heads k"]]:
    """What is asked, and what is answered."""
    k = product("bsd,dhk->bshk", x, layer.wk, layer.bk)
    return k, product("bsd,dhk->bshk", x, layer.wv, layer.bv)


def outputs(layer: Any, x: Float[Array, "batch seq heads k"]) -> Float[Array, "batch seq width"]:
    """The answers of all heads, together."""
    return product("bshk,hkd->bsd", x, layer.wo, layer.bo)
