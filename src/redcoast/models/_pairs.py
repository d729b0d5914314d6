"""The common parts of CLIP and SigLIP, which compare images with texts."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from equinox import AbstractVar
from jaxtyping import Array, Float, PRNGKeyArray

from ._attention import AllReal, Real, Visible, full_view, real_tokens
from ._base_config import ImageSizes, LayersConfig, TextConfig, TokenSizes, check_config
from ._basic import look_up, small_normal, split_key, wide
from ._check_config import check_length
from ._check_tokens import check_floats, check_tokens
from ._encoder import EncoderLayers, pre_norm_layers
from ._inputs import Images, Key, Mask, Texts
from ._patches import embed_patches


@dataclass(frozen=True)
class PairImageConfig(ImageSizes, LayersConfig):
    """The configuration of an image encoder, whose fields `SiglipImageConfig` describes."""

    image: int = 224
    patch: int = 16
    channels: int = 3
    activation: str = "gelu_pytorch_tanh"
    norm_eps: int | float = 1e-6
    attention_dropout: int | float = 0.0

    dropout = 0.0  # of the residual stream

    def __post_init__(self):
        check_config(self, "image", "patch", "channels")
        if self.image < self.patch:
            raise ValueError(
                f"`image` must be at least `patch`, but {self.image} is less than {self.patch}."
            )


@dataclass(frozen=True)
class PairTextConfig(TokenSizes, TextConfig):
    """The configuration of a text encoder, whose fields `SiglipTextConfig` describes."""

    positions: int = 64
    activation: str = "gelu_pytorch_tanh"
    norm_eps: int | float = 1e-6
    attention_dropout: int | float = 0.0

    dropout = 0.0  # of the residual stream

    def __post_init__(self):
        check_config(self, "positions")


class PairEncoder(eqx.Module):
    """The positions, the layers and the final norm of an encoder. A family adds its inputs and its
    outputs."""

    position_embed: Float[Array, "positions width"]
    layers: EncoderLayers
    norm: Float[Array, " width"]
    norm_shift: Float[Array, " width"]

    def __init__(self, config: Any, positions: int, *, key: PRNGKeyArray, of_layers: PRNGKeyArray):
        self.position_embed = small_normal(key, (positions, config.width))
        self.layers = EncoderLayers(config, key=of_layers)
        self.norm, self.norm_shift = jnp.ones(config.width), jnp.zeros(config.width)


class ImageTextPair(eqx.Module):
    """An encoder of images and one of texts, whose outputs are compared by their angles."""

    image: AbstractVar[Any]
    text: AbstractVar[Any]
    logit_scale: AbstractVar[Float[Array, "1"]]
    config: AbstractVar[Any]

    @abstractmethod
    def _embed_images(self, pixels: Images) -> Float[Array, "images positions features"]:
        """Returns the inputs of the layers of the image encoder."""

    @abstractmethod
    def _see(self, real: Real) -> Visible:
        """Returns which tokens each token of a text sees."""

    @abstractmethod
    def _image_outputs(
        self, hidden: Float[Array, "images positions width"]
    ) -> Float[Array, "images outputs"]:
        """Returns the outputs of images, of which these are the hidden states."""

    @abstractmethod
    def _text_outputs(
        self, hidden: Float[Array, "texts seq width"], tokens: Texts
    ) -> Float[Array, "texts outputs"]:
        """Returns the outputs of texts, of which these are the hidden states."""

    def encode_images(self, pixels: Images, *, key: Key = None) -> Float[Array, "images outputs"]:
        """Returns the outputs for images, before they are normalised."""
        return self._image_outputs(self.hidden_of_images(pixels, key=key))

    def encode_texts(
        self, tokens: Texts, *, mask: Mask | None = None, key: Key = None
    ) -> Float[Array, "texts outputs"]:
        """Returns the outputs for texts, before they are normalised."""
        return self._text_outputs(self.hidden_of_texts(tokens, mask=mask, key=key), tokens)

    def hidden_of_images(
        self, pixels: Images, *, key: Key = None
    ) -> Float[Array, "images positions features"]:
        """Returns the hidden states of the class token, if there is one, and of the patches, row by
        row, after the final norm."""
        x = self._embed_images(pixels)  # (images, positions, width)
        visible = full_view(AllReal(x.shape[1]))
        return pre_norm_layers(self.image, x, visible, self.config.image, key)

    def hidden_of_texts(
        self, tokens: Texts, *, mask: Mask | None = None, key: Key = None
    ) -> Float[Array, "texts seq width"]:
        """Returns the hidden states of tokens after the final norm."""
        c, part = self.config.text, self.text
        check_tokens(tokens, c.vocab, mask=mask)
        check_length(c, tokens.shape[1])
        x = look_up(part.embed, tokens) + part.position_embed[None, : tokens.shape[1]]
        return pre_norm_layers(part, x, self._see(real_tokens(tokens.shape, mask)), c, key)

    def _scaled_cosines(self, pixels, tokens, mask, key):
        image_key, text_key = split_key(key, 2)
        images = of_length_one(self.encode_images(pixels, key=image_key))  # (images, outputs)
        texts = of_length_one(self.encode_texts(tokens, mask=mask, key=text_key))
        # The scale is learned as a logarithm, so that it stays positive.
        return jnp.einsum("id,td->it", images, texts) * jnp.exp(self.logit_scale)[None]


def embed_square(
    config: PairImageConfig,
    pixels: Images,
    kernel: Float[Array, "channels rows columns features"],
    bias: Float[Array, " features"] | None,
) -> Float[Array, "images patches features"]:
    """Returns the embeddings of the whole patches of images of the size of the configuration."""
    c = config
    check_floats("pixels", pixels, ("images", "channels", "height", "width"))
    if pixels.shape[1:] != (c.channels, c.image, c.image):
        raise ValueError(
            f"The images have shape {pixels.shape[1:]}, but the model takes "
            f"{(c.channels, c.image, c.image)}: channels, height and width. Resize them."
        )
    side = c.image // c.patch * c.patch  # without a part of a patch
    return embed_patches(pixels[..., :side, :side], kernel, bias)


def of_length_one(x: Float[Array, "rows outputs"]) -> Float[Array, "rows outputs"]:
    """Divides each row by its Euclidean length."""
    # Squares of float16 may overflow.
    y = x.astype(wide(x.dtype))
    return (y / jnp.linalg.norm(y, axis=-1, keepdims=True)).astype(x.dtype)
