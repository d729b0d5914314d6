"""The decoder of Phi-3, Phi-3.5 and Phi-4: LLaMA with rotary embeddings of a part of each head, a
scaling of these for long contexts, and dropout of the residuals."""

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from ..core._decoding import GREEDY, Decoding
from ._attention import attend, wide
from ._basic import initial_attention, initial_mlp, initial_tables, look_up, rms_norm
from ._by_layer import StackedLayers
from ._cache import Cache, extend
from ._check_config import check_config, check_heads
from ._dropout import dropout, split_key
from ._einsum import gated_feed_forward, product
from ._rotary import LongRope, long_angles, rotary_frequencies, rotate
from ._scan_layers import Remat, scan_layers


@dataclass(frozen=True)
class Phi3Config:
    """The configuration of a `Phi3`.

    **Arguments:**

    - `vocab`, `width`, `layers`: the vocabulary size, the size of the residual stream and the
      number of decoder layers.
    - `heads`, `kv_heads`: the number of query heads, and the number of key and value heads, which
      must divide it.
    - `hidden`: the hidden size of the feed-forward network.
    - `rotary_dim`: the number of features of each head that rotary embeddings rotate; all by
      default.
    - `rope_base`, `rope_scaling`: the base of the rotary embeddings' wavelengths, and how they are
      scaled for long contexts.
    - `norm_eps`: added to the mean square in RMSNorm.
    - `tied`: whether the output head shares the weights of the embedding.
    - `window`: the size of the sliding attention window in tokens, including the token itself; no
      window by default.
    - `attention_dropout`, `residual_dropout`: the dropout rates of the attention weights, and of
      the outputs of attention and feed-forward network.
    - `context`: the length in tokens that the weights were trained for. It is not enforced.
    - `remat`: what to rematerialise: `"none"`, `"dots"` (not products with weights) or `"full"`.
    - `unroll`: how many layers one iteration of the loop over the layers runs; by default all of
      them on a CPU, if they are at most four, and otherwise one.
    - `eos`, `bos`, `pad`: the token ids that end a sequence, and those of its start and of padding.
    - `decoding`: the defaults of [`redcoast.generate`][] for this model.

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
    rotary_dim: int | None = None
    rope_base: int | float = 10000.0
    rope_scaling: LongRope | None = None
    norm_eps: int | float = 1e-5
    tied: bool = False
    window: int | None = None
    attention_dropout: int | float = 0.0
    residual_dropout: int | float = 0.0
    context: int = 4096
    remat: Remat = "none"
    unroll: int | None = None
    eos: tuple[int, ...] = ()
    bos: int | None = None
    pad: int | None = None
    decoding: Decoding = GREEDY

    from ._methods import head_dim

    def __post_init__(self):
        check_config(self)
        check_heads(self)
        if self.rotary_dim is None:
            object.__setattr__(self, "rotary_dim", self.head_dim)
        if self.rotated % 2 or not 0 < self.rotated <= self.head_dim:
            raise ValueError(
                f"`rotary_dim` must be even, positive and at most the head size {self.head_dim}, "
                f"but is {self.rotated}."
            )
        for name in ("short", "long") if self.rope_scaling else ():
            if (found := len(getattr(self.rope_scaling, name))) != self.rotated // 2:
                raise ValueError(
                    f"`rope_scaling` has {found} factors in `{name}`, but there are "
                    f"{self.rotated // 2} pairs of rotated features. It must have one for each."
                )

    @property
    def rotated(self) -> int:
        return self.head_dim if self.rotary_dim is None else self.rotary_dim


class Phi3Layers(StackedLayers):
    """The parameters of all decoder layers, stacked along their first dimension."""

    attention_norm: Float[Array, "layers width"]
    wq: Float[Array, "layers width heads head_dim"]
    wk: Float[Array, "layers width kv_heads head_dim"]
    wv: Float[Array, "layers width kv_heads head_dim"]
    wo: Float[Array, "layers heads head_dim width"]
    mlp_norm: Float[Array, "layers width"]
    gate: Float[Array, "layers width hidden"]
    up: Float[Array, "layers width hidden"]
    down: Float[Array, "layers hidden width"]

    def __init__(self, config: Phi3Config, *, key: PRNGKeyArray):
        c = config
        keys = jax.random.split(key, 7)
        self.attention_norm, self.mlp_norm = (jnp.ones((c.layers, c.width)) for _ in range(2))
        self.wq, self.wk, self.wv, self.wo = initial_attention(c, *keys[:4])
        self.gate, self.up, self.down = initial_mlp(c, *keys[4:])


class Phi3(eqx.Module):
    """The Phi-3 decoder (Abdin et al., 2024, <https://arxiv.org/abs/2404.14219>).

    ```python
    config = Phi3Config(vocab=256, width=128, layers=4, heads=4, kv_heads=2, hidden=352)
    model = Phi3(config, key=jax.random.key(0))
    logits = model(jnp.zeros((8, 64), jnp.int32))  # (8, 64, 256)
    ```
    """

    embed: Float[Array, "vocab width"]
    layers: Phi3Layers
    norm: Float[Array, " width"]
    head: Float[Array, "width vocab"] | None
    config: Phi3Config = eqx.field(static=True)

    from ._methods import decoder_call as __call__
    from ._methods import decoder_decode as decode
    from ._methods import decoder_hidden as hidden
    from ._methods import decoder_init_cache as init_cache
    from ._methods import tied_or_own_head as unembed

    def __init__(self, config: Phi3Config, *, key: PRNGKeyArray):
        """Initialises the parameters: normal with variance 1 / fan-in, truncated at three standard
        deviations. The output projections of the layers are divided by sqrt(2 * layers)."""
        embed, layers, head = jax.random.split(key, 3)
        self.embed, self.head = initial_tables(config, embed, head)
        self.layers = Phi3Layers(config, key=layers)
        self.norm = jnp.ones(config.width)
        self.config = config

    def expect(self, cache: Cache, lengths: Int[Array, " batch"]) -> Cache:
        """Sets the number of tokens that each row may reach, which its rotary embeddings follow."""
        if self.config.rope_scaling is None:
            return cache
        return Cache(cache.k, cache.v, cache.mask, cache.filled, lengths)

    def _run(self, tokens, mask, positions, see, cache, key):
        c = self.config
        visible = see(window=c.window)
        x = look_up(self.embed, tokens)
        frequencies = rotary_frequencies(c.rotated, c.rope_base)
        lengths = None if cache is None else cache.lengths
        angles = long_angles(positions, frequencies, c.rope_scaling, wide(x.dtype), lengths)

        def layer_fn(x, cache, layer, index, key):
            attention_key, out_key, mlp_key = split_key(key, 3)
            y = rms_norm(x, layer.attention_norm, c.norm_eps)
            q, k, v = (product("bsd,dhk->bshk", y, w) for w in (layer.wq, layer.wk, layer.wv))
            cache, k, v = extend(cache, index, rotate(k, angles), v)
            q, rate = rotate(q, angles), c.attention_dropout
            y = attend(q, k, v, visible=visible, rate=rate, key=attention_key)
            y = product("bshk,hkd->bsd", y, layer.wo)
            x = x + dropout(y, c.residual_dropout, out_key)
            y = gated_feed_forward(layer, rms_norm(x, layer.mlp_norm, c.norm_eps), "silu")
            return x + dropout(y, c.residual_dropout, mlp_key), cache

        x, cache = scan_layers(
            layer_fn, x, self.layers, cache=cache, key=key, remat=c.remat, unroll=c.unroll
        )
        return rms_norm(x, self.norm, c.norm_eps), cache
