"""The GPT-J decoder: attention and the feed-forward network in parallel after one shared norm, and
rotary embeddings of some features of each head."""

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ._attention import attend, wide
from ._basic import layer_norm, look_up, output_scale
from ._by_layer import StackedLayers
from ._cache import extend
from ._check_config import check_config, check_heads
from ._decoder import Decoder, DecoderConfig, TableHead
from ._dropout import dropout, split_key
from ._einsum import feed_forward, product
from ._rotary import rotary_angles, rotary_frequencies, rotate_pairs
from ._scan_layers import scan_layers


@dataclass(frozen=True)
class GPTJConfig(DecoderConfig):
    """The configuration of a `GPTJ`.

    **Arguments:**

    - `vocab`, `width`, `layers`, `heads`: the vocabulary size, the size of the residual stream, the
      number of layers and the number of heads.
    - `hidden`: the hidden size of the feed-forward network, usually `4 * width`.
    - `rotary_dim`: the number of features of each head that rotary embeddings rotate, an even
      number.
    - `activation`: the activation function of the feed-forward network, by its name in
      `config.json` files.
    - `norm_eps`: added to the variance in layer norms.
    - `tied`: whether the output head shares the weights of the embedding. It has a bias either way.
    - `embed_dropout`, `residual_dropout`, `attention_dropout`: the dropout rates of the embeddings,
      of the outputs that are added to the residual stream, and of the attention weights.
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
    rotary_dim: int = 64
    activation: str = "gelu_new"
    norm_eps: int | float = 1e-5
    tied: bool = False
    embed_dropout: int | float = 0.0
    residual_dropout: int | float = 0.0
    attention_dropout: int | float = 0.0
    context: int = 2048

    def __post_init__(self):
        check_config(self, "rotary_dim")
        check_heads(self)
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ValueError(
                f"`rotary_dim` must be even and at most the head size {self.head_dim}, but is "
                f"{self.rotary_dim}."
            )


class GPTJLayers(StackedLayers):
    """The parameters of all layers, stacked along their first dimension."""

    norm: Float[Array, "layers width"]
    norm_shift: Float[Array, "layers width"]
    wq: Float[Array, "layers width heads head_dim"]
    wk: Float[Array, "layers width heads head_dim"]
    wv: Float[Array, "layers width heads head_dim"]
    wo: Float[Array, "layers heads head_dim width"]
    up: Float[Array, "layers width hidden"]
    up_bias: Float[Array, "layers hidden"]
    down: Float[Array, "layers hidden width"]
    down_bias: Float[Array, "layers width"]

    def __init__(self, config: GPTJConfig, *, key: PRNGKeyArray):
        c = config
        wq, wk, wv, wo, up, down = jax.random.split(key, 6)
        scale = output_scale(c.layers)
        into = (c.layers, c.width, c.heads, c.head_dim)
        self.norm, self.norm_shift = jnp.ones(into[:2]), jnp.zeros(into[:2])
        self.wq, self.wk, self.wv = (_normal(k, into) for k in (wq, wk, wv))
        self.wo = _normal(wo, (c.layers, c.heads, c.head_dim, c.width), scale)
        self.up = _normal(up, (c.layers, c.width, c.hidden))
        self.up_bias = jnp.zeros((c.layers, c.hidden))
        self.down = _normal(down, (c.layers, c.hidden, c.width), scale)
        self.down_bias = jnp.zeros((c.layers, c.width))


def _normal(key, shape, scale=1.0):
    return jax.random.normal(key, shape) * (0.02 * scale)


class GPTJ(TableHead, Decoder):
    """The GPT-J decoder (Wang and Komatsuzaki, 2021,
    <https://github.com/kingoflolz/mesh-transformer-jax>).

    ```python
    config = GPTJConfig(vocab=256, width=128, layers=4, heads=4, hidden=512, rotary_dim=16)
    model = GPTJ(config, key=jax.random.key(0))
    logits = model(jnp.zeros((8, 64), jnp.int32))  # (8, 64, 256)
    ```
    """

    embed: Float[Array, "vocab width"]
    layers: GPTJLayers
    norm: Float[Array, " width"]
    norm_shift: Float[Array, " width"]
    head: Float[Array, "width vocab"] | None
    head_bias: Float[Array, " vocab"]
    config: GPTJConfig = eqx.field(static=True)

    def __init__(self, config: GPTJConfig, *, key: PRNGKeyArray):
        """Initialises the parameters: normal with standard deviation 0.02. The output projections
        of the layers are divided by sqrt(2 * layers)."""
        embed, layers, head = jax.random.split(key, 3)
        self.embed = _normal(embed, (config.vocab, config.width))
        self.layers = GPTJLayers(config, key=layers)
        self.norm, self.norm_shift = jnp.ones(config.width), jnp.zeros(config.width)
        self.head = None if config.tied else _normal(head, (config.width, config.vocab))
        self.head_bias = jnp.zeros(config.vocab)
        self.config = config

    def _run(self, tokens, mask, positions, see, cache, key):
        c, visible = self.config, see()
        embed_key, key = split_key(key, 2)
        x = dropout(look_up(self.embed, tokens), c.embed_dropout, embed_key)
        angles = rotary_angles(positions, rotary_frequencies(c.rotary_dim, 10000.0), wide(x.dtype))

        def layer_fn(x, cache, layer, index, key):
            attention_key, mlp_key = split_key(key, 2)
            weights_key, out_key = split_key(attention_key, 2)
            y = layer_norm(x, layer.norm, layer.norm_shift, c.norm_eps)
            q = rotate_pairs(product("bsd,dhk->bshk", y, layer.wq), angles)
            k = rotate_pairs(product("bsd,dhk->bshk", y, layer.wk), angles)
            cache, k, v = extend(cache, index, k, product("bsd,dhk->bshk", y, layer.wv))
            z = attend(q, k, v, visible=visible, rate=c.attention_dropout, key=weights_key)
            z = dropout(product("bshk,hkd->bsd", z, layer.wo), c.residual_dropout, out_key)
            y = dropout(feed_forward(layer, y, c.activation), c.residual_dropout, mlp_key)
            return x + z + y, cache

        x, cache = scan_layers(
            layer_fn, x, self.layers, cache=cache, key=key, remat=c.remat, unroll=c.unroll
        )
        return layer_norm(x, self.norm, self.norm_shift, c.norm_eps), cache, None
