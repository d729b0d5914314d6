"""The parameters of attention in all layers, and their initial values."""

from collections.abc import Callable, Iterable
from typing import Any

from jaxtyping import Array, Float, PRNGKeyArray

from ._base_config import HeadSizes, LayerSizes
from ._basic import normal, ones, output_scale, small_normal, zeros
from ._by_layer import StackedLayers

Weights = tuple[Float[Array, "..."], ...]


class AttentionLayers(StackedLayers):
    """The norm before attention, and the projections of attention with their biases. A family adds
    the parameters of its feed-forward networks."""

    attention_norm: Float[Array, "layers width"] | None
    attention_norm_shift: Float[Array, "layers width"] | None
    wq: Float[Array, "layers width heads head_dim"]
    wk: Float[Array, "layers width kv_heads head_dim"]
    wv: Float[Array, "layers width kv_heads head_dim"]
    wo: Float[Array, "layers heads head_dim width"]
    bq: Float[Array, "layers heads head_dim"] | None
    bk: Float[Array, "layers kv_heads head_dim"] | None
    bv: Float[Array, "layers kv_heads head_dim"] | None
    bo: Float[Array, "layers width"] | None

    def __init__(
        self,
        config: LayerSizes,
        weights: Weights,
        *,
        biases: str,
        norm: bool = True,
        shift: bool = False,
    ):
        """`weights` are the initial projections to queries, keys and values, and of outputs.
        `biases` has the letters of those that have biases, such as `"qkvo"`. `norm` and `shift` are
        whether the norm has a scale and a shift."""
        stream = (config.layers, config.width)
        self.attention_norm = ones(stream, when=norm)
        self.attention_norm_shift = zeros(stream, when=shift)
        self.wq, self.wk, self.wv, self.wo = weights
        self.bq = zeros((config.layers, *self.wq.shape[2:]), when="q" in biases)
        self.bk = zeros((config.layers, *self.wk.shape[2:]), when="k" in biases)
        self.bv = zeros((config.layers, *self.wv.shape[2:]), when="v" in biases)
        self.bo = zeros(stream, when="o" in biases)


def initial_attention(config: Any, keys: Iterable[PRNGKeyArray]) -> Weights:
    """Returns the initial projections of all layers to queries, keys and values, and of outputs,
    with variance 1 / fan-in."""
    c = config
    q, k, v, o = keys
    of_keys = (c.layers, c.width, c.kv_heads, c.head_dim)
    of_outputs = (c.layers, c.heads, c.head_dim, c.width)
    return (
        normal(q, (c.layers, c.width, c.heads, c.head_dim), fan_in=c.width),
        normal(k, of_keys, fan_in=c.width),
        normal(v, of_keys, fan_in=c.width),
        normal(o, of_outputs, fan_in=c.heads * c.head_dim, scale=output_scale(c.layers)),
    )


def sample_attention(
    config: HeadSizes,
    keys: Iterable[PRNGKeyArray],
    sample: Callable[..., Array] = small_normal,
    out_scale: float = 1.0,
) -> Weights:
    """Returns initial projections with as many heads of keys and values as of queries.

    `sample(key, shape, scale)` returns the weights; the scale of those of outputs is `out_scale`.
    """
    c = config
    q, k, v, o = keys
    into = (c.layers, c.width, c.heads, c.head_dim)
    out = (c.layers, c.heads, c.head_dim, c.width)
    return sample(q, into), sample(k, into), sample(v, into), sample(o, out, out_scale)
