"""What an attention multiplies by, where all its weights are stacked over layers."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ._attention import wide
from ._basic import normal


class LowRank(eqx.Module):
    """A weight with a low-rank sum beside it, `weight + scale * a b`
    (LoRA, Hu et al., 2021, <https://arxiv.org/abs/2106.09685>).

    It stands in a model where the weight stood. `weight @ x` works as in `eqx.nn.Linear`; the
    models here multiply by `product`. Leading dimensions that all three share are stacks, of
    layers or experts.

    - `weight`: `"*stack *inputs *outputs"`, or, with `outputs_first`, `"*stack output input"`.
    - `a`: `"*stack *inputs rank"`.
    - `b`: `"*stack rank *outputs"`.
    """

    weight: Float[Array, "..."]
    a: Float[Array, "..."]
    b: Float[Array, "..."]
    scale: float = eqx.field(static=True)
    outputs_first: bool = eqx.field(static=True, default=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def ndim(self) -> int:
        return self.weight.ndim

    @property
    def dtype(self):
        return self.weight.dtype

    def __matmul__(self, x: Array) -> Array:
        a, b = (jnp.swapaxes(m, -1, -2).astype(x.dtype) for m in (self.a, self.b))
        return self.weight @ x + self.scale * (b @ (a @ x))

    def __jax_array__(self) -> Array:
        raise ValueError(
            f"A weight of shape {self.shape} has an adapter (LoRA), but this model does something "
            "else with it than to multiply by it. Adapt other weights, or merge the adapters."
        )

    def merged(self) -> Float[Array, "..."]:
        """The weight with the sum in it."""
        a, b = (x.astype(wide(x.dtype)) for x in (self.a, self.b))
        stacked = a.ndim + b.ndim - self.ndim - 2
        letters = iter("bcdefghijklmnopq")
        stack = "".join(next(letters) for _ in range(stacked))
        inputs = "".join(next(letters) for _ in range(a.ndim - stacked - 1))
        outputs = "".join(next(letters) for _ in range(b.ndim - stacked - 1))
        sides = outputs + inputs if self.outputs_first else inputs + outputs
        change = jnp.einsum(f"{stack}{inputs}r,{stack}r{outputs}->{stack}{sides}", a, b)
        weight = self.weight.astype(change.dtype) + self.scale * change
        return weight.astype(self.dtype)


def product(
    equation: str,
    x: Float[Array, "..."],
    weight: Array | LowRank,
    bias: Float[Array, "..."] | None = None,
) -> Float[Array, "..."]:
    """`jnp.einsum(equation, x, weight) + bias`, for adapted weights too.

    **Arguments:**

    - `equation`: as of `jnp.einsum`, such as `"bsd,dhk->bshk"`.
    - `x`: the activations.
    - `weight`: an array, or one with a low-rank sum beside it: `a` has the letters that the
        equation sums over and the rank, `b` the rank and the letters that are left; letters of
        both the activations and the result (such as an expert's) come first in both.
    - `bias`: of the result's last dimensions.
    """
    if isinstance(weight, LowRank):
        out = _low_rank(equation, x, weight)
    else:
        out = jnp.einsum(equation, x, weight)
    if bias is None:
        return out
    # Said in full, since ranks are not promoted silently.
    return out + bias.reshape((1,) * (out.ndim - bias.ndim) + bias.shape)


def _low_rank(equation: str, x: Array, weight: LowRank) -> Array:
    inputs, result = equation.split("->")
    letters, of_weight = inputs.split(",")
    both = "".join(c for c in of_weight if c in letters and c in result)
    summed = "".join(c for c in of_weight if c in letters and c not in result)
    left = "".join(c for c in of_weight if c not in letters)
    middle = "".join(c for c in letters if c not in summed) + "r"
    # Adapters may be kept in a wider dtype than what is computed in.
    a, b = weight.a.astype(x.dtype), weight.b.astype(x.dtype)
    low = jnp.einsum(f"{letters},{both}{summed}r->{middle}", x, a)
    change = jnp.einsum(f"{middle},{both}r{left}->{result}", low, b)
    return jnp.einsum(equation, x, weight.weight) + weight.scale * change


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
