"""The Gemma 4 decoder: layers with a sliding window between layers with larger heads and without.

Options give it embeddings for each layer and last layers without keys and values of their own (the
small models), or keys that serve as values (the large ones) and experts beside the feed-forward
network (the mixture of experts).
"""

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer, PRNGKeyArray

from ._attention import as_array, attend, real_tokens, wide
from ._basic import (
    activate_gated,
    initial_stacks,
    initial_tables,
    look_up,
    normal,
    output_scale,
    wide_rms_norm,
)
from ._by_layer import StackedLayers
from ._cache import Cache, admit, cached_view, empty_cache, extend
from ._check_config import check_chosen, check_config, check_local
from ._decoder import DecoderConfig, RoutedDecoder, tied_or_own_head
from ._einsum import gated_feed_forward, product
from ._inputs import AnyArray, Mask
from ._moe import mix_experts
from ._rotary import rotary_angles, rotary_frequencies, rotate
from ._scan_kinds import scan_kinds

_GELU = "gelu_new"


@dataclass(frozen=True)
class Gemma4Config(DecoderConfig):
    """The configuration of a `Gemma4`.

    **Arguments:**

    - `vocab`, `width`, `layers`: the vocabulary size, the size of the residual stream and the
      number of decoder layers.
    - `heads`, `kv_heads`, `head_dim`: in layers with a window, the number of query heads; the
      number of key and value heads, which must divide it; and the size of each head, an even
      number.
    - `global_kv_heads`, `global_head_dim`: the same of the layers without a window. The first is
      by default, as of the others.
    - `hidden`: the hidden size of the feed-forward network.
    - `local`: for each layer, whether it has a sliding attention window; by default all have but
      each sixth and the last, which never has.
    - `window`: the size of that window in tokens, including the token itself.
    - `rope_base`, `rotary_dim`: in layers without a window, the base of the rotary embeddings'
      wavelengths, and the number of features of each head that they rotate, which is even; all by
      default. The wavelengths are as if all features were rotated.
    - `local_rope_base`: the base in layers with a window.
    - `keys_are_values`: whether keys, without their norm and rotation, serve as values in layers
      without a window.
    - `shared_layers`: the number of last layers that have no keys and values of their own. They
      take the keys and values of the last layer before them that has a window if they have one.
    - `wide_shared`: whether the feed-forward networks of these layers are twice as wide.
    - `layer_size`: the size of the embeddings that each layer has of the tokens; none by default.
    - `layer_vocab`: the vocabulary size of these embeddings; by default, the model's.
    - `experts`, `chosen`, `expert_hidden`: the number of experts beside the feed-forward network of
      each layer, the number of experts that each token is routed to (top-k), and the hidden size
      of each; no experts by default.
    - `logit_cap`: a soft cap (by tanh) of the logits.
    - `norm_eps`: added to the mean square in RMSNorm.
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
    kv_heads: int
    hidden: int
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
    norm_eps: int | float = 1e-6
    tied: bool = True
    attention_dropout: int | float = 0.0
    context: int = 131072

    def __post_init__(self):
        optional = ("global_kv_heads", "layer_size", "layer_vocab", "rotary_dim")
        sizes = [name for name in optional if getattr(self, name) is not None]
        check_config(self, "head_dim", "global_head_dim", "chosen", "expert_hidden", *sizes)
        if not self.local:
            last = self.layers - 1
            local = tuple((i + 1) % 6 != 0 and i != last for i in range(self.layers))
            object.__setattr__(self, "local", local)
        check_local(self)
        if self.local[-1]:
            raise ValueError("`local` gives the last layer a window, which it never has.")
        if self.experts is not None:
            check_chosen(self)
        _check_heads(self)
        _check_shared(self)

    @property
    def far_kv_heads(self) -> int:
        """The number of key and value heads of the layers without a window."""
        return self.kv_heads if self.global_kv_heads is None else self.global_kv_heads

    @property
    def rotated(self) -> int:
        """The number of rotated features in layers without a window."""
        return self.global_head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer, which is the name of the stack that has its parameters."""
        names = ["near" if local else "far" for local in self.local]
        first = self.layers - self.shared_layers
        return tuple(x if i < first else f"{x}_shared" for i, x in enumerate(names))


def _check_heads(c: Gemma4Config) -> None:
    for name in ("head_dim", "global_head_dim"):
        if getattr(c, name) % 2:
            raise ValueError(f"`{name}` must be even, but is {getattr(c, name)}.")
    if c.rotated % 2 or c.rotated > c.global_head_dim:
        raise ValueError(
            f"`rotary_dim` must be even and at most `global_head_dim`, which is "
            f"{c.global_head_dim}, but is {c.rotated}."
        )
    if c.rotary_dim == c.global_head_dim:
        object.__setattr__(c, "rotary_dim", None)
    if c.global_kv_heads == c.kv_heads:
        object.__setattr__(c, "global_kv_heads", None)
    if c.global_kv_heads is not None and not c.keys_are_values:
        raise ValueError("`global_kv_heads` needs `keys_are_values`, or to be `kv_heads`.")
    if c.heads % c.far_kv_heads:
        raise ValueError(
            f"`heads` must be a multiple of `global_kv_heads`, but {c.heads} is not a multiple of "
            f"{c.far_kv_heads}."
        )


def _check_shared(c: Gemma4Config) -> None:
    if not 0 <= c.shared_layers < c.layers:
        raise ValueError(
            f"`shared_layers` must be at least 0 and less than `layers`, but they are "
            f"{c.shared_layers} and {c.layers}."
        )
    for name in ("near", "far"):
        if f"{name}_shared" in c.kinds and name not in c.kinds:
            which = "with" if name == "near" else "without"
            raise ValueError(
                f"`shared_layers` has layers {which} a window, but no layer before them {which} a "
                "window has keys and values for them."
            )


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
        far, own = kind.startswith("far"), not kind.endswith("shared")
        size, kv_heads = (c.global_head_dim, c.far_kv_heads) if far else (c.head_dim, c.kv_heads)
        hidden = c.hidden if own or not c.wide_shared else 2 * c.hidden
        width, out = c.width, output_scale(c.layers)
        has_values = own and not (far and c.keys_are_values)
        inputs, routed = c.layer_size is not None, c.experts is not None
        ones = lambda size: jnp.ones((layers, size))
        into = lambda *shape: make(width, width, *shape)
        self.attention_norm, self.attention_post_norm = ones(width), ones(width)
        self.wq = into(c.heads, size)
        self.wk = into(kv_heads, size) if own else None
        self.wv = into(kv_heads, size) if has_values else None
        self.wo = make(c.heads * size, c.heads, size, width, scale=out)
        self.q_norm, self.k_norm = ones(size), ones(size) if own else None
        self.mlp_norm, self.mlp_post_norm = ones(width), ones(width)
        self.gate, self.up = into(hidden), into(hidden)
        self.down = make(hidden, hidden, width, scale=out)
        self.scalar = jnp.ones((layers, 1))
        self.input_gate = into(c.layer_size) if inputs else None
        self.input_out = make(c.layer_size, c.layer_size, width, scale=out) if inputs else None
        self.input_post_norm = ones(width) if inputs else None
        self.router = into(c.experts) if routed else None
        self.router_scale = ones(width) if routed else None
        self.expert_scale = ones(c.experts) if routed else None
        self.expert_gate = self.expert_up = self.expert_down = None
        if routed:
            shape = (c.experts, width, c.expert_hidden)
            self.expert_gate, self.expert_up = make(width, *shape), make(width, *shape)
            shape = (c.experts, c.expert_hidden, width)
            self.expert_down = make(c.expert_hidden, *shape, scale=out)
        self.dense_post_norm = ones(width) if routed else None
        self.experts_norm = ones(width) if routed else None
        self.experts_post_norm = ones(width) if routed else None


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
            rows = c.vocab if c.layer_vocab is None else c.layer_vocab
            self.layer_embed = normal(table, (rows, *shape), fan_in=c.layer_size)
            self.layer_project = normal(project, (c.width, *shape), fan_in=c.width)
            self.layer_norm = jnp.ones(c.layer_size)
        stacks = [
            Gemma4Layers(c, kind, c.kinds.count(kind), key=own) if kind in c.kinds else None
            for kind, own in zip(_KINDS, keys, strict=True)
        ]
        self.near, self.far, self.near_shared, self.far_shared = stacks
        self.norm = jnp.ones(c.width)
        self.config = config

    def unembed(self, hidden: Float[Array, "batch seq width"]) -> Float[Array, "batch seq vocab"]:
        """Returns the logits of hidden states."""
        logits, cap = tied_or_own_head(self, hidden), self.config.logit_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def init_cache(self, batch: int, length: int) -> Any:
        """Returns an empty cache for `batch` rows of up to `length` tokens."""
        c, dtype = self.config, self.embed.dtype
        near = (c.kinds.count("near"), batch, length, c.kv_heads, c.head_dim)
        far = (c.kinds.count("far"), batch, length, c.far_kv_heads, c.global_head_dim)
        return Gemma4Cache(empty_cache(*near, dtype), empty_cache(*far, dtype))

    def decode(
        self, tokens: Integer[AnyArray, "batch new"], cache: Any, *, mask: Mask | None = None
    ) -> tuple[Float[Array, "batch new width"], Any]:
        """Appends tokens to a cache. Returns their hidden states and the updated cache."""
        near, far = (admit(part, tokens.shape, mask) for part in (cache.near, cache.far))
        view = cached_view(near, tokens.shape[1])
        both: Any = Gemma4Cache(near, far)
        return self._run(tokens, mask, *view, both, None)[:2]

    def _run(self, tokens, mask, positions, see, cache, key):
        c = self.config
        real = as_array(real_tokens(tokens.shape, mask))
        x = look_up(self.embed, tokens)
        # The published weights were trained with this scale rounded to the dtype of `x`.
        x = x * jnp.asarray(math.sqrt(c.width), x.dtype)
        visible = {"near": see(window=c.window), "far": see()}
        angles = _angles(positions, c, wide(x.dtype))

        def layer_fn(kind, x, carry, layer, inputs, index, key):
            cache, shared, use = carry
            side = kind.removesuffix("_shared")
            y = _norm(x, layer.attention_norm, c)
            q = _norm(product("bsd,dhk->bshk", y, layer.wq), layer.q_norm, c)
            if kind == side:
                k, v = _keys_values(layer, y, angles[side], c)
                cache, k, v = _extend(cache, side, index, k, v)
                shared = None if shared is None else {**shared, side: (k, v)}
            else:
                k, v = _last(cache, side) if shared is None else shared[side]
            options: Any = {"scale": 1.0, "rate": c.attention_dropout, "key": key}
            y = attend(rotate(q, angles[side]), k, v, visible=visible[side], **options)
            y = product("bshk,hkd->bsd", y, layer.wo)
            x = x + _norm(y, layer.attention_post_norm, c)
            y, use = _feed_forward(layer, x, real, use, c)
            x = x + _norm(y, layer.mlp_post_norm, c)
            if inputs is not None:
                gate = product("bsd,di->bsi", x, layer.input_gate)
                y = product("bsi,id->bsd", activate_gated(_GELU, gate, inputs), layer.input_out)
                x = x + _norm(y, layer.input_post_norm, c)
            # It is not trained by gradients.
            scalar = jax.lax.stop_gradient(layer.scalar.astype(x.dtype))
            return x * scalar[None, None], (cache, shared, use)

        stacks = {kind: getattr(self, kind) for kind in _KINDS}
        use = None if c.experts is None else tuple(jnp.zeros((2, c.experts), wide(x.dtype)))
        carry = (cache, _nothing_shared(x, c) if cache is None else None, use)
        options: Any = {"key": key, "remat": c.remat, "unroll": c.unroll}
        inputs = self._layer_inputs(tokens, x)
        x, carry = scan_kinds(layer_fn, x, stacks, c.kinds, inputs=inputs, cache=carry, **options)
        return _norm(x, self.norm, c), carry[0], carry[2]

    def _layer_inputs(
        self, tokens: Integer[AnyArray, "batch seq"], x: Float[Array, "batch seq width"]
    ) -> Float[Array, "layers batch seq layer_size"] | None:
        """Returns what each layer has of the tokens: an embedding of its own, and a projection of
        the common one."""
        c = self.config
        if c.layer_size is None or self.layer_embed is None:
            return None
        own = jnp.take(self.layer_embed, tokens, axis=0)  # NaN for ids outside it
        own = own * jnp.asarray(math.sqrt(c.layer_size), x.dtype)
        project: Any = self.layer_project
        common = product("bsd,dli->bsli", x, project)
        common = _norm(common * jnp.asarray(c.width**-0.5, x.dtype), self.layer_norm, c)
        both = (common + own) * jnp.asarray(2**-0.5, x.dtype)
        return jnp.moveaxis(both, 2, 0)


_KINDS = ("near", "far", "near_shared", "far_shared")


def _norm(x, scale, config):
    return wide_rms_norm(x, scale, config.norm_eps)


def _angles(positions, c, dtype):
    near = rotary_frequencies(c.head_dim, c.local_rope_base)
    far = rotary_frequencies(c.global_head_dim, c.rope_base)
    far = np.where(np.arange(len(far)) < c.rotated // 2, far, 0)
    frequencies = {"near": near, "far": far}
    return {side: rotary_angles(positions, f, dtype) for side, f in frequencies.items()}


def _keys_values(layer, x, angles, c):
    k = product("bsd,dhk->bshk", x, layer.wk)
    v = k if layer.wv is None else product("bsd,dhk->bshk", x, layer.wv)
    return rotate(_norm(k, layer.k_norm, c), angles), _norm(v, None, c)


def _extend(cache, side, index, k, v):
    if cache is None:
        return None, k, v
    part, k, v = extend(getattr(cache, side), index, k, v)
    return eqx.tree_at(lambda both: getattr(both, side), cache, part), k, v


def _last(cache, side):
    """The keys and values of the last layer of a kind that has some of its own."""
    return getattr(cache, side).layer(-1)


def _nothing_shared(x, c):
    """Keys and values that layers which share them find, until a layer before them has some."""
    if not c.shared_layers:
        return None
    zeros = lambda heads, size: (jnp.zeros((*x.shape[:2], heads, size), x.dtype),) * 2
    sizes = {"near": (c.kv_heads, c.head_dim), "far": (c.far_kv_heads, c.global_head_dim)}
    return {side: zeros(*size) for side, size in sizes.items() if side in c.kinds}


def _feed_forward(layer, x, real, use, c):
    """The outputs of the network and of the experts, and the use of experts until here."""
    y = gated_feed_forward(layer, _norm(x, layer.mlp_norm, c), _GELU)
    if layer.router is None:
        return y, use
    routed = _norm(x, None, c) * layer.router_scale.astype(x.dtype)[None, None]
    routed = routed * jnp.asarray(c.width**-0.5, x.dtype)
    scores = product("bsd,de->bse", routed, layer.router)

    def experts(x):
        gate = product("betd,edh->beth", x, layer.expert_gate)
        up = product("betd,edh->beth", x, layer.expert_up)
        y = product("beth,ehd->betd", activate_gated(_GELU, gate, up), layer.expert_down)
        return y * layer.expert_scale.astype(y.dtype)[None, :, None, None]

    z = _norm(x, layer.experts_norm, c)
    z, more = mix_experts(experts, z, scores, real, chosen=c.chosen)
    use = tuple(a + b for a, b in zip(use, more, strict=True))
    return _norm(y, layer.dense_post_norm, c) + _norm(z, layer.experts_post_norm, c), use
