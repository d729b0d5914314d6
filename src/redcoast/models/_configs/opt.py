"""The sizes of OPT."""

from dataclasses import dataclass
from typing import Any

from .._activations import check_activation
from .._checks import check_config, check_heads, check_rates
from .._layers import Remat
from .._published import opt as published


@dataclass(frozen=True)
class OPTConfig:
    """The sizes of an `OPT`.

    **Arguments:**

    - `vocab`, `width`, `layers`, `heads`: how many different tokens, the size of the residual
      stream, and how many layers and heads there are.
    - `hidden`: the hidden size of the feed-forward network, usually four times the width.
    - `embed_width`: the size of the embeddings, projected to the width and back where it is
      another; the width by default.
    - `positions`: the greatest length in tokens, since positions are learned.
    - `activation`: of the feed-forward network, by its name in `config.json` files.
    - `post_norm`: whether norms are behind each part of a layer, and not before it.
    - `final_norm`: whether there is a norm behind the last layer; never with `post_norm`.
    - `bias`, `affine`: whether projections have biases, and norms learned scales and shifts.
    - `tied`: whether the head is the embedding.
    - `dropout`, `attention_dropout`: the rates at which are dropped: what is added to the residual
      stream, and attention weights.
    - `remat`: what is computed again in the backward pass, to save memory: `"none"`, `"dots"`
      (everything but the products with weights) or `"full"` (everything in a layer).
    - `eos`, `bos`, `pad`: the tokens that end a text, begin it, and fill what is behind.

    **Raises:**

    `ValueError` if the sizes do not fit together.
    """

    vocab: int
    width: int
    layers: int
    heads: int
    hidden: int
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
    remat: Remat = "none"
    eos: tuple[int, ...] = ()
    bos: int | None = None
    pad: int | None = None

    def __post_init__(self):
        if self.embed_width is None:
            object.__setattr__(self, "embed_width", self.width)
        sizes = ("vocab", "width", "layers", "heads", "hidden", "embed_width", "positions")
        check_config(self, *sizes)
        check_heads(self)
        check_activation(self.activation)
        check_rates(self, "dropout", "attention_dropout")
        if self.post_norm and self.final_norm:
            raise ValueError("With `post_norm` each layer ends in a norm: set `final_norm=False`.")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @classmethod
    def from_hugging_face(cls, settings: dict[str, Any]) -> "OPTConfig":
        """The configuration that a parsed `config.json` says; a `ValueError` names every setting
        that is not known and might change the results."""
        return cls(**published.read(settings))

    def to_hugging_face(self) -> dict[str, Any]:
        """The settings of a `config.json` for this configuration."""
        return published.write(self)
