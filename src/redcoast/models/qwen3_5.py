"""The Qwen3.5 decoder: layers of Gated DeltaNet, a linear attention, between layers of attention
whose outputs are gated; with a feed-forward network or a mixture of experts."""

import functools as ft
import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from ._attention import as_array, attend, real_tokens
from ._base_config import GroupedConfig, RotarySizes, check_config, check_rotary_dim
from ._basic import (
    initial_stacks,
    initial_tables,
    look_up,
    output_scale,
    rms_norm,
    wide,
    wide_rms_norm,
)
from ._by_layer import StackedLayers
from ._cache import Cache, empty_cache, extend
from ._check_config import check_chosen, check_entries, check_multiple
from ._decoder import RoutedDecoder, TableHead
from ._einsum import gated_feed_forward, gated_network, product
from ._gated_delta import gated_delta_rule, unit_length
from ._moe import add_use, gated_experts, mix_experts, no_use
from ._recurrent import convolve, states_of_layer, with_layer
from ._rotary import RopeScaling, Yarn, rotate, scaled_angles
from ._scan_kinds import scan_kinds

Make = Callable[..., Float[Array, "..."]]
LINEAR, ATTENTION = "linear", "attention"


@dataclass(frozen=True)
class Qwen3_5Config(GroupedConfig, RotarySizes):
    """The configuration of a `Qwen3_5`.

    **Arguments:**

    - `vocab`, `width`, `layers`, `rope_base`, `rope_scaling`, `norm_eps`, `tied`,
      `attention_dropout`, `context`, `remat`, `unroll`, `eos`, `bos`, `pad`, `decoding`: as in
      [`LlamaConfig`][redcoast.models.LlamaConfig].
    - `heads`, `kv_heads`: in layers of attention, the number of query heads, and the number of key
      and value heads, which must divide it.
    - `hidden`: the hidden size of the feed-forward network, or of each expert.
    - `head_size`: the size of each head in layers of attention; `width / heads` by default.
    - `rotary_dim`: the number of features of each of these heads that rotary embeddings rotate,
      which is even; all by default.
    - `linear`: for each layer, whether it has Gated DeltaNet in place of attention; by default all
      have but each fourth.
    - `key_heads`, `value_heads`: in layers of Gated DeltaNet, the number of heads of queries and
      keys, and the number of heads of values, which is a multiple of it.
    - `key_size`, `value_size`: the sizes of these heads.
    - `taps`: the number of tokens that their convolutions see, including the token itself.
    - `chunk`: the number of tokens whose pairs are computed at once, a power of two.
    - `experts`, `chosen`, `router_loss_weight`: as in
      [`MixtralConfig`][redcoast.models.MixtralConfig]; no experts by default.
    - `shared_hidden`: the hidden size of the expert that every token passes.
    """

    _: KW_ONLY
    head_size: int | None = None
    rotary_dim: int | None = None
    rope_base: int | float = 10000000.0
    rope_scaling: RopeScaling | Yarn | None = None
    linear: tuple[bool, ...] = ()
    key_heads: int = 16
    value_heads: int = 32
    key_size: int = 128
    value_size: int = 128
    taps: int = 4
    chunk: int = 64
    experts: int | None = None
    chosen: int = 8
    shared_hidden: int = 512
    router_loss_weight: int | float = 0.001
    context: int = 262144

    def __post_init__(self):
        sizes = "key_heads value_heads key_size value_size taps chunk chosen shared_hidden"
        check_config(self, *sizes.split())
        check_rotary_dim(self)
        check_chosen(self)
        if not self.linear:
            kinds = tuple((layer + 1) % 4 != 0 for layer in range(self.layers))
            object.__setattr__(self, "linear", kinds)
        check_entries(self, "linear")
        check_multiple(self, "value_heads", "key_heads")
        if self.chunk & (self.chunk - 1):
            raise ValueError(f"`chunk` must be a power of two, but is {self.chunk}.")

    @property
    def keys(self) -> int:
        """The number of features of all keys of a layer of Gated DeltaNet."""
        return self.key_heads * self.key_size

    @property
    def values(self) -> int:
        """The number of features of all values of a layer of Gated DeltaNet."""
        return self.value_heads * self.value_size


class DeltaStates(eqx.Module):
    """What a row has left of its tokens in layers of Gated DeltaNet: the states, and the last
    inputs of the convolutions. Its size does not depend on the number of tokens."""

    state: Float[Array, "layers batch value_heads key_size value_size"]
    before_q: Float[Array, "layers batch past keys"]
    before_k: Float[Array, "layers batch past keys"]
    before_v: Float[Array, "layers batch past values"]


class Qwen3_5Cache(eqx.Module):
    """The keys and values of the layers of attention, and the states of all others."""

    attention: Cache
    states: DeltaStates

    def take(self, rows: Int[Array, " rows"]) -> "Qwen3_5Cache":
        """Gathers rows of the batch; a row may be repeated."""
        states = jax.tree.map(lambda x: jnp.take(x, rows, axis=1), self.states)
        return Qwen3_5Cache(self.attention.take(rows), states)


class Qwen3_5Layers(StackedLayers):
    """The parameters that both kinds of layers have, stacked along their first dimension. A
    feed-forward network without experts has no such dimension."""

    mixer_norm: Float[Array, "layers width"]
    mlp_norm: Float[Array, "layers width"]
    router: Float[Array, "layers width experts"] | None
    gate: Float[Array, "layers *experts width hidden"]
    up: Float[Array, "layers *experts width hidden"]
    down: Float[Array, "layers *experts hidden width"]
    shared_router: Float[Array, "layers width"] | None
    shared_gate: Float[Array, "layers width shared_hidden"] | None
    shared_up: Float[Array, "layers width shared_hidden"] | None
    shared_down: Float[Array, "layers shared_hidden width"] | None

    def __init__(self, config: Qwen3_5Config, layers: int, make: Make):
        """`make(fan_in, *shape, scale=1.0)` returns initial weights, stacked over the layers."""
        c, out = config, output_scale(config.layers)
        stack = ()
        if c.experts is not None:
            stack = (c.experts,)
        self.mixer_norm, self.mlp_norm = (jnp.zeros((layers, c.width)) for _ in range(2))
        self.gate, self.up = (make(c.width, *stack, c.width, c.hidden) for _ in range(2))
        self.down = make(c.hidden, *stack, c.hidden, c.width, scale=out)
        self.router = self.shared_router = None
        self.shared_gate = self.shared_up = self.shared_down = None
        if c.experts is not None:
            self.router = make(c.width, c.width, c.experts)
            self.shared_router = make(c.width, c.width)
            self.shared_gate = make(c.width, c.width, c.shared_hidden)
            self.shared_up = make(c.width, c.width, c.shared_hidden)
            self.shared_down = make(c.shared_hidden, c.shared_hidden, c.width, scale=out)


class GatedAttentionLayers(Qwen3_5Layers):
    """The parameters of layers of attention. `wz` is the gate of the outputs."""

    wq: Float[Array, "layers width heads head_dim"]
    wz: Float[Array, "layers width heads head_dim"]
    wk: Float[Array, "layers width kv_heads head_dim"]
    wv: Float[Array, "layers width kv_heads head_dim"]
    wo: Float[Array, "layers heads head_dim width"]
    q_norm: Float[Array, "layers head_dim"]
    k_norm: Float[Array, "layers head_dim"]

    def __init__(self, config: Qwen3_5Config, layers: int, *, key: PRNGKeyArray):
        c, make = config, initial_stacks(layers, key, 14)
        of_queries, of_keys = (c.heads, c.head_dim), (c.kv_heads, c.head_dim)
        self.wq, self.wz = make(c.width, c.width, *of_queries), make(c.width, c.width, *of_queries)
        self.wk, self.wv = make(c.width, c.width, *of_keys), make(c.width, c.width, *of_keys)
        size, out = c.heads * c.head_dim, output_scale(c.layers)
        self.wo = make(size, c.heads, c.head_dim, c.width, scale=out)
        self.q_norm, self.k_norm = (jnp.zeros((layers, c.head_dim)) for _ in range(2))
        super().__init__(c, layers, make)


class DeltaNetLayers(Qwen3_5Layers):
    """The parameters of layers of Gated DeltaNet. The features of all heads are one dimension.

    `wz` is the gate of the outputs, `strength` the projection to how far a state moves, and `steps`
    that to the sizes of time steps, in which it decays.
    """

    wq: Float[Array, "layers width keys"]
    wk: Float[Array, "layers width keys"]
    wv: Float[Array, "layers width values"]
    wz: Float[Array, "layers width values"]
    wo: Float[Array, "layers values width"]
    strength: Float[Array, "layers width value_heads"]
    steps: Float[Array, "layers width value_heads"]
    steps_bias: Float[Array, "layers value_heads"]
    log_decay: Float[Array, "layers value_heads"]
    conv_q: Float[Array, "layers taps keys"]
    conv_k: Float[Array, "layers taps keys"]
    conv_v: Float[Array, "layers taps values"]
    out_norm: Float[Array, "layers value_size"]

    def __init__(self, config: Qwen3_5Config, layers: int, *, key: PRNGKeyArray):
        c = config
        rates, key = jax.random.split(key)
        make = initial_stacks(layers, key, 18)
        self.wq, self.wk = make(c.width, c.width, c.keys), make(c.width, c.width, c.keys)
        self.wv, self.wz = make(c.width, c.width, c.values), make(c.width, c.width, c.values)
        self.wo = make(c.values, c.values, c.width, scale=output_scale(c.layers))
        self.strength = make(c.width, c.width, c.value_heads)
        self.steps = make(c.width, c.width, c.value_heads)
        of_heads = (layers, c.value_heads)
        self.steps_bias = jnp.ones(of_heads)
        self.log_decay = jnp.log(jax.random.uniform(rates, of_heads, minval=0.01, maxval=16.0))
        self.conv_q, self.conv_k = make(c.taps, c.taps, c.keys), make(c.taps, c.taps, c.keys)
        self.conv_v = make(c.taps, c.taps, c.values)
        self.out_norm = jnp.ones((layers, c.value_size))
        super().__init__(c, layers, make)


class Qwen3_5(TableHead, RoutedDecoder):
    """The decoder of Qwen3.5 (Qwen team, 2026), and of its mixtures of experts: Gated DeltaNet
    (Yang et al., 2024, <https://arxiv.org/abs/2412.06464>) in most layers.

    It does not take several sequences packed into one row. The layers that predict further tokens
    are not implemented.

    ```python
    config = Qwen3_5Config(
        vocab=256, width=128, layers=4, heads=4, kv_heads=2, hidden=352, key_heads=2,
        value_heads=4, key_size=32, value_size=32,
    )
    model = Qwen3_5(config, key=jax.random.key(0))
    logits = model(jnp.zeros((8, 64), jnp.int32))  # (8, 64, 256)
    ```
    """

    embed: Float[Array, "vocab width"]
    linear: DeltaNetLayers | None
    attention: GatedAttentionLayers | None
    norm: Float[Array, " width"]
    head: Float[Array, "width vocab"] | None
    config: Qwen3_5Config = eqx.field(static=True)

    def __init__(self, config: Qwen3_5Config, *, key: PRNGKeyArray):
        """Initialises the parameters: normal with variance 1 / fan-in, truncated at three standard
        deviations, the output projections of the layers divided by sqrt(2 * layers); decays with
        uniform rates of 0.01 to 16."""
        embed, linear, attention, head = jax.random.split(key, 4)
        self.embed, self.head = initial_tables(config, embed, head)
        of_linear = sum(config.linear)
        of_attention = config.layers - of_linear
        # Kinds of which there are no layers have no arrays.
        self.linear = self.attention = None
        if of_linear:
            self.linear = DeltaNetLayers(config, of_linear, key=linear)
        if of_attention:
            self.attention = GatedAttentionLayers(config, of_attention, key=attention)
        self.norm = jnp.zeros(config.width)
        self.config = config

    def init_cache(self, batch: int, length: int) -> PyTree:
        c, dtype = self.config, self.embed.dtype
        linear = sum(c.linear)
        attention = empty_cache(c.layers - linear, batch, length, c.kv_heads, c.head_dim, dtype)
        past = (linear, batch, c.taps - 1)
        states = DeltaStates(
            jnp.zeros((linear, batch, c.value_heads, c.key_size, c.value_size), wide(dtype)),
            jnp.zeros((*past, c.keys), dtype),
            jnp.zeros((*past, c.keys), dtype),
            jnp.zeros((*past, c.values), dtype),
        )
        return Qwen3_5Cache(attention, states)

    def _run_from_start(self, tokens, mask, segments, positions, key):
        if segments is not None:
            raise ValueError(
                "A Qwen3.5 does not take `segments`, because its states go from each token to all "
                "later ones of its row. Put one text into each row, and pad it with `mask`."
            )
        return super()._run_from_start(tokens, mask, segments, positions, key)

    def _run(self, tokens, mask, positions, see, cache, key):
        c, visible = self.config, see()
        real = as_array(real_tokens(tokens.shape, mask))
        x = look_up(self.embed, tokens)  # (batch, seq, width)
        angles = scaled_angles(positions, c.rotated, c.rope_base, c.rope_scaling, wide(x.dtype))

        def layer_fn(kind, x, carry, layer, inputs, index, key):
            cache, use = carry
            y = _norm(x, layer.mixer_norm, c)
            if kind == LINEAR:
                y, cache = _delta_net(layer, y, real, cache, index, c)
            else:
                y, cache = _attention(layer, y, angles, visible, cache, index, key, c)
            x = x + y
            y, use = _feed_forward(layer, _norm(x, layer.mlp_norm, c), real, use, c)
            return x + y, (cache, use)

        stacks = {LINEAR: self.linear, ATTENTION: self.attention}
        names = ATTENTION, LINEAR
        kinds = tuple(names[is_linear] for is_linear in c.linear)
        options = {"key": key, **c.loop_options}
        carry = (cache, no_use(c.experts, wide(x.dtype)))
        x, (cache, use) = scan_kinds(layer_fn, x, stacks, kinds, cache=carry, **options)
        return _norm(x, self.norm, c), cache, use


def _norm(x, scale, config):
    return wide_rms_norm(x, scale, config.norm_eps, offset=1)


def _attention(layer, x, angles, visible, cache: PyTree, index, key, c):
    q = product("bsd,dhk->bshk", x, layer.wq)  # (batch, seq, heads, head_dim)
    k = product("bsd,dhk->bshk", x, layer.wk)  # (batch, seq, kv_heads, head_dim)
    v = product("bsd,dhk->bshk", x, layer.wv)
    q, k = rotate(_norm(q, layer.q_norm, c), angles), rotate(_norm(k, layer.k_norm, c), angles)
    if cache is not None:
        of_attention, k, v = extend(cache.attention, index, k, v)
        cache = replace(cache, attention=of_attention)
    out = attend(q, k, v, visible=visible, rate=c.attention_dropout, key=key)
    # Each feature of a head's output has a gate, which is computed from the layer's input.
    out = out * jax.nn.sigmoid(product("bsd,dhk->bshk", x, layer.wz))
    return product("bshk,hkd->bsd", out, layer.wo), cache


def _delta_net(layer, x, real, cache, index, c):
    kind = wide(x.dtype)
    state = past_q = past_k = past_v = None
    if cache is not None:
        before = states_of_layer(cache.states, index)
        state, past_q = before.state[0], before.before_q[0]
        past_k, past_v = before.before_k[0], before.before_v[0]
    # Padding is as the absence of tokens: it gives nothing to the convolutions, and moves and
    # decays no state.
    x = jnp.where(real[..., None], x, 0)
    into = ft.partial(product, "bsd,de->bse", x)
    strengths = jax.nn.sigmoid(into(layer.strength)).astype(kind)
    strengths = jnp.where(real[..., None], strengths, 0)  # (batch, seq, value_heads)
    steps_bias = layer.steps_bias.astype(kind)[None, None]
    steps = jax.nn.softplus(into(layer.steps).astype(kind) + steps_bias)
    # Logarithms of the decays, always negative.
    decays = -jnp.exp(layer.log_decay.astype(kind))[None, None] * steps
    decays = jnp.where(real[..., None], decays, 0)  # (batch, seq, value_heads)
    q, past_q = convolve(into(layer.wq), layer.conv_q, None, past_q)  # (batch, seq, keys)
    k, past_k = convolve(into(layer.wk), layer.conv_k, None, past_k)
    v, past_v = convolve(into(layer.wv), layer.conv_v, None, past_v)  # (batch, seq, values)
    q = unit_length(_heads(q, c.key_heads, kind))  # (batch, seq, key_heads, key_size)
    k = unit_length(_heads(k, c.key_heads, kind))
    q = q / math.sqrt(c.key_size)  # keys and values are not scaled
    v = _heads(v, c.value_heads, kind)  # (batch, seq, value_heads, value_size)
    y, state = gated_delta_rule(q, k, v, decays, strengths, state, chunk=c.chunk)
    y = rms_norm(y.astype(x.dtype), layer.out_norm, c.norm_eps)  # of each head by itself
    gate = jax.nn.silu(_heads(into(layer.wz), c.value_heads, kind))
    y = (y.astype(kind) * gate).astype(x.dtype)
    y = y.reshape(*x.shape[:2], c.value_heads * c.value_size)  # (batch, seq, values)
    if cache is not None:
        after = DeltaStates(state[None], past_q[None], past_k[None], past_v[None])
        cache = replace(cache, states=with_layer(cache.states, after, index))
    return product("bse,ed->bsd", y, layer.wo), cache


def _heads(x, count, dtype):
    """Divides the features of all heads: `"batch seq heads size"`."""
    return x.reshape(*x.shape[:2], count, x.shape[2] // count).astype(dtype)


def _feed_forward(layer, x, real, use, c):
    """The outputs of the network or of the experts, and the use of experts so far."""
    if layer.router is None:
        return gated_feed_forward(layer, x, "silu"), use
    scores = product("bsd,de->bse", x, layer.router)  # (batch, seq, experts)
    experts = ft.partial(gated_experts, layer)
    routed, more = mix_experts(experts, x, scores, real, chosen=c.chosen)
    network = layer.shared_gate, layer.shared_up, layer.shared_down
    shared = gated_network(x, *network, "silu")  # (batch, seq, width)
    share = jax.nn.sigmoid(jnp.einsum("bsd,d->bs", x, layer.shared_router))  # (batch, seq)
    return routed + share[..., None] * shared, add_use(use, more)
