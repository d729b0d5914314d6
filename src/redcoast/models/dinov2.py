"""The DINOv2 encoder: ViT with a learned scale of each sublayer's output, optional registers and
gated layers, and positions that are resampled for images of any size."""

from dataclasses import dataclass
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from ._base_config import HeadSizes, LayersConfig, check_config
from ._basic import dropout, small_normal, split_key
from ._check_config import check_patches
from ._heads import Linear
from ._patches import PatchEncoder, resample


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

    head: Linear | None
    config: Dinov2Config = eqx.field(static=True)

    def __init__(self, config: Dinov2Config, *, key: PRNGKeyArray):
        """Initialises the parameters: weights normal with standard deviation 0.02, truncated at
        three standard deviations; biases and the mask token 0, and norm scales 1."""
        c = config
        *keys, positions, layers, head = jax.random.split(key, 6)
        biases = "qkv" * c.qkv_bias + "o"
        super().__init__(c, (*keys, layers), biases=biases, mlp_bias=True, mask=c.mask_token)
        self.position_embed = small_normal(positions, (1 + (c.image // c.patch) ** 2, c.width))
        self.head = None
        if c.head is not None:
            self.head = Linear(2 * c.width, c.labels, key=head)

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
        table: Any = self.position_embed  # (tokens, width)
        filtered = c.registers > 0
        grid = pixels.shape[2] // c.patch, pixels.shape[3] // c.patch
        positions = resample(table[1:], c.image // c.patch, grid, filtered=filtered)
        # The registers have no positions.
        x = self._with_first(x + positions[None], self.cls_token + table[0])
        return self._apply_layers(dropout(x, c.dropout, embed_key), after, key, gate="silu")
