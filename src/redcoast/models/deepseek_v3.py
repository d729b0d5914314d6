"""The DeepSeek-V3 decoder: attention with compressed keys and values, and shared and routed
experts."""

import functools as ft
import math
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from ._attention import as_array, attend, real_tokens, wide
from ._basic import activate_gated, initial_tables, look_up, normal, output_scale, rms_norm
from ._by_layer import StackedLayers
from ._cache import Cache, extend
from ._check_config import check_config
from ._decoder import Decoder, DecoderConfig, TableHead
from ._dropout import split_key
from ._einsum import LowRank, gated_feed_forward, product
from ._moe import dispatch, gated_experts
from ._rotary import Yarn, rotate, rotate_pairs, yarn_angles
from ._scan_layers import scan_layers

_LATENT_EPS = 1e-6  # of the norms of compressed queries, keys and values


@dataclass(frozen=True)
class DeepseekV3Config(DecoderConfig):
    """The configuration of a `DeepseekV3`.

    **Arguments:**

    - `vocab`, `width`, `layers`, `heads`: the vocabulary size, the size of the residual stream, and
      the numbers of decoder layers and of heads.
    - `hidden`, `expert_hidden`: the hidden sizes of the feed-forward network of layers without
      experts, and of each expert.
    - `dense_layers`: the number of layers without experts. They come first.
    - `experts`, `chosen`: the number of routed experts in each layer, and the number of experts
      that each token is routed to.
    - `shared`: the number of experts that every token passes, in each layer.
    - `groups`, `chosen_groups`: the experts are divided into groups of equal size; a token is
      routed to experts in this many of them.
    - `weights_sum_to_one`, `route_scale`: whether the weights of a token's routed experts are
      divided by their sum, and what they are multiplied by then.
    - `q_rank`, `kv_rank`: the sizes of the latent features that queries, and keys and values, are
      computed from. With `q_rank=None`, queries are computed from the residual stream.
    - `plain_size`, `rope_size`, `value_size`: for each head, the number of features of queries and
      keys that are not rotated and that are (an even number), and of values.
    - `rope_base`, `rope_scaling`: the base of the rotary embeddings' wavelengths, and how they are
      scaled for long contexts.
    - `rope_pairs`: whether rotary embeddings rotate neighbouring features, instead of those that
      are half of the features apart.
    - `score_scaling`: with `rope_scaling`, the scores of attention are multiplied by the square of
      `1 + 0.1 * score_scaling * log(factor)`.
    - `norm_eps`: added to the mean square in RMSNorm, except in those of the compressed features,
      which add 1e-6 as published.
    - `tied`: whether the output head shares the weights of the embedding.
    - `attention_dropout`: the dropout rate of the attention weights.
    - `context`: the length in tokens that the weights were trained for. It is not enforced.
    - `remat`, `unroll`, `eos`, `bos`, `pad`, `decoding`: as in
      [`LlamaConfig`][redcoast.models.LlamaConfig].

    **Raises:**

    `ValueError` if a value is out of range or conflicts with another; `TypeError` if a size is not
    an integer.
    """

    vocab: int
    width: int
    layers: int
    heads: int
    hidden: int
    expert_hidden: int
    dense_layers: int = 3
    experts: int = 256
    chosen: int = 8
    shared: int = 1
    groups: int = 8
    chosen_groups: int = 4
    weights_sum_to_one: bool = True
    route_scale: int | float = 2.5
    q_rank: int | None = 1536
    kv_rank: int = 512
    plain_size: int = 128
    rope_size: int = 64
    value_size: int = 128
    rope_base: int | float = 10000.0
    rope_scaling: Yarn | None = None
    rope_pairs: bool = True
    score_scaling: int | float = 0.0
    norm_eps: int | float = 1e-6
    tied: bool = False
    attention_dropout: int | float = 0.0
    context: int = 4096

    def __post_init__(self):
        sizes = "experts chosen shared groups chosen_groups kv_rank plain_size rope_size value_size"
        check_config(self, *sizes.split(), *["q_rank"] * (self.q_rank is not None))
        if self.rope_size % 2:
            raise ValueError(f"`rope_size` must be even, but is {self.rope_size}.")
        if not self.route_scale > 0:
            raise ValueError(f"`route_scale` must be positive, but is {self.route_scale}.")
        if not 0 <= self.dense_layers < self.layers:
            raise ValueError(
                f"`dense_layers` must be at least 0 and less than `layers`, but they are "
                f"{self.dense_layers} and {self.layers}."
            )
        _check_routing(self)


def _check_routing(c: DeepseekV3Config) -> None:
    if c.experts % c.groups or c.experts // c.groups < 2:
        raise ValueError(
            f"`experts` must be a multiple of `groups` with at least two for each, but they are "
            f"{c.experts} and {c.groups}."
        )
    if c.chosen_groups > c.groups:
        raise ValueError(
            f"`chosen_groups` must be at most `groups`, but they are {c.chosen_groups} and "
            f"{c.groups}."
        )
    if c.chosen > (most := c.chosen_groups * (c.experts // c.groups)):
        raise ValueError(
            f"`chosen` must be at most {most}, the experts of `chosen_groups` groups, but is "
            f"{c.chosen}."
        )


class DeepseekV3Layers(StackedLayers):
    """The parameters of layers with experts or of layers without, stacked along their first
    dimension. The feed-forward network of layers without experts has no dimension `experts`."""

    attention_norm: Float[Array, "layers width"]
    q_down: Float[Array, "layers width q_rank"] | None
    q_norm: Float[Array, "layers q_rank"] | None
    wq: Float[Array, "layers q_inputs heads qk_size"]
    kv_down: Float[Array, "layers width kv_rank"]
    k_rope: Float[Array, "layers width rope_size"]
    kv_norm: Float[Array, "layers kv_rank"]
    wk: Float[Array, "layers kv_rank heads plain_size"]
    wv: Float[Array, "layers kv_rank heads value_size"]
    wo: Float[Array, "layers heads value_size width"]
    mlp_norm: Float[Array, "layers width"]
    router: Float[Array, "layers width experts"] | None
    correction: Float[Array, "layers experts"] | None
    gate: Float[Array, "layers *experts width hidden"]
    up: Float[Array, "layers *experts width hidden"]
    down: Float[Array, "layers *experts hidden width"]
    shared_gate: Float[Array, "layers width shared_hidden"] | None
    shared_up: Float[Array, "layers width shared_hidden"] | None
    shared_down: Float[Array, "layers shared_hidden width"] | None

    def __init__(self, config: DeepseekV3Config, layers: int, *, routed: bool, key: PRNGKeyArray):
        c = config
        keys = iter(jax.random.split(key, 14))
        make = lambda fan_in, *shape, scale=1.0: normal(
            next(keys), (layers, *shape), fan_in=fan_in, scale=scale
        )
        out = output_scale(c.layers)
        ones = lambda size: jnp.ones((layers, size))
        self.attention_norm, self.mlp_norm, self.kv_norm = map(ones, (c.width, c.width, c.kv_rank))
        self.q_down = None if c.q_rank is None else make(c.width, c.width, c.q_rank)
        self.q_norm = None if c.q_rank is None else ones(c.q_rank)
        inputs = c.width if c.q_rank is None else c.q_rank
        self.wq = make(inputs, inputs, c.heads, c.plain_size + c.rope_size)
        self.kv_down = make(c.width, c.width, c.kv_rank)
        self.k_rope = make(c.width, c.width, c.rope_size)
        self.wk = make(c.kv_rank, c.kv_rank, c.heads, c.plain_size)
        self.wv = make(c.kv_rank, c.kv_rank, c.heads, c.value_size)
        self.wo = make(c.heads * c.value_size, c.heads, c.value_size, c.width, scale=out)
        self.router = make(c.width, c.width, c.experts) if routed else None
        self.correction = jnp.zeros((layers, c.experts)) if routed else None
        many, hidden = ((c.experts,), c.expert_hidden) if routed else ((), c.hidden)
        self.gate, self.up = (make(c.width, *many, c.width, hidden) for _ in range(2))
        self.down = make(hidden, *many, hidden, c.width, scale=out)
        size = c.shared * c.expert_hidden
        into = lambda: make(c.width, c.width, size) if routed else None
        self.shared_gate, self.shared_up = into(), into()
        self.shared_down = make(size, size, c.width, scale=out) if routed else None


class DeepseekV3(TableHead, Decoder):
    """The DeepSeek-V3 decoder (DeepSeek-AI, 2024, <https://arxiv.org/abs/2412.19437>).

    Its cache holds the latent features of keys and values and the rotated features of keys, which
    all heads share. The correction of the routers (section 2.1.2) is not trained by gradients, and
    the layers that predict further tokens are not implemented.

    ```python
    config = DeepseekV3Config(
        vocab=256, width=128, layers=4, heads=4, hidden=352, expert_hidden=64, dense_layers=1,
        experts=8, chosen=2, groups=4, chosen_groups=2, q_rank=48, kv_rank=32, plain_size=32,
        rope_size=16, value_size=32,
    )
    model = DeepseekV3(config, key=jax.random.key(0))
    logits = model(jnp.zeros((8, 64), jnp.int32))  # (8, 64, 256)
    ```
    """

    embed: Float[Array, "vocab width"]
    dense: DeepseekV3Layers | None
    layers: DeepseekV3Layers
    norm: Float[Array, " width"]
    head: Float[Array, "width vocab"] | None
    config: DeepseekV3Config = eqx.field(static=True)

    def __init__(self, config: DeepseekV3Config, *, key: PRNGKeyArray):
        """Initialises the parameters: normal with variance 1 / fan-in, truncated at three standard
        deviations. The output projections of the layers are divided by sqrt(2 * layers)."""
        c = config
        embed, dense, layers, head = jax.random.split(key, 4)
        self.embed, self.head = initial_tables(c, embed, head)
        make = eqx.Partial(DeepseekV3Layers, c)
        self.dense = make(c.dense_layers, routed=False, key=dense) if c.dense_layers else None
        self.layers = make(c.layers - c.dense_layers, routed=True, key=layers)
        self.norm = jnp.ones(c.width)
        self.config = config

    def init_cache(self, batch: int, length: int) -> Cache:
        """Returns an empty cache for `batch` rows of up to `length` tokens."""
        c = self.config
        zeros = lambda size: jnp.zeros((c.layers, batch, length, 1, size), self.embed.dtype)
        mask = jnp.zeros((batch, length), bool)
        return Cache(zeros(c.kv_rank), zeros(c.rope_size), mask, jnp.zeros((), jnp.int32))

    def _run(self, tokens, mask, positions, see, cache, key):
        c, visible = self.config, see()
        real = as_array(real_tokens(tokens.shape, mask))
        x = look_up(self.embed, tokens)
        angles = yarn_angles(positions, c.rope_size, c.rope_base, c.rope_scaling, wide(x.dtype))

        def layer_fn(first, x, cache, layer, index, key):
            y = rms_norm(x, layer.attention_norm, c.norm_eps)
            y, cache = _attention(layer, y, angles, visible, cache, first + index, key, c)
            x = x + y
            y = rms_norm(x, layer.mlp_norm, c.norm_eps)
            if layer.router is None:
                return x + gated_feed_forward(layer, y, "silu"), cache
            return x + _mix(layer, y, real, c), cache

        first, stacks = 0, [stack for stack in (self.dense, self.layers) if stack is not None]
        for stack, own in zip(stacks, split_key(key, len(stacks)), strict=True):
            options: Any = {"key": own, "remat": c.remat, "unroll": c.unroll}
            x, cache = scan_layers(ft.partial(layer_fn, first), x, stack, cache=cache, **options)
            first = c.dense_layers
        return rms_norm(x, self.norm, c.norm_eps), cache, None


def _score_scale(c):
    factor = c.rope_scaling.factor if c.rope_scaling else 1.0
    grown = 1 + 0.1 * c.score_scaling * math.log(factor) if factor > 1 else 1.0
    return grown**2 / math.sqrt(c.plain_size + c.rope_size)


def _attention(layer, x, angles, visible, cache, index, key, c):
    turn = rotate_pairs if c.rope_pairs else rotate
    y = x
    if layer.q_down is not None:
        y = rms_norm(product("bsd,dl->bsl", x, layer.q_down), layer.q_norm, _LATENT_EPS)
    plain, turned = jnp.split(product("bsl,lhk->bshk", y, layer.wq), [c.plain_size], axis=-1)
    turned = turn(turned, angles)
    latent = rms_norm(product("bsd,dl->bsl", x, layer.kv_down), layer.kv_norm, _LATENT_EPS)
    common = turn(product("bsd,dk->bsk", x, layer.k_rope)[:, :, None], angles)
    cache, latent, common = extend(cache, index, latent[:, :, None], common)
    options: Any = {"visible": visible, "scale": _score_scale(c)}
    options |= {"rate": c.attention_dropout, "key": key}
    if cache is not None and x.shape[1] == 1:
        # For one query, what turns latent features into keys and values is applied to the query and
        # to the output instead, which takes less work than to apply it to all slots.
        wk, wv = (w.merged() if isinstance(w, LowRank) else w for w in (layer.wk, layer.wv))
        q = jnp.concatenate([jnp.einsum("bshk,lhk->bshl", plain, wk), turned], axis=-1)
        out = attend(q, jnp.concatenate([latent, common], axis=-1), latent, **options)
        out = jnp.einsum("bshl,lhk->bshk", out, wv)
    else:
        latent = latent[:, :, 0]
        k, v = (product("btl,lhk->bthk", latent, w) for w in (layer.wk, layer.wv))
        common = jnp.broadcast_to(common, (*k.shape[:3], c.rope_size))
        k = jnp.concatenate([k, common], axis=-1)
        out = attend(jnp.concatenate([plain, turned], axis=-1), k, v, **options)
    return product("bshk,hkd->bsd", out, layer.wo), cache


def _mix(layer, x, real, c):
    """The sum of the shared and of the routed experts."""
    full = wide(x.dtype)
    router = jax.tree.map(lambda w: w.astype(full), layer.router)
    scores = jax.nn.sigmoid(product("bsd,de->bse", x.astype(full), router))
    weights = route(scores, layer.correction.astype(full), c)
    weights = jnp.swapaxes(jnp.where(real[..., None], weights, 0), 1, 2)
    routed = dispatch(ft.partial(gated_experts, layer), x, weights, c.chosen)
    gate = product("bsd,dh->bsh", x, layer.shared_gate)
    up = product("bsd,dh->bsh", x, layer.shared_up)
    return routed + product("bsh,hd->bsd", activate_gated("silu", gate, up), layer.shared_down)


def route(
    scores: Float[Array, "batch seq experts"],
    correction: Float[Array, " experts"],
    config: DeepseekV3Config,
) -> Float[Array, "batch seq experts"]:
    """Returns the weights of the experts for each token; 0 for those that are not chosen.

    The correction is added for the choice alone. Groups are chosen by the sum of their two highest
    scores, and experts within these groups.
    """
    c = config
    choice = jax.lax.stop_gradient(scores + correction[None, None])
    if c.chosen_groups < c.groups:
        grouped = choice.reshape(*choice.shape[:2], c.groups, -1)
        best = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
        choice = jnp.where(_highest(best, c.chosen_groups)[..., None], grouped, -jnp.inf)
        choice = choice.reshape(scores.shape)
    weights = jnp.where(_highest(choice, c.chosen), scores, 0)
    if c.weights_sum_to_one:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return weights * c.route_scale


def _highest(x: Float[Array, "batch seq many"], count: int) -> Bool[Array, "batch seq many"]:
    which = jax.lax.top_k(x, count)[1]
    return jnp.any(jax.nn.one_hot(which, x.shape[-1], dtype=bool), axis=-2)
