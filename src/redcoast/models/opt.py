"""The OPT decoder: learned positions, ReLU and pre-layer-norm (OPT-350m: post-layer-norm)."""

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ._base_config import DecoderConfig, TokenSizes, check_config
from ._basic import dropout, layer_norm, look_up, ones, output_scale, split_key, zeros
from ._cache import extend
from ._decoder import Decoder, tied_or_own_head
from ._einsum import feed_forward, keys_values, product, queries
from ._encoder import EncoderLayers, attention_output
from ._inputs import HiddenStates
from ._scan_layers import scan_layers


@dataclass(frozen=True)
class OPTConfig(TokenSizes, DecoderConfig):
    """The configuration of an `OPT`.

    **Arguments:**

    - `vocab`, `width`, `layers`, `heads`, `hidden`, `positions`, `activation`, `tied`: as in
      [`GPT2Config`][redcoast.models.GPT2Config].
    - `embed_width`: the size of the embeddings, `width` by default. If it differs from `width`,
      embeddings are projected to `width` and back.
    - `post_norm`: whether the norms come after attention and the feed-forward network instead of
      before them.
    - `final_norm`: whether there is a norm after the last layer. Must be False with `post_norm`.
    - `bias`, `affine`: whether projections have biases, and whether norms have learned scales and
      shifts.
    - `dropout`, `attention_dropout`: the dropout rates of the outputs that are added to the
      residual stream, and of the attention weights.
    - `remat`, `unroll`, `eos`, `bos`, `pad`, `decoding`: as in
      [`LlamaConfig`][redcoast.models.LlamaConfig].
    """

    embed_width: int | None = None
    positions: int = 2048
    activation: str = "relu"
    post_norm: bool = False
    final_norm: bool = True
    bias: bool = True
    affine: bool = True
    tied: bool = True
    dropout: int | float = 0.1
    attention_dropout: int | float = 0.0

    def __post_init__(self):
        if self.embed_width is None:
            object.__setattr__(self, "embed_width", self.width)
        check_config(self, "embed_width", "positions")
        if self.post_norm and self.final_norm:
            raise ValueError(
                "With `post_norm=True` each layer already ends with a norm: set `final_norm=False`."
            )


# The first rows of OPT's table of positions are unused.
_OFFSET = 2


def _normal(key, shape, scale=1.0):
    return jax.random.normal(key, shape) * (0.006 * scale)


class OPT(Decoder):
    """The OPT decoder (Zhang et al., 2022, <https://arxiv.org/abs/2205.01068>).

    ```python
    config = OPTConfig(vocab=256, width=128, layers=4, heads=4, hidden=512, positions=64)
    model = OPT(config, key=jax.random.key(0))
    logits = model(jnp.zeros((8, 64), jnp.int32))  # (8, 64, 256)
    ```
    """

    embed: Float[Array, "vocab embed_width"]
    position_embed: Float[Array, "rows width"]
    project_in: Float[Array, "embed_width width"] | None
    layers: EncoderLayers
    norm: Float[Array, " width"] | None
    norm_shift: Float[Array, " width"] | None
    project_out: Float[Array, "width embed_width"] | None
    head: Float[Array, "embed_width vocab"] | None
    config: OPTConfig = eqx.field(static=True)

    def __init__(self, config: OPTConfig, *, key: PRNGKeyArray):
        """Initialises the parameters: normal with standard deviation 0.006. The output projections
        of the layers are divided by sqrt(2 * layers)."""
        c = config
        embed, positions, layers, into, out, head = jax.random.split(key, 6)
        self.embed = _normal(embed, (c.vocab, c.embed_width))
        self.position_embed = _normal(positions, (c.positions + _OFFSET, c.width))
        self.project_in = self.project_out = self.head = None
        if c.embed_width != c.width:
            self.project_in = _normal(into, (c.embed_width, c.width))
            self.project_out = _normal(out, (c.width, c.embed_width))
        options = {"bias": c.bias, "affine": c.affine, "out_scale": output_scale(c.layers)}
        self.layers = EncoderLayers(c, sample=_normal, key=layers, **options)
        self.norm = ones((c.width,), when=c.final_norm and c.affine)
        self.norm_shift = zeros((c.width,), when=c.final_norm and c.affine)
        if not c.tied:
            self.head = _normal(head, (c.embed_width, c.vocab))
        self.config = config

    def unembed(self, hidden: HiddenStates) -> Float[Array, "batch seq vocab"]:
        if self.project_out is not None:
            hidden = product("bsd,de->bse", hidden, self.project_out)  # (batch, seq, embed_width)
        return tied_or_own_head(hidden, self.embed, self.head)

    def _run(self, tokens, mask, positions, see, cache, key):
        c, visible = self.config, see()
        x = look_up(self.embed, tokens)  # (batch, seq, embed_width)
        if self.project_in is not None:
            x = product("bse,ed->bsd", x, self.project_in)  # (batch, seq, width)
        x = x + look_up(self.position_embed, positions + _OFFSET)

        def layer_fn(x, cache, layer, index, key):
            attention_key, mlp_key = split_key(key, 2)
            norms = (layer.attention_norm, layer.attention_norm_shift)
            y = _norm(x, *norms, when=not c.post_norm)  # (batch, seq, width)
            q = queries(layer, y)  # (batch, seq, heads, head_dim)
            cache, *kv = extend(cache, index, *keys_values(layer, y))
            y = attention_output(layer, q, kv, visible, c, attention_key)  # (batch, seq, width)
            x = _norm(x + y, *norms, when=c.post_norm)
            norms = (layer.mlp_norm, layer.mlp_norm_shift)
            y = feed_forward(layer, _norm(x, *norms, when=not c.post_norm), c.activation)
            y = dropout(y, c.dropout, mlp_key)
            return _norm(x + y, *norms, when=c.post_norm), cache

        x, cache = scan_layers(layer_fn, x, self.layers, cache=cache, key=key, **c.loop_options)
        return _norm(x, self.norm, self.norm_shift, when=c.final_norm), cache, None


def _norm(x, scale, shift, *, when):
    if not when:
        return x
    if scale is None:
        # Without `affine`, the norm only centres and scales.
        scale, shift = jnp.ones(x.shape[-1], x.dtype), jnp.zeros(x.shape[-1], x.dtype)
    return layer_norm(x, scale, shift, 1e-5)
