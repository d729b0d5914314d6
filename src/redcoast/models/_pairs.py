"""The common parts of CLIP and SigLIP, which compare images with texts."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from ._attention import wide
from ._check_config import HeadSizes, check_config, check_heads
from ._patches import embed_patches
from ._scan_layers import Remat


@dataclass(frozen=True)
class PairImageConfig(HeadSizes):
    """The configuration of an image encoder, whose fields `SiglipImageConfig` describes."""

    width: int
    layers: int
    heads: int
    hidden: int
    image: int = 224
    patch: int = 16
    channels: int = 3
    activation: str = "gelu_pytorch_tanh"
    norm_eps: int | float = 1e-6
    attention_dropout: int | float = 0.0
    remat: Remat = "none"
    unroll: int | None = None

    dropout = 0.0  # of the residual stream

    def __post_init__(self):
        check_config(self, "image", "patch", "channels")
        check_heads(self)
        if self.image < self.patch:
            raise ValueError(
                f"`image` must be at least `patch`, but {self.image} is less than {self.patch}."
            )


def embed_square(
    config: PairImageConfig,
    pixels: Float[Array, "images channels height width"],
    kernel: Float[Array, "channels rows columns features"],
    bias: Float[Array, " features"] | None,
) -> Float[Array, "images patches features"]:
    """Returns the embeddings of the whole patches of images of the size of the configuration."""
    c = config
    if pixels.shape[1:] != (c.channels, c.image, c.image):
        raise ValueError(
            f"The images have shape {pixels.shape[1:]}, but the model takes "
            f"{(c.channels, c.image, c.image)}: channels, height and width. Resize them."
        )
    side = c.image // c.patch * c.patch
    return embed_patches(pixels[..., :side, :side], kernel, bias)


def of_length_one(x: Float[Array, "rows outputs"]) -> Float[Array, "rows outputs"]:
    """Divides each row by its Euclidean length."""
    y = x.astype(wide(x.dtype))
    return (y / jnp.linalg.norm(y, axis=-1, keepdims=True)).astype(x.dtype)
