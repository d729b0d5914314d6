"""The sizes of ViT."""

from dataclasses import dataclass
from typing import Any, Literal

from .._activations import check_activation
from .._checks import check_config, check_heads, check_rates
from .._heads import check_labels
from .._layers import Remat
from .._published import vit as published


@dataclass(frozen=True)
class ViTConfig:
    """The sizes of a `ViT`.

    **Arguments:**

    - `width`, `layers`, `heads`: the size of the residual stream, and how many layers and heads
      there are.
    - `hidden`: the hidden size of the feed-forward network, usually four times the width.
    - `image`, `patch`: the height and width of images and of their patches, in pixels.
    - `channels`: of a pixel.
    - `head`: what a call returns. Hidden states, without one; with `"classification"`, logits of
      an image's labels, or with one label what regression predicts.
    - `labels`, `label_names`: of classification.
    - `pooler`: whether there is a pooler, in a model without a head, and the size of what it
      returns, the width by default: `pooler_size`.
    - `activation`: of the feed-forward network, by its name in `config.json` files.
    - `norm_eps`: what the norms add to the variance.
    - `qkv_bias`: whether Q, K and V have biases.
    - `dropout`, `attention_dropout`: the rates at which are dropped: the embeddings and what is
      added to the residual stream; attention weights.
    - `remat`: what is computed again in the backward pass, to save memory: `"none"`, `"dots"`
      (everything but the products with weights) or `"full"` (everything in a layer).

    **Raises:**

    `ValueError` if the sizes do not fit together.
    """

    width: int
    layers: int
    heads: int
    hidden: int
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
    remat: Remat = "none"

    def __post_init__(self):
        check_config(self, "width", "layers", "heads", "hidden", "channels")
        check_heads(self)
        check_activation(self.activation)
        check_labels(self)
        check_rates(self, "dropout", "attention_dropout")
        pairs = zip(self.image, self.patch, strict=True)
        if min(*self.patch, *self.image) < 1 or any(image % patch for image, patch in pairs):
            raise ValueError(
                f"`image` must be a multiple of `patch`, but {self.image} is no multiple of "
                f"{self.patch}."
            )

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def grid(self) -> tuple[int, int]:
        """How many patches there are along the height and the width."""
        return self.image[0] // self.patch[0], self.image[1] // self.patch[1]

    @classmethod
    def from_hugging_face(cls, settings: dict[str, Any]) -> "ViTConfig":
        """The configuration that a parsed `config.json` says; a `ValueError` names every setting
        that is not known and might change the results."""
        return cls(**published.read(settings))

    def to_hugging_face(self) -> dict[str, Any]:
        """The settings of a `config.json` for this configuration."""
        return published.write(self)
