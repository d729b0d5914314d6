"""The DINOv2 encoder: ViT with a learned scale of each sublayer's output, optional registers and
gated layers, and positions that are resampled for images of any size."""

from dataclasses import dataclass
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from ._attention import attend, full_view
from ._basic import activate_gated, layer_norm, small_normal
from ._check_config import check_config, check_heads, check_patches
from ._dropout import dropout, split_key
from ._einsum import feed_forward, keys_values, outputs, product, queries
from ._heads import Linear, check_labels
from ._patches import add_scaled
from ._resample import resample
from ._scan_layers import Remat, scan_layers


@dataclass(frozen=True)
class Dinov2Config:
    """The configuration of a `Dinov2`.

    **Arguments:**

    - `width`, `layers`, `heads`: the size of the residual stream, the number of layers and the
      number of heads.
    - `mlp_ratio`: the hidden size of the feed-forward network, as a multiple of `width`. With
      `gated` it is two thirds of that, rounded up to a multiple of 8.
    - `image`, `patch`: the height and width of the images that the table of positions is for, and
      of patches, in pixels.
    - `channels`: the number of channels of an image.
    - `registers`: the number of register tokens.
    - `mask_token`: whether there is a token for patches that are masked. With registers there
      always is one.
    - `gated`: whether the feed-forward network is a SwiGLU; then `activation` is not used.
    - `head`: decides what a call returns. `None`: the hidden states. `"classification"`: the logits
      of the labels of each image; with one label, the prediction of a regression.
    - `labels`, `label_names`: the number of labels of a classification head, and their names.
    - `activation`: the activation function of the feed-forward network, by its name in
      `config.json` files.
    - `norm_eps`: added to the variance in layer norms.
    - `qkv_bias`: whether Q, K and V have biases.
    - `layer_scale`: the initial scale of the outputs of sublayers.
    - `dropout`, `attention_dropout`, `path_dropout`: the dropout rates of the embeddings, of the
      attention weights, and of all that a sublayer adds to an image (stochastic depth).
    - `remat`: what to rematerialise: `"none"`, `"dots"` (not products with weights) or `"full"`.
    - `unroll`: how many layers one iteration of the loop over the layers runs; by default all of
      them on a CPU, if they are at most four, and otherwise one.

    **Raises:**

    `ValueError` if a value is out of range or conflicts with another; `TypeError` if a size is not
    an integer.
    """

    width: int
    layers: int
    heads: int
    mlp_ratio: int = 4
    image: int = 518
    patch: int = 14
    channels: int = 3
    registers: int = 0
    mask_token: bool = True
    gated: bool = False
    head: Literal["classification"] | None = None
    labels: int = 2
    label_names: tuple[str, ...] | None = None
    activation: str = "gelu"
    norm_eps: int | float = 1e-6
    qkv_bias: bool = True
    layer_scale: int | float = 1.0
    dropout: int | float = 0.0
    attention_dropout: int | float = 0.0
    path_dropout: int | float = 0.0
    remat: Remat = "none"
    unroll: int | None = None

    from ._methods import head_dim

    def __post_init__(self):
        sizes = ("width", "layers", "heads", "mlp_ratio", "image", "patch", "channels")
        check_config(self, *sizes)
        check_heads(self)
        check_labels(self)
        check_patches(self)
        if self.registers < 0 or (self.registers and not self.mask_token):
            raise ValueError(
                f"`registers` must not be negative, and need a `mask_token`, but there are "
                f"{self.registers} and `mask_token` is {self.mask_token}."
            )

    @property
    def hidden(self) -> int:
        """The hidden size of the feed-forward network."""
        whole = self.width * self.mlp_ratio
        return -(-(2 * whole // 3) // 8) * 8 if self.gated else whole


class Dinov2Layers(eqx.Module):
    """The parameters of all layers, stacked along their first dimension."""

    attention_norm: Float[Array, "layers width"]
    attention_norm_shift: Float[Array, "layers width"]
    wq: Float[Array, "layers width heads head_dim"]
    wk: Float[Array, "layers width heads head_dim"]
    wv: Float[Array, "layers width heads head_dim"]
    wo: Float[Array, "layers heads head_dim width"]
    bq: Float[Array, "layers heads head_dim"] | None
    bk: Float[Array, "layers heads head_dim"] | None
    bv: Float[Array, "layers heads head_dim"] | None
    bo: Float[Array, "layers width"]
    attention_scale: Float[Array, "layers width"]
    mlp_norm: Float[Array, "layers width"]
    mlp_norm_shift: Float[Array, "layers width"]
    gate: Float[Array, "layers width hidden"] | None
    gate_bias: Float[Array, "layers hidden"] | None
    up: Float[Array, "layers width hidden"]
    up_bias: Float[Array, "layers hidden"]
    down: Float[Array, "layers hidden width"]
    down_bias: Float[Array, "layers width"]
    mlp_scale: Float[Array, "layers width"]

    def __init__(self, config: Dinov2Config, *, key: PRNGKeyArray):
        c = config
        wq, wk, wv, wo, gate, up, down = jax.random.split(key, 7)
        stream, head = (c.layers, c.width), (c.heads, c.head_dim)
        into, features = (*stream, c.hidden), (c.layers, c.hidden)
        self.attention_norm, self.attention_norm_shift = jnp.ones(stream), jnp.zeros(stream)
        self.wq, self.wk, self.wv = (small_normal(k, (*stream, *head)) for k in (wq, wk, wv))
        self.wo = small_normal(wo, (c.layers, *head, c.width))
        biases = (jnp.zeros((c.layers, *head)) if c.qkv_bias else None for _ in range(3))
        self.bq, self.bk, self.bv = biases
        self.bo = jnp.zeros(stream)
        self.attention_scale, self.mlp_scale = (jnp.full(stream, c.layer_scale, float),) * 2
        self.mlp_norm, self.mlp_norm_shift = jnp.ones(stream), jnp.zeros(stream)
        self.gate = small_normal(gate, into) if c.gated else None
        self.gate_bias = jnp.zeros(features) if c.gated else None
        self.up, self.up_bias = small_normal(up, into), jnp.zeros(features)
        self.down = small_normal(down, (c.layers, c.hidden, c.width))
        self.down_bias = jnp.zeros(stream)


class Dinov2(eqx.Module):
    """The DINOv2 encoder (Oquab et al., 2023, <https://arxiv.org/abs/2304.07193>), also with
    registers (Darcet et al., 2023, <https://arxiv.org/abs/2309.16588>).

    ```python
    config = Dinov2Config(width=128, layers=4, heads=4, image=32, patch=8)
    model = Dinov2(config, key=jax.random.key(0))
    hidden = model(jnp.zeros((8, 3, 32, 32)))  # (8, 17, 128)
    maps = model.features(jnp.zeros((8, 3, 48, 32)), [2, 4])  # two of (8, 6, 4, 128)
    ```
    """

    patch_embed: Float[Array, "channels rows columns width"]
    patch_bias: Float[Array, " width"]
    cls_token: Float[Array, " width"]
    mask_token: Float[Array, " width"] | None
    register_tokens: Float[Array, "registers width"] | None
    position_embed: Float[Array, "tokens width"]
    layers: Dinov2Layers
    norm: Float[Array, " width"]
    norm_shift: Float[Array, " width"]
    head: Linear | None
    config: Dinov2Config = eqx.field(static=True)

    from ._patches import features

    def __init__(self, config: Dinov2Config, *, key: PRNGKeyArray):
        """Initialises the parameters: weights normal with standard deviation 0.02, truncated at
        three standard deviations; biases and the mask token 0, and norm scales 1."""
        c = config
        keys = jax.random.split(key, 6)
        self.patch_embed = small_normal(keys[0], (c.channels, c.patch, c.patch, c.width))
        self.patch_bias = jnp.zeros(c.width)
        self.cls_token = small_normal(keys[1], (c.width,))
        self.mask_token = jnp.zeros(c.width) if c.mask_token else None
        registers = (c.registers, c.width)
        self.register_tokens = small_normal(keys[2], registers) if c.registers else None
        self.position_embed = small_normal(keys[3], (1 + (c.image // c.patch) ** 2, c.width))
        self.layers = Dinov2Layers(c, key=keys[4])
        self.norm, self.norm_shift = jnp.ones(c.width), jnp.zeros(c.width)
        self.head = Linear(2 * c.width, c.labels, key=keys[5]) if c.head else None
        self.config = config

    def __call__(
        self,
        pixels: Float[Array, "batch channels height width"],
        *,
        mask: None = None,
        masked: Bool[Array, "batch patches"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "batch ..."]:
        """Returns the logits of images, of shape (batch, labels).

        Without a head, returns the hidden states, of shape (batch, tokens, width): first that of
        the class token, then those of the registers, then those of the patches, row by row.

        **Arguments:**

        - `pixels`: images with the channels first, normalised in the same way as those that the
          weights were trained on. Their height and width are any multiples of the patch size.
        - `mask`: must be None, since images have no padding.
        - `masked`: which patches are replaced by the mask token, row by row.
        - `key`: PRNG key for dropout. Without it, dropout is disabled.

        **Raises:**

        `ValueError` if the images have other channels than the configuration, or no whole number of
        patches.
        """
        hidden = self.hidden(pixels, mask=mask, masked=masked, key=key)
        if self.head is None:
            return hidden
        mean = jnp.mean(hidden[:, 1 + self.config.registers :], axis=1)
        return self.head(jnp.concatenate([hidden[:, 0], mean], axis=1))

    def hidden(
        self,
        pixels: Float[Array, "batch channels height width"],
        *,
        mask: None = None,
        masked: Bool[Array, "batch patches"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "batch tokens features"]:
        """Returns the hidden states after the final norm, for any head.

        The arguments are those of `__call__`.
        """
        return self._norm(self._run(pixels, masked, (), key)[0])

    def _norm(self, x: Float[Array, "batch tokens width"]) -> Float[Array, "batch tokens width"]:
        return layer_norm(x, self.norm, self.norm_shift, self.config.norm_eps)

    def _run(self, pixels: Array, masked: Any, wanted: tuple[int, ...], key: Any) -> Any:
        """The hidden states, and those after so many layers."""
        c = self.config
        embed_key, key = split_key(key, 2)
        x = dropout(self._embed(pixels, masked), c.dropout, embed_key)
        visible = full_view(np.ones((1, x.shape[1]), bool))

        def layer_fn(x, maps, layer, index, key):
            keys = split_key(key, 3)
            y = layer_norm(x, layer.attention_norm, layer.attention_norm_shift, c.norm_eps)
            q, (k, v) = queries(layer, y), keys_values(layer, y)
            y = attend(q, k, v, visible=visible, rate=c.attention_dropout, key=keys[0])
            x = add_scaled(x, outputs(layer, y), layer.attention_scale, c, keys[1])
            y = layer_norm(x, layer.mlp_norm, layer.mlp_norm_shift, c.norm_eps)
            x = add_scaled(x, _mlp(layer, y, c), layer.mlp_scale, c, keys[2])
            found = zip(wanted, maps, strict=True)
            return x, tuple(jnp.where(index + 1 == n, x, before) for n, before in found)

        options: Any = {"key": key, "remat": c.remat, "unroll": c.unroll}
        return scan_layers(layer_fn, x, self.layers, cache=(x,) * len(wanted), **options)

    def _embed(self, pixels: Array, masked: Any) -> Float[Array, "batch tokens width"]:
        c = self.config
        if pixels.shape[1] != c.channels or any(size % c.patch for size in pixels.shape[2:]):
            raise ValueError(
                f"The images have shape {pixels.shape[1:]}, but the model takes {c.channels} "
                f"channels, and a height and a width that are multiples of {c.patch}. Resize them."
            )
        rows, columns = (size // c.patch for size in pixels.shape[2:])
        # A product over patches, not a convolution, so that every dimension can be sharded.
        x = pixels.astype(self.patch_embed.dtype)
        x = x.reshape(-1, c.channels, rows, c.patch, columns, c.patch)
        x = product("bcrpsq,cpqd->brsd", x, self.patch_embed, self.patch_bias)
        x = x.reshape(-1, rows * columns, c.width)
        if masked is not None:
            x = self._replace(x, masked)
        # The versions with registers were trained with a filter that avoids aliasing.
        table, filtered = self.position_embed, c.registers > 0
        positions = resample(table[1:], c.image // c.patch, (rows, columns), filtered=filtered)
        first = (self.cls_token + table[0])[None]
        rest = [] if self.register_tokens is None else [self.register_tokens]
        first = jnp.concatenate([first, *rest])
        first = jnp.broadcast_to(first[None], (x.shape[0], *first.shape))
        return jnp.concatenate([first, x + positions[None]], axis=1)

    def _replace(self, x: Array, masked: Any) -> Array:
        if self.mask_token is None:
            raise ValueError(
                "`masked` needs a mask token, but the configuration has `mask_token=False`."
            )
        return jnp.where(masked.astype(bool)[:, :, None], self.mask_token[None, None], x)


def _mlp(layer, x, config):
    if layer.gate is None:
        return feed_forward(layer, x, config.activation)
    gate = product("bsd,dh->bsh", x, layer.gate, layer.gate_bias)
    up = product("bsd,dh->bsh", x, layer.up, layer.up_bias)
    return product("bsh,hd->bsd", activate_gated("silu", gate, up), layer.down, layer.down_bias)
