"""The DINOv2 encoder: ViT with a learned scale of each sublayer's output, optional registers and
gated layers, and positions that are resampled for images of any size."""

from dataclasses import dataclass
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ._base_config import HeadSizes, LayersConfig, check_config
from ._basic import dropout, small_normal, split_key, zeros
from ._check_config import check_patches
from ._heads import Linear
from ._patches import PatchEncoder, ScaledLayers, resample


@dataclass(frozen=True)
class Dinov2Config(LayersConfig, HeadSizes):
    """The configuration of a `Dinov2`.

    **Arguments:**

    - `width`, `layers`, `heads`, `channels`, `head`, `labels`, `label_names`, `activation`,
      `norm_eps`, `qkv_bias`: as in [`ViTConfig`][redcoast.models.ViTConfig].
    - `mlp_ratio`: the hidden size of the feed-forward network, as a multiple of `width`. With
      `gated`, two thirds of that, rounded up to a multiple of 8.
    - `image`, `patch`: the height and width of images for the table of positions, and of patches,
      in pixels.
    - `registers`: the number of register tokens.
    - `mask_token`: whether there is a token for masked patches. It is required with registers.
    - `gated`: whether the feed-forward network is a SwiGLU; then `activation` is not used.
    - `layer_scale`: the initial scale of the outputs of sublayers.
    - `dropout`, `attention_dropout`, `path_dropout`: the dropout rates of the embeddings, of the
      attention weights, and of the entire output of a sublayer for an image (stochastic depth).
    - `remat`, `unroll`: as in [`LlamaConfig`][redcoast.models.LlamaConfig].
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

    def __post_init__(self):
        check_config(self, "mlp_ratio", "image", "patch", "channels")
        check_patches(self.image, self.patch)
        if self.registers < 0 or (self.registers and not self.mask_token):
            raise ValueError(
                f"`registers` must not be negative, and need a `mask_token`, but there are "
                f"{self.registers} and `mask_token` is {self.mask_token}."
            )

    @property
    def hidden(self) -> int:
        """The hidden size of the feed-forward network."""
        hidden = self.width * self.mlp_ratio
        if self.gated:
            # A gated network has three matrices in place of two, so it is narrower for the same
            # size.
            hidden = -(-(2 * hidden // 3) // 8) * 8
        return hidden


class Dinov2(PatchEncoder):
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
    layers: ScaledLayers
    norm: Float[Array, " width"]
    norm_shift: Float[Array, " width"]
    head: Linear | None
    config: Dinov2Config = eqx.field(static=True)

    def __init__(self, config: Dinov2Config, *, key: PRNGKeyArray):
        """Initialises the parameters: weights normal with standard deviation 0.02, truncated at
        three standard deviations; biases and the mask token 0, and norm scales 1."""
        c = config
        keys = jax.random.split(key, 6)
        self.patch_embed = small_normal(keys[0], (c.channels, c.patch, c.patch, c.width))
        self.patch_bias = jnp.zeros(c.width)
        self.cls_token = small_normal(keys[1], (c.width,))
        self.mask_token = zeros((c.width,), when=c.mask_token)
        self.register_tokens = self.head = None
        if c.registers:
            self.register_tokens = small_normal(keys[2], (c.registers, c.width))
        self.position_embed = small_normal(keys[3], (1 + (c.image // c.patch) ** 2, c.width))
        biases = (c.qkv_bias, c.qkv_bias, c.qkv_bias, True, True)
        self.layers = ScaledLayers(c, biases=biases, key=keys[4])
        self.norm, self.norm_shift = jnp.ones(c.width), jnp.zeros(c.width)
        if c.head is not None:
            self.head = Linear(2 * c.width, c.labels, key=keys[5])
        self.config = config

    def _outputs(self, hidden):
        if self.head is None:
            return hidden
        # Of the patches, without the registers: (batch, width).
        mean = jnp.mean(hidden[:, 1 + self.config.registers :], axis=1)
        return self.head(jnp.concatenate([hidden[:, 0], mean], axis=1))

    def _run(self, pixels, masked, after, key):
        embed_key, key = split_key(key, 2)
        c = self.config
        x = self._embed(pixels, masked)  # (batch, patches, width)
        # The models with registers were trained with an antialiasing filter.
        table, filtered = self.position_embed, c.registers > 0
        grid = pixels.shape[2] // c.patch, pixels.shape[3] // c.patch
        positions = resample(table[1:], c.image // c.patch, grid, filtered=filtered)
        first = [(self.cls_token + table[0])[None]]  # the registers have no positions
        if self.register_tokens is not None:
            first.append(self.register_tokens)
        first = jnp.concatenate(first)  # (1 + registers, width)
        first = jnp.broadcast_to(first[None], (x.shape[0], *first.shape))
        x = jnp.concatenate([first, x + positions[None]], axis=1)  # (batch, tokens, width)
        return self._apply_layers(dropout(x, c.dropout, embed_key), after, key, gate="silu")
