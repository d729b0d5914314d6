"""The Vision Transformer: an encoder whose tokens are the patches of an image."""

from dataclasses import dataclass
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ._attention import full_view
from ._base_config import ImageSizes, LayersConfig, check_config
from ._basic import dropout, small_normal, split_key
from ._check_config import check_patches
from ._check_tokens import check_floats, refuse_mask
from ._encoder import EncoderLayers, pre_norm_layers
from ._heads import Linear
from ._inputs import Key, Pixels
from ._patches import embed_patches


@dataclass(frozen=True)
class ViTConfig(ImageSizes, LayersConfig):
    """The configuration of a `ViT`.

    **Arguments:**

    - `width`, `layers`, `heads`: the size of the residual stream, the number of layers and the
      number of heads.
    - `hidden`: the hidden size of the feed-forward network, usually `4 * width`.
    - `image`, `patch`: the (height, width) of images and of patches, in pixels.
    - `channels`: the number of channels of an image.
    - `head`: determines what a call returns. `None`: the hidden states. `"classification"`: the
      logits of the labels of each image; with one label, the prediction of a regression.
    - `labels`, `label_names`: the number of labels of a classification head, and their names.
    - `pooler`, `pooler_size`: whether a model without a head has a pooler, and the size of its
      output (`width` by default).
    - `activation`: the activation function of the feed-forward network, by its name in
      `config.json` files.
    - `norm_eps`: added to the variance in layer norms.
    - `qkv_bias`: whether Q, K and V have biases.
    - `dropout`, `attention_dropout`: the dropout rates of the embeddings and the outputs that are
      added to the residual stream, and of the attention weights.
    - `remat`, `unroll`: as in [`LlamaConfig`][redcoast.models.LlamaConfig].
    """

    image: tuple[int, int] = (224, 224)
    patch: tuple[int, int] = (16, 16)
    channels: int = 3
    head: Literal["classification"] | None = None
    labels: int = 2
    label_names: tuple[str, ...] | None = None
    pooler: bool = False
    pooler_size: int | None = None
    activation: str = "gelu"
    norm_eps: int | float = 1e-12
    qkv_bias: bool = True
    dropout: int | float = 0.0
    attention_dropout: int | float = 0.0

    def __post_init__(self):
        check_config(self, "channels")
        check_patches(self.image, self.patch)

    @property
    def grid(self) -> tuple[int, int]:
        """The number of patches along the height and along the width."""
        return self.image[0] // self.patch[0], self.image[1] // self.patch[1]


class ViT(eqx.Module):
    """The Vision Transformer (Dosovitskiy et al., 2020, <https://arxiv.org/abs/2010.11929>).

    ```python
    config = ViTConfig(width=128, layers=4, heads=4, hidden=512, image=(32, 32), patch=(8, 8))
    model = ViT(config, key=jax.random.key(0))
    hidden = model(jnp.zeros((8, 3, 32, 32)))  # (8, 17, 128)
    ```
    """

    patch_embed: Float[Array, "channels rows columns width"]
    patch_bias: Float[Array, " width"]
    cls_token: Float[Array, " width"]
    position_embed: Float[Array, "tokens width"]
    layers: EncoderLayers
    norm: Float[Array, " width"]
    norm_shift: Float[Array, " width"]
    pooler: Linear | None
    head: Linear | None
    config: ViTConfig = eqx.field(static=True)

    def __init__(self, config: ViTConfig, *, key: PRNGKeyArray):
        """Initialises the parameters: weights normal with standard deviation 0.02, truncated at
        three standard deviations; biases 0 and norm scales 1."""
        c = config
        keys = jax.random.split(key, 6)
        self.patch_embed = small_normal(keys[0], (c.channels, *c.patch, c.width))
        self.patch_bias = jnp.zeros(c.width)
        self.cls_token = small_normal(keys[1], (c.width,))
        self.position_embed = small_normal(keys[2], (1 + c.grid[0] * c.grid[1], c.width))
        self.layers = EncoderLayers(c, qkv_bias=c.qkv_bias, key=keys[3])
        self.norm, self.norm_shift = jnp.ones(c.width), jnp.zeros(c.width)
        self.pooler = self.head = None
        if c.head is not None:
            self.head = Linear(c.width, c.labels, key=keys[5])
        elif c.pooler:
            self.pooler = Linear(c.width, c.pooler_size or c.width, key=keys[4])
        self.config = config

    def __call__(
        self, pixels: Pixels, *, mask: None = None, key: Key = None
    ) -> Float[Array, "batch ..."]:
        """Returns the logits of images, of shape (batch, labels).

        Without a head, returns the hidden states, of shape (batch, tokens, width): the class token
        first, then the patches, row by row.

        **Arguments:**

        - `pixels`: images with the channels first, normalised in the same way as in training (often
          to the range from -1 to 1).
        - `mask`: must be None, since images have no padding.
        - `key`: PRNG key for dropout. Without it, dropout is disabled.

        **Raises:**

        `ValueError` if the images do not have the size of the configuration.
        """
        hidden = self.hidden(pixels, mask=mask, key=key)  # (batch, tokens, width)
        if self.head is None:
            return hidden
        return self.head(hidden[:, 0])

    def hidden(
        self, pixels: Pixels, *, mask: None = None, key: Key = None
    ) -> Float[Array, "batch tokens features"]:
        """Returns the hidden states after the final norm, for any head. The arguments are those of
        `__call__`."""
        c = self.config
        refuse_mask(mask)
        check_floats("pixels", pixels, ("batch", "channels", "height", "width"))
        if pixels.shape[1:] != (c.channels, *c.image):
            raise ValueError(
                f"The images have shape {pixels.shape[1:]}, but the model takes "
                f"{(c.channels, *c.image)}: channels, height and width. Resize them."
            )
        embed_key, key = split_key(key, 2)
        x = embed_patches(pixels, self.patch_embed, self.patch_bias)  # (batch, patches, width)
        first = jnp.broadcast_to(self.cls_token, (x.shape[0], 1, c.width))
        x = jnp.concatenate([first, x], axis=1) + self.position_embed[None]
        x = dropout(x, c.dropout, embed_key)
        return pre_norm_layers(self, x, full_view(jnp.ones((1, x.shape[1]), bool)), c, key)

    def pool(self, hidden: Float[Array, "batch tokens width"]) -> Float[Array, "batch pooled"]:
        """Applies the pooler to the hidden state of the class token."""
        if self.pooler is None:
            raise ValueError(
                "This model has no pooler: its configuration has `pooler=False`, or a head."
            )
        return jnp.tanh(self.pooler(hidden[:, 0]))
