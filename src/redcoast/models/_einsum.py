"""Products with weights, which may have LoRA adapters; the projections of attention layers."""

import itertools as it
import math
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from ..core._low_rank import AbstractLowRank
from ..core._target import sequence_parts, target
from ._basic import ACTIVATIONS, activate_gated, normal, wide, zeros
from ._inputs import HiddenStates
from ._quantised_weight import QuantisedWeight, unquantised

# What a model may have in place of a weight.
Weight = Array | QuantisedWeight


class LowRank(AbstractLowRank):
    """A weight with a low-rank adapter, `weight + scale * a b`
    (LoRA, Hu et al., 2021, <https://arxiv.org/abs/2106.09685>).

    It replaces the weight in a model. `weight @ x` works as in `eqx.nn.Linear`. Leading dimensions
    that all three arrays share stack the matrices of several layers or experts.

    - `weight`: `"*stack *inputs *outputs"`, or, with `outputs_first`, `"*stack output input"`; an
        array, or a `QuantisedWeight`.
    - `a`: `"*stack *inputs rank"`.
    - `b`: `"*stack rank *outputs"`.
    - `saved_with`: the modules of the published model that were trained with the adapter, which
        `lora.save_adapters` saves entirely.
    """

    weight: Float[Array, "..."] | QuantisedWeight
    a: Float[Array, "..."]
    b: Float[Array, "..."]
    scale: float = eqx.field(static=True)
    outputs_first: bool = eqx.field(static=True, default=False)
    saved_with: tuple[str, ...] = eqx.field(static=True, default=())

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
        a = jnp.swapaxes(self.a, -1, -2).astype(x.dtype)  # (rank, input)
        b = jnp.swapaxes(self.b, -1, -2).astype(x.dtype)  # (output, rank)
        return self.weight @ x + self.scale * (b @ (a @ x))

    def __jax_array__(self) -> Array:
        raise ValueError(
            f"A weight of shape {self.shape} has an adapter (LoRA), but this model uses it for "
            "something other than a matrix product. Adapt other weights, or merge the adapters."
        )

    def merged(self) -> Float[Array, "..."]:
        """Returns the weight with the adapter added to it."""
        a, b = self.a.astype(wide(self.a.dtype)), self.b.astype(wide(self.b.dtype))
        # `a` has the stack and the inputs, and `b` the stack and the outputs, beside the rank.
        stacked = a.ndim + b.ndim - self.ndim - 2
        letters = it.islice("bcdefghijklmnopq", self.ndim)
        stack = "".join(it.islice(letters, stacked))
        inputs = "".join(it.islice(letters, a.ndim - stacked - 1))
        outputs = "".join(letters)
        sides = inputs + outputs
        if self.outputs_first:
            sides = outputs + inputs
        # In full precision: by default, GPUs and TPUs round the factors to fewer bits.
        change = jnp.einsum(
            f"{stack}{inputs}r,{stack}r{outputs}->{stack}{sides}",
            a,
            b,
            precision=jax.lax.Precision.HIGHEST,
        )
        # Added in a wide dtype, and rounded once.
        weight = unquantised(self.weight).astype(change.dtype) + self.scale * change
        return weight.astype(self.dtype)


def merged(weight: Weight | LowRank) -> Float[Array, "..."]:
    """Returns a weight as one array, with its adapter added if it has one."""
    if isinstance(weight, LowRank):
        return weight.merged()
    return unquantised(weight)


def product(
    equation: str,
    x: Float[Array, "..."],
    weight: Weight | LowRank,
    bias: Float[Array, "..."] | None = None,
) -> Float[Array, "..."]:
    """Computes `jnp.einsum(equation, x, weight) + bias`, also for quantised weights and weights
    with LoRA adapters.

    In a `LowRank`, `a` has the contracted dimensions and the rank, and `b` the rank and the
    remaining dimensions. Dimensions that the weight shares with both `x` and the result (such as
    experts) come first in both. The bias is added along the last dimensions of the result.
    """
    if isinstance(weight, LowRank):
        out = _low_rank(equation, x, weight)
    else:
        out = _einsum(equation, x, weight)
    if bias is None:
        return out
    # Explicit, because rank promotion may be set to raise.
    return out + bias.reshape((1,) * (out.ndim - bias.ndim) + bias.shape)


def _einsum(equation: str, x: Array, weight: Weight) -> Array:
    if isinstance(weight, QuantisedWeight):
        return weight.multiply(lambda weight, x: _einsum(equation, x, weight), x)
    letters, of_weight, result = re.split(",|->", equation)
    summed = len({*letters} & {*of_weight})  # how many dimensions both have
    contracted, left = of_weight[:summed], of_weight[summed:]
    # Whether it is a product of matrices if neighbouring dimensions are merged.
    of_matrices = equation == f"{result.removesuffix(left)}{contracted},{of_weight}->{result}"
    if not of_matrices or sequence_parts() > 1 or target().platform != "cpu":
        return jnp.einsum(equation, x, weight)
    # XLA's CPU compiler multiplies by the transpose of a matrix without copying it. With more
    # dimensions of weights, it copies them for the gradient of `x`.
    size = math.prod(weight.shape[:summed])
    rows = x.reshape(*x.shape[:-summed], size)
    # Merged rows are multiplied by Eigen for the gradient of the weights. Otherwise activations are
    # copied and multiplied by YNNPACK, which takes less time if several devices share the cores.
    if jax.local_device_count() == 1:
        rows = rows.reshape(-1, size)
    out = rows @ weight.reshape(size, -1)
    return out.reshape(*x.shape[:-summed], *weight.shape[summed:])


def _low_rank(equation: str, x: Array, weight: LowRank) -> Array:
    letters, of_weight, result = re.split(",|->", equation)
    both, summed, left = "", "", ""  # dimensions of the weight: such as experts, inputs, outputs
    for letter in of_weight:
        if letter not in letters:
            left += letter
        elif letter in result:
            both += letter
        else:
            summed += letter
    middle = letters.translate(dict.fromkeys(map(ord, summed))) + "r"  # x without inputs, with rank
    # Adapters may be stored in a wider dtype than the activations.
    a, b = weight.a.astype(x.dtype), weight.b.astype(x.dtype)
    # First to the small rank: the product of `a` and `b` has the size of the weight.
    low = _einsum(f"{letters},{both}{summed}r->{middle}", x, a)
    change = _einsum(f"{middle},{both}r{left}->{result}", low, b)
    return _einsum(equation, x, weight.weight) + weight.scale * change


class Projections(eqx.Module):
    """The projections, biases and norms of the attention in all layers.

    With `biased=False`, there are no biases, and the norms are RMSNorms. With `key_bias=False`, the
    keys have no bias (it would not change the attention weights).
    """

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
        key_bias: bool = True,
        key: PRNGKeyArray,
    ):
        """Initialises the parameters: normal, truncated at three standard deviations, with `scales`
        for queries, keys, values and outputs."""
        stream, head = (layers, config.width), (config.heads, config.head_dim)
        into, out = (*stream, *head), (layers, *head, config.width)
        wq, wk, wv, wo = jax.random.split(key, 4)
        self.wq = normal(wq, into, fan_in=1, scale=scales[0])
        self.wk = normal(wk, into, fan_in=1, scale=scales[1])
        self.wv = normal(wv, into, fan_in=1, scale=scales[2])
        self.wo = normal(wo, out, fan_in=1, scale=scales[3])
        of_heads = (layers, *head)
        self.bq, self.bv = zeros(of_heads, when=biased), zeros(of_heads, when=biased)
        # A bias of keys adds the same number to all scores of a query, which softmax does not
        # change.
        self.bk = zeros(of_heads, when=biased and key_bias)
        self.norm, self.norm_shift = jnp.ones(stream), zeros(stream, when=biased)
        self.bo = zeros(stream, when=biased)


def queries(layer: PyTree, x: HiddenStates) -> Float[Array, "batch seq heads k"]:
    return product("bsd,dhk->bshk", x, layer.wq, layer.bq)


def keys_values(
    layer: PyTree, x: Float[Array, "batch seq in_width"]
) -> tuple[Float[Array, "batch seq heads k"], Float[Array, "batch seq heads k"]]:
    k = product("bsd,dhk->bshk", x, layer.wk, layer.bk)
    return k, product("bsd,dhk->bshk", x, layer.wv, layer.bv)


def outputs(layer: PyTree, x: Float[Array, "batch seq heads k"]) -> HiddenStates:
    """Projects the outputs of all heads to the residual stream."""
    return product("bshk,hkd->bsd", x, layer.wo, layer.bo)


def feed_forward(layer: PyTree, x: HiddenStates, activation: str) -> HiddenStates:
    """Computes the feed-forward network of one layer."""
    # (batch, seq, hidden)
    x = ACTIVATIONS[activation](product("bsd,dh->bsh", x, layer.up, layer.up_bias))
    return product("bsh,hd->bsd", x, layer.down, layer.down_bias)


def gated_feed_forward(layer: PyTree, x: HiddenStates, activation: str) -> HiddenStates:
    """Computes the gated feed-forward network of one layer (Shazeer, 2020,
    <https://arxiv.org/abs/2002.05202>)."""
    return gated_network(x, layer.gate, layer.up, layer.down, activation)


def gated_network(
    x: HiddenStates, gate: PyTree, up: PyTree, down: PyTree, activation: str
) -> HiddenStates:
    """Computes a gated feed-forward network with these weights."""
    gates = product("bsd,dh->bsh", x, gate)  # (batch, seq, hidden)
    hidden = activate_gated(activation, gates, product("bsd,dh->bsh", x, up))
    return product("bsh,hd->bsd", hidden, down)
