"""The DeepSeek-V3 decoder: attention with compressed keys and values, and shared and routed
experts. `_shared_experts.py` has all but the attention."""

import math
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ._attention import attend
from ._base_config import check_config
from ._basic import initial_stacks, output_scale, rms_norm
from ._cache import Cache, extend
from ._check_config import check_even
from ._einsum import merged, product
from ._rotary import Yarn, rotate, rotate_pairs
from ._shared_experts import SharedExpertsConfig, SharedExpertsDecoder, SharedExpertsLayers

_LATENT_EPS = 1e-6  # of the norms of compressed queries, keys and values


@dataclass(frozen=True)
class DeepseekV3Config(SharedExpertsConfig):
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
      divided by their sum, and a factor that is then applied to them.
    - `q_rank`, `kv_rank`: the sizes of the latent features that queries, and keys and values, are
      computed from. With `q_rank=None`, queries are computed from the residual stream.
    - `plain_size`, `rope_size`, `value_size`: for each head, the number of features of queries and
      keys that are not rotated and that are rotated (an even number), and the number of features
      of values.
    - `rope_pairs`: whether rotary embeddings rotate neighbouring features, instead of features that
      are half of the head size apart.
    - `score_scaling`: with `rope_scaling`, the scores of attention are multiplied by the square of
      `1 + 0.1 * score_scaling * log(factor)`.
    - `norm_eps`: added to the mean square in RMSNorm, except for the compressed features, where it
      is 1e-6 as published.
    - `rope_base`, `rope_scaling`, `tied`, `attention_dropout`, `context`, `remat`, `unroll`, `eos`,
      `bos`, `pad`, `decoding`: as in [`LlamaConfig`][redcoast.models.LlamaConfig].
    """

    q_rank: int | None = 1536
    kv_rank: int = 512
    plain_size: int = 128
    rope_size: int = 64
    value_size: int = 128
    _: KW_ONLY
    rope_scaling: Yarn | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    rope_pairs: bool = True
    score_scaling: int | float = 0.0

    def __post_init__(self):
        super().__post_init__()
        check_config(self, "q_rank", "kv_rank", "plain_size", "rope_size", "value_size")
        check_even(self, "rope_size")

    @property
    def rotated(self) -> int:
        return self.rope_size


class DeepseekV3Layers(SharedExpertsLayers):
    """The parameters of layers with experts or of layers without."""

    q_down: Float[Array, "layers width q_rank"] | None
    q_norm: Float[Array, "layers q_rank"] | None
    wq: Float[Array, "layers q_inputs heads qk_size"]
    kv_down: Float[Array, "layers width kv_rank"]
    k_rope: Float[Array, "layers width rope_size"]
    kv_norm: Float[Array, "layers kv_rank"]
    wk: Float[Array, "layers kv_rank heads plain_size"]
    wv: Float[Array, "layers kv_rank heads value_size"]
    wo: Float[Array, "layers heads value_size width"]

    def __init__(self, config: DeepseekV3Config, layers: int, *, routed: bool, key: PRNGKeyArray):
        c, make = config, initial_stacks(layers, key, 14)
        self.kv_norm = jnp.ones((layers, c.kv_rank))
        inputs, self.q_down, self.q_norm = c.width, None, None
        if c.q_rank is not None:
            inputs = c.q_rank
            self.q_down = make(c.width, c.width, c.q_rank)
            self.q_norm = jnp.ones((layers, c.q_rank))
        self.wq = make(inputs, inputs, c.heads, c.plain_size + c.rope_size)
        self.kv_down = make(c.width, c.width, c.kv_rank)
        self.k_rope = make(c.width, c.width, c.rope_size)
        self.wk = make(c.kv_rank, c.kv_rank, c.heads, c.plain_size)
        self.wv = make(c.kv_rank, c.kv_rank, c.heads, c.value_size)
        size, out = c.heads * c.value_size, output_scale(c.layers)
        self.wo = make(size, c.heads, c.value_size, c.width, scale=out)
        super().__init__(c, layers, routed=routed, make=make)


class DeepseekV3(SharedExpertsDecoder):
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

    config: DeepseekV3Config = eqx.field(static=True)
    _layers_of: ClassVar = DeepseekV3Layers

    def __init__(self, config: DeepseekV3Config, *, key: PRNGKeyArray):
        """Initialises the parameters: normal with variance 1 / fan-in, truncated at three standard
        deviations. The output projections of the layers are divided by sqrt(2 * layers)."""
        super().__init__(config, key=key)

    def init_cache(self, batch: int, length: int) -> Cache:
        c, dtype = self.config, self.embed.dtype
        slots = (c.layers, batch, length, 1)  # one head for all
        latent, common = (jnp.zeros((*slots, n), dtype) for n in (c.kv_rank, c.rope_size))
        return Cache(latent, common, jnp.zeros((batch, length), bool), jnp.zeros((), jnp.int32))

    @staticmethod
    def _attention(layer, x, angles, visible, cache, index, key, config):
        c = config
        turn = rotate
        if c.rope_pairs:
            turn = rotate_pairs
        y = x
        if layer.q_down is not None:
            y = rms_norm(product("bsd,dl->bsl", x, layer.q_down), layer.q_norm, _LATENT_EPS)
        q = product("bsl,lhk->bshk", y, layer.wq)  # (batch, seq, heads, size)
        plain, turned = jnp.split(q, [c.plain_size], axis=-1)  # (batch, seq, heads, size)
        turned = turn(turned, angles)
        # (batch, seq, kv_rank), from which keys and values of all heads are computed
        latent = rms_norm(product("bsd,dl->bsl", x, layer.kv_down), layer.kv_norm, _LATENT_EPS)
        # (batch, seq, 1, rope_size): the rotated features of keys are the same for all heads.
        common = turn(product("bsd,dk->bsk", x, layer.k_rope)[:, :, None], angles)
        cache, latent, common = extend(cache, index, latent[:, :, None], common)
        growth = 1.0
        if c.rope_scaling is not None and c.rope_scaling.factor > 1:
            growth = 1 + 0.1 * c.score_scaling * math.log(c.rope_scaling.factor)
        # Squared, as queries and keys would each be multiplied by it.
        scale = growth**2 / math.sqrt(c.plain_size + c.rope_size)
        options = {"visible": visible, "scale": scale, "rate": c.attention_dropout, "key": key}
        if cache is not None and x.shape[1] == 1:
            # For one query, the projections from latent features to keys and values are applied to
            # the query and the output instead, which takes less work than to all slots.
            wk, wv = merged(layer.wk), merged(layer.wv)
            q = jnp.concatenate([jnp.einsum("bshk,lhk->bshl", plain, wk), turned], axis=-1)
            k = jnp.concatenate([latent, common], axis=-1)  # (batch, slots, 1, kv_rank + rope_size)
            out = attend(q, k, latent, **options)  # (batch, 1, heads, kv_rank)
            out = jnp.einsum("bshl,lhk->bshk", out, wv)  # (batch, 1, heads, value_size)
        else:
            latent = latent[:, :, 0]  # (batch, slots, kv_rank)
            k, v = (product("btl,lhk->bthk", latent, w) for w in (layer.wk, layer.wv))
            common = jnp.broadcast_to(common, (*k.shape[:3], c.rope_size))  # to all heads
            k = jnp.concatenate([k, common], axis=-1)  # (batch, slots, heads, size)
            out = attend(jnp.concatenate([plain, turned], axis=-1), k, v, **options)
        return product("bshk,hkd->bsd", out, layer.wo), cache
