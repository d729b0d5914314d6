"""GLM-4's mixtures of experts (GLM-4.5, GLM-4.5-Air, GLM-4.6): DeepSeek-V3's shared and routed
experts with grouped-query attention. `_shared_experts.py` has all but the attention."""

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import equinox as eqx
from jaxtyping import Array, Float, PRNGKeyArray

from ._attention import attend
from ._base_config import RotarySizes, check_rotary_dim
from ._basic import initial_stacks, ones, output_scale, rms_norm, zeros
from ._cache import extend
from ._einsum import keys_values, product, queries
from ._rotary import rotate
from ._shared_experts import SharedExpertsConfig, SharedExpertsDecoder, SharedExpertsLayers


@dataclass(frozen=True)
class Glm4MoeConfig(SharedExpertsConfig, RotarySizes):
    """The configuration of a `Glm4Moe`.

    **Arguments:**

    - `vocab`, `width`, `layers`, `hidden`, `expert_hidden`, `dense_layers`, `experts`, `chosen`,
      `shared`, `groups`, `chosen_groups`, `weights_sum_to_one`, `route_scale`: as in
      [`DeepseekV3Config`][redcoast.models.DeepseekV3Config].
    - `heads`, `kv_heads`, `head_size`, `rotary_dim`, `rope_base`, `rope_scaling`, `qkv_bias`,
      `qk_norm`, `norm_eps`, `tied`, `attention_dropout`, `context`, `remat`, `unroll`, `eos`,
      `bos`, `pad`, `decoding`: as in [`LlamaConfig`][redcoast.models.LlamaConfig].
    """

    dense_layers: int = 1
    experts: int = 128
    groups: int = 1
    chosen_groups: int = 1
    route_scale: int | float = 1.0
    _: KW_ONLY
    kv_heads: int
    head_size: int | None = None
    rotary_dim: int | None = None
    norm_eps: int | float = 1e-5
    qkv_bias: bool = False
    qk_norm: bool = False
    context: int = 131072

    def __post_init__(self):
        super().__post_init__()
        check_rotary_dim(self)


class Glm4MoeLayers(SharedExpertsLayers):
    """The parameters of layers with experts or of layers without."""

    wq: Float[Array, "layers width heads head_dim"]
    wk: Float[Array, "layers width kv_heads head_dim"]
    wv: Float[Array, "layers width kv_heads head_dim"]
    wo: Float[Array, "layers heads head_dim width"]
    bq: Float[Array, "layers heads head_dim"] | None
    bk: Float[Array, "layers kv_heads head_dim"] | None
    bv: Float[Array, "layers kv_heads head_dim"] | None
    q_norm: Float[Array, "layers head_dim"] | None
    k_norm: Float[Array, "layers head_dim"] | None

    def __init__(self, config: Glm4MoeConfig, layers: int, *, routed: bool, key: PRNGKeyArray):
        c, make = config, initial_stacks(layers, key, 14)
        q, kv, head = (c.heads, c.head_dim), (c.kv_heads, c.head_dim), (layers, c.head_dim)
        self.wq = make(c.width, c.width, *q)
        self.wk, self.wv = make(c.width, c.width, *kv), make(c.width, c.width, *kv)
        self.wo = make(c.heads * c.head_dim, *q, c.width, scale=output_scale(c.layers))
        self.bq = zeros((layers, *q), when=c.qkv_bias)
        self.bk, self.bv = (zeros((layers, *kv), when=c.qkv_bias) for _ in range(2))
        self.q_norm, self.k_norm = ones(head, when=c.qk_norm), ones(head, when=c.qk_norm)
        super().__init__(c, layers, routed=routed, make=make)


class Glm4Moe(SharedExpertsDecoder):
    """The decoder of GLM-4.5 and 4.6 (GLM-4.5 Team, 2025, <https://arxiv.org/abs/2508.06471>).

    The correction of the routers is not trained by gradients, and the layers that predict further
    tokens are not implemented.

    ```python
    config = Glm4MoeConfig(
        vocab=256, width=128, layers=4, heads=4, kv_heads=2, hidden=352, expert_hidden=64,
        experts=8, chosen=2, rotary_dim=16,
    )
    model = Glm4Moe(config, key=jax.random.key(0))
    logits = model(jnp.zeros((8, 64), jnp.int32))  # (8, 64, 256)
    ```
    """

    config: Glm4MoeConfig = eqx.field(static=True)
    _layers_of: ClassVar = Glm4MoeLayers

    def __init__(self, config: Glm4MoeConfig, *, key: PRNGKeyArray):
        """Initialises the parameters: normal with variance 1 / fan-in, truncated at three standard
        deviations. The output projections of the layers are divided by sqrt(2 * layers)."""
        super().__init__(config, key=key)

    @staticmethod
    def _attention(layer, x, angles, visible, cache, index, key, config):
        c = config
        q = queries(layer, x)  # (batch, seq, heads, head_dim)
        k, v = keys_values(layer, x)  # (batch, seq, kv_heads, head_dim)
        if c.qk_norm:
            q, k = rms_norm(q, layer.q_norm, c.norm_eps), rms_norm(k, layer.k_norm, c.norm_eps)
        q, k = rotate(q, angles), rotate(k, angles)
        cache, k, v = extend(cache, index, k, v)
        # (batch, seq, heads, head_dim)
        out = attend(q, k, v, visible=visible, rate=c.attention_dropout, key=key)
        return product("bshk,hkd->bsd", out, layer.wo), cache
