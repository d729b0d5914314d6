"""The Gemma 4 decoder: layers with a sliding window between layers with larger heads and without.

Options give it embeddings for each layer and last layers without keys and values of their own (the
small models), or keys that serve as values (the large ones) and experts beside the feed-forward
network (the mixture of experts).
"""

import math
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from ._attention import as_array, attend, real_tokens
from ._base_config import GroupedConfig, check_config
from ._basic import (
    activate_gated,
    initial_stacks,
    initial_tables,
    look_up,
    normal,
    ones,
    output_scale,
    softcap,
    wide,
    wide_rms_norm,
)
from ._by_layer import StackedLayers
from ._cache import Cache, empty_cache, extend
from ._check_config import check_chosen, check_even, check_local, check_multiple
from ._decoder import RoutedDecoder, tied_or_own_head
from ._einsum import gated_feed_forward, product
from ._inputs import HiddenStates, Tokens
from ._moe import add_use, mix_experts, no_use
from ._rotary import rotary_angles, rotary_frequencies, rotate
from ._scan_kinds import scan_kinds

_GELU = "gelu_new"


@dataclass(frozen=True)
class Gemma4Config(GroupedConfig):
    """The configuration of a `Gemma4`.

    **Arguments:**

    - `vocab`, `width`, `layers`, `hidden`, `norm_eps`, `tied`, `attention_dropout`, `context`,
      `remat`, `unroll`, `eos`, `bos`, `pad`, `decoding`: as in
      [`LlamaConfig`][redcoast.models.LlamaConfig].
    - `heads`, `kv_heads`, `head_dim`: in layers with a window, the number of query heads; the
      number of key and value heads, which must divide it; and the size of each head, an even
      number.
    - `global_kv_heads`, `global_head_dim`: the number of key and value heads, `kv_heads` by
      default, and the size of each head in layers without a window.
    - `local`: for each layer, whether it has a sliding attention window; by default, all
      except every sixth. The last layer never has one.
    - `window`: the size of that window in tokens, including the token itself.
    - `rope_base`, `rotary_dim`: in layers without a window, the base of the rotary embeddings'
      wavelengths, and the number of features of each head that they rotate, which is even; all by
      default. The wavelengths are as if all features were rotated.
    - `local_rope_base`: the base in layers with a window.
    - `keys_are_values`: whether keys, without their norm and rotation, serve as values in layers
      without a window.
    - `shared_layers`: the number of last layers that have no keys and values of their own. A layer
      with a window uses the keys and values of the last earlier layer with a window, and one
      without a window those of the last one without.
    - `wide_shared`: whether the feed-forward networks of these layers are twice as wide.
    - `layer_size`: the size of the embeddings that each layer has of the tokens; none by default.
    - `layer_vocab`: the vocabulary size of these embeddings; by default, the model's.
    - `experts`, `chosen`, `expert_hidden`: the number of experts beside the feed-forward network of
      each layer, the number of experts that each token is routed to (top-k), and the hidden size
      of each; no experts by default.
    - `logit_cap`: a soft cap (by tanh) of the logits.
    """

    _: KW_ONLY
    head_dim: int = 256
    global_head_dim: int = 512
    global_kv_heads: int | None = None
    local: tuple[bool, ...] = ()
    window: int = 512
    rope_base: int | float = 1000000.0
    rotary_dim: int | None = None
    local_rope_base: int | float = 10000.0
    keys_are_values: bool = False
    shared_layers: int = 0
    wide_shared: bool = False
    layer_size: int | None = None
    layer_vocab: int | None = None
    experts: int | None = None
    chosen: int = 8
    expert_hidden: int = 704
    logit_cap: int | float | None = None
    tied: bool = True
    context: int = 131072

    def __post_init__(self):
        sizes = "head_dim global_head_dim chosen expert_hidden global_kv_heads layer_size"
        check_config(self, *sizes.split(), "layer_vocab", "rotary_dim")
        if not self.local:
            last = self.layers - 1
            local = tuple((i + 1) % 6 != 0 and i != last for i in range(self.layers))
            object.__setattr__(self, "local", local)
        check_local(self)
        if self.local[-1]:
            raise ValueError(
                "`local` gives the last layer a window, but the last layer of a Gemma 4 has none. "
                "Pass False as its last entry."
            )
        check_chosen(self)
        check_even(self, "head_dim", "global_head_dim")
        if self.rotated % 2 or self.rotated > self.global_head_dim:
            raise ValueError(
                f"`rotary_dim` must be even and at most `global_head_dim`, which is "
                f"{self.global_head_dim}, but is {self.rotated}."
            )
        if self.rotary_dim == self.global_head_dim:
            object.__setattr__(self, "rotary_dim", None)
        if self.global_kv_heads == self.kv_heads:
            object.__setattr__(self, "global_kv_heads", None)
        if self.global_kv_heads is not None and not self.keys_are_values:
            raise ValueError("`global_kv_heads` needs `keys_are_values`, or to be `kv_heads`.")
        check_multiple(self, "heads", "global_kv_heads")
        if not 0 <= self.shared_layers < self.layers:
            raise ValueError(
                f"`shared_layers` must be at least 0 and less than `layers`, but they are "
                f"{self.shared_layers} and {self.layers}."
            )
        for side, which in (("near", "with"), ("far", "without")):
            if f"{side}_shared" in self.kinds and side not in self.kinds:
                raise ValueError(
                    f"`shared_layers={self.shared_layers}` includes layers {which} a window, but "
                    f"no layer before them {which} a window has keys and values to share. Pass a "
                    "smaller number."
                )

    @property
    def far_kv_heads(self) -> int:
        """The number of key and value heads of the layers without a window."""
        return self.global_kv_heads or self.kv_heads

    @property
    def rotated(self) -> int:
        """The number of rotated features in layers without a window."""
        return self.rotary_dim or self.global_head_dim

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer, which is the name of the stack that has its parameters."""
        own = self.layers - self.shared_layers
        sides: list[str] = []
        for local in self.local:
            side = "far"
            if local:
                side = "near"
            sides.append(side)
        return (*sides[:own], *(f"{side}_shared" for side in sides[own:]))

    def heads_of(self, side: str) -> tuple[int, int]:
        """Returns the number of key and value heads of layers with a window (`"near"`) or without
        (`"far"`), and the size of their heads."""
        if side == "near":
            return self.kv_heads, self.head_dim
        return self.far_kv_heads, self.global_head_dim


class Gemma4Cache(eqx.Module):
    """The keys and values of the layers with a window, and of those without."""

    near: Cache
    far: Cache

    def take(self, rows: Int[Array, " rows"]) -> "Gemma4Cache":
        """Gathers rows of the batch; a row may be repeated."""
        return Gemma4Cache(self.near.take(rows), self.far.take(rows))


class Gemma4Layers(StackedLayers):
    """The parameters of the layers of one kind, stacked along their first dimension.

    `scalar` multiplies the residual stream behind a layer. `input_gate`, `input_out` and
    `input_post_norm` add the embeddings that a layer has of the tokens.
    """

    attention_norm: Float[Array, "layers width"]
    wq: Float[Array, "layers width heads head_dim"]
    wk: Float[Array, "layers width kv_heads head_dim"] | None
    wv: Float[Array, "layers width kv_heads head_dim"] | None
    wo: Float[Array, "layers heads head_dim width"]
    q_norm: Float[Array, "layers head_dim"]
    k_norm: Float[Array, "layers head_dim"] | None
    attention_post_norm: Float[Array, "layers width"]
    mlp_norm: Float[Array, "layers width"]
    gate: Float[Array, "layers width hidden"]
    up: Float[Array, "layers width hidden"]
    down: Float[Array, "layers hidden width"]
    mlp_post_norm: Float[Array, "layers width"]
    scalar: Float[Array, "layers 1"]
    input_gate: Float[Array, "layers width layer_size"] | None
    input_out: Float[Array, "layers layer_size width"] | None
    input_post_norm: Float[Array, "layers width"] | None
    router: Float[Array, "layers width experts"] | None
    router_scale: Float[Array, "layers width"] | None
    expert_scale: Float[Array, "layers experts"] | None
    expert_gate: Float[Array, "layers experts width expert_hidden"] | None
    expert_up: Float[Array, "layers experts width expert_hidden"] | None
    expert_down: Float[Array, "layers experts expert_hidden width"] | None
    dense_post_norm: Float[Array, "layers width"] | None
    experts_norm: Float[Array, "layers width"] | None
    experts_post_norm: Float[Array, "layers width"] | None

    def __init__(self, config: Gemma4Config, kind: str, layers: int, *, key: PRNGKeyArray):
        c, make = config, initial_stacks(layers, key, 13)
        side = kind.removesuffix("_shared")
        kv_heads, size = c.heads_of(side)
        is_shared, hidden = kind != side, c.hidden
        if is_shared and c.wide_shared:
            hidden = 2 * c.hidden
        width, out = c.width, output_scale(c.layers)
        stream = (layers, width)
        self.attention_norm, self.attention_post_norm = jnp.ones(stream), jnp.ones(stream)
        self.wq, self.wk, self.wv = make(width, width, c.heads, size), None, None
        if not is_shared:
            self.wk = make(width, width, kv_heads, size)
            if side == "near" or not c.keys_are_values:
                self.wv = make(width, width, kv_heads, size)
        self.wo = make(c.heads * size, c.heads, size, width, scale=out)
        self.q_norm = jnp.ones((layers, size))
        self.k_norm = ones((layers, size), when=not is_shared)
        self.mlp_norm, self.mlp_post_norm = jnp.ones(stream), jnp.ones(stream)
        self.gate, self.up = make(width, width, hidden), make(width, width, hidden)
        self.down = make(hidden, hidden, width, scale=out)
        self.scalar = jnp.ones((layers, 1))
        self.input_gate = self.input_out = self.input_post_norm = None
        if c.layer_size is not None:
            self.input_gate = make(width, width, c.layer_size)
            self.input_out = make(c.layer_size, c.layer_size, width, scale=out)
            self.input_post_norm = jnp.ones(stream)
        self.router = self.router_scale = self.expert_scale = None
        self.expert_gate = self.expert_up = self.expert_down = None
        self.dense_post_norm = self.experts_norm = self.experts_post_norm = None
        if c.experts is not None:
            self.router = make(width, width, c.experts)
            self.router_scale, self.expert_scale = jnp.ones(stream), jnp.ones((layers, c.experts))
            self.expert_gate = make(width, c.experts, width, c.expert_hidden)
            self.expert_up = make(width, c.experts, width, c.expert_hidden)
            self.expert_down = make(c.expert_hidden, c.experts, c.expert_hidden, width, scale=out)
            self.dense_post_norm = jnp.ones(stream)
            self.experts_norm, self.experts_post_norm = jnp.ones(stream), jnp.ones(stream)


class Gemma4(RoutedDecoder):
    """The text decoder of Gemma 4 (Gemma team, 2026).

    ```python
    config = Gemma4Config(
        vocab=256, width=128, layers=6, heads=4, kv_heads=1, hidden=512, head_dim=32,
        global_head_dim=64, rotary_dim=16, local=(True, False) * 3, shared_layers=2,
        layer_size=16,
    )
    model = Gemma4(config, key=jax.random.key(0))
    logits = model(jnp.zeros((8, 64), jnp.int32))  # (8, 64, 256)
    ```
    """

    embed: Float[Array, "vocab width"]
    layer_embed: Float[Array, "layer_vocab layers layer_size"] | None
    layer_project: Float[Array, "width layers layer_size"] | None
    layer_norm: Float[Array, " layer_size"] | None
    near: Gemma4Layers | None
    far: Gemma4Layers | None
    near_shared: Gemma4Layers | None
    far_shared: Gemma4Layers | None
    norm: Float[Array, " width"]
    head: Float[Array, "width vocab"] | None
    config: Gemma4Config = eqx.field(static=True)

    def __init__(self, config: Gemma4Config, *, key: PRNGKeyArray):
        """Initialises the parameters: normal with variance 1 / fan-in, truncated at three standard
        deviations. The output projections of the layers are divided by sqrt(2 * layers)."""
        c = config
        embed, head, table, project, *keys = jax.random.split(key, 8)
        self.embed, self.head = initial_tables(c, embed, head)
        self.layer_embed = self.layer_project = self.layer_norm = None
        if c.layer_size is not None:
            shape = (c.layers, c.layer_size)
            rows = c.layer_vocab or c.vocab
            self.layer_embed = normal(table, (rows, *shape), fan_in=c.layer_size)
            self.layer_project = normal(project, (c.width, *shape), fan_in=c.width)
            self.layer_norm = jnp.ones(c.layer_size)
        stacks = dict.fromkeys(_KINDS)  # kinds of which there are no layers have no arrays
        for kind, key in zip(_KINDS, keys, strict=True):
            if kind in c.kinds:
                stacks[kind] = Gemma4Layers(c, kind, c.kinds.count(kind), key=key)
        self.near, self.far, self.near_shared, self.far_shared = stacks.values()
        self.norm = jnp.ones(c.width)
        self.config = config

    def unembed(self, hidden: HiddenStates) -> Float[Array, "batch seq vocab"]:
        return softcap(tied_or_own_head(hidden, self.embed, self.head), self.config.logit_cap)

    def init_cache(self, batch: int, length: int) -> PyTree:
        c, dtype = self.config, self.embed.dtype
        near, far = c.kinds.count("near"), c.kinds.count("far")
        return Gemma4Cache(
            empty_cache(near, batch, length, *c.heads_of("near"), dtype),
            empty_cache(far, batch, length, *c.heads_of("far"), dtype),
        )

    def _run(self, tokens, mask, positions, see, cache, key):
        c = self.config
        real = as_array(real_tokens(tokens.shape, mask))
        x = look_up(self.embed, tokens)  # (batch, seq, width)
        # The published weights were trained with this scale rounded to the dtype of `x`.
        x = x * jnp.asarray(math.sqrt(c.width), x.dtype)  # (batch, seq, width)
        visible = {"near": see(window=c.window), "far": see()}
        of_near = rotary_frequencies(c.head_dim, c.local_rope_base)
        of_far = rotary_frequencies(c.global_head_dim, c.rope_base)
        # The features beyond the rotated ones keep their places.
        of_far = np.where(np.arange(len(of_far)) < c.rotated // 2, of_far, 0)
        angles = {
            "near": rotary_angles(positions, of_near, wide(x.dtype)),
            "far": rotary_angles(positions, of_far, wide(x.dtype)),
        }

        def layer_fn(kind, x, carry, layer, inputs, index, key):
            cache, shared, use = carry
            side = kind.removesuffix("_shared")
            y = _norm(x, layer.attention_norm, c)
            # (batch, seq, heads, head_dim)
            q = _norm(product("bsd,dhk->bshk", y, layer.wq), layer.q_norm, c)
            if kind == side:
                k = v = product("bsd,dhk->bshk", y, layer.wk)  # (batch, seq, kv_heads, head_dim)
                if layer.wv is not None:
                    v = product("bsd,dhk->bshk", y, layer.wv)
                # Without a projection of their own, values are the keys before norm and rotation.
                k, v = rotate(_norm(k, layer.k_norm, c), angles[side]), _norm(v, None, c)
                if cache is not None:
                    part, k, v = extend(getattr(cache, side), index, k, v)
                    cache = replace(cache, **{side: part})
                if shared is not None:
                    shared = {**shared, side: (k, v)}
            elif shared is not None:  # those of the last layer that has some of its own
                k, v = shared[side]
            else:
                k, v = getattr(cache, side).layer(-1)
            q = rotate(q, angles[side])  # (batch, seq, heads, head_dim)
            # The norms of queries and keys have learned the scale.
            options = {"scale": 1.0, "rate": c.attention_dropout, "key": key}
            y = attend(q, k, v, visible=visible[side], **options)  # (batch, seq, heads, head_dim)
            y = product("bshk,hkd->bsd", y, layer.wo)  # (batch, seq, width)
            x = x + _norm(y, layer.attention_post_norm, c)
            y, use = _feed_forward(layer, x, real, use, c)
            x = x + _norm(y, layer.mlp_post_norm, c)
            if inputs is not None:
                gate = product("bsd,di->bsi", x, layer.input_gate)  # (batch, seq, layer_size)
                y = product("bsi,id->bsd", activate_gated(_GELU, gate, inputs), layer.input_out)
                x = x + _norm(y, layer.input_post_norm, c)
            # It is not trained by gradients.
            scalar = jax.lax.stop_gradient(layer.scalar.astype(x.dtype))
            return x * scalar[None, None], (cache, shared, use)

        stacks = {kind: getattr(self, kind) for kind in _KINDS}
        use, shared = no_use(c.experts, wide(x.dtype)), None
        if cache is None and c.shared_layers:
            # Keys and values that layers share, until a layer before them has some.
            shared = {}
            for side in ("near", "far"):
                if side in c.kinds:
                    nothing = jnp.zeros((*x.shape[:2], *c.heads_of(side)), x.dtype)
                    shared[side] = nothing, nothing
        options = {"key": key, **c.loop_options}
        options |= {"inputs": self._layer_inputs(tokens, x), "cache": (cache, shared, use)}
        x, (cache, _, use) = scan_kinds(layer_fn, x, stacks, c.kinds, **options)
        return _norm(x, self.norm, c), cache, use

    def _layer_inputs(
        self, tokens: Tokens, x: HiddenStates
    ) -> Float[Array, "layers batch seq layer_size"] | None:
        """Returns what each layer has of the tokens: an embedding of its own, and a projection of
        the common one."""
        c = self.config
        if c.layer_size is None or self.layer_embed is None:
            return None
        # (batch, seq, layers, layer_size)
        own = look_up(self.layer_embed, tokens)
        own = own * jnp.asarray(math.sqrt(c.layer_size), x.dtype)
        project: Any = self.layer_project
        common = product("bsd,dli->bsli", x, project)  # (batch, seq, layers, layer_size)
        common = _norm(common * jnp.asarray(c.width**-0.5, x.dtype), self.layer_norm, c)
        both = (common + own) * jnp.asarray(2**-0.5, x.dtype)  # (batch, seq, layers, layer_size)
        return jnp.moveaxis(both, 2, 0)  # layers first, as a scan takes them


_KINDS = ("near", "far", "near_shared", "far_shared")


def _norm(x, scale, config):
    return wide_rms_norm(x, scale, config.norm_eps)


def _feed_forward(layer, x, real, use, c):
    """The outputs of the network and of the experts, and the use of experts until here."""
    y = gated_feed_forward(layer, _norm(x, layer.mlp_norm, c), _GELU)  # (batch, seq, width)
    if layer.router is None:
        return y, use
    routed = _norm(x, None, c) * layer.router_scale.astype(x.dtype)[None, None]
    routed = routed * jnp.asarray(c.width**-0.5, x.dtype)
    scores = product("bsd,de->bse", routed, layer.router)  # (batch, seq, experts)

    def experts(x):
        gate = product("betd,edh->beth", x, layer.expert_gate)  # (batch, experts, tokens, hidden)
        up = product("betd,edh->beth", x, layer.expert_up)
        y = product("beth,ehd->betd", activate_gated(_GELU, gate, up), layer.expert_down)
        return y * layer.expert_scale.astype(y.dtype)[None, :, None, None]

    z = _norm(x, layer.experts_norm, c)
    # The network and the experts read the same input, and their outputs are added.
    z, more = mix_experts(experts, z, scores, real, chosen=c.chosen)
    use = add_use(use, more)
    return _norm(y, layer.dense_post_norm, c) + _norm(z, layer.experts_post_norm, c), use
