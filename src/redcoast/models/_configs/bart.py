"""The sizes of BART."""

from dataclasses import dataclass
from typing import Any

from .._activations import check_activation
from .._checks import check_config, check_heads, check_rates
from .._layers import Remat
from .._published import bart as published


@dataclass(frozen=True)
class BartConfig:
    """The sizes of a `Bart`.

    **Arguments:**

    - `vocab`, `width`: how many different tokens, and the size of the residual stream.
    - `layers`, `decoder_layers`: how many layers the encoder and the decoder have.
    - `heads`, `hidden`: how many heads, and the hidden size of the feed-forward network.
    - `positions`: the greatest length in tokens, since positions are learned.
    - `activation`: of the feed-forward network, by its name in `config.json` files.
    - `scale_embedding`: whether tokens' embeddings are multiplied with the root of the width.
    - `dropout`, `attention_dropout`, `activation_dropout`: the rates at which are dropped: the
      embeddings and what is added to the residual stream; attention weights; and the hidden
      features of the feed-forward network.
    - `remat`: what is computed again in the backward pass, to save memory: `"none"`, `"dots"`
      (everything but the products with weights) or `"full"` (everything in a layer).
    - `decoder_start`: the token that the decoder begins with.
    - `eos`, `bos`, `pad`: the tokens that end a text, begin it, and fill what is behind.

    **Raises:**

    `ValueError` if the sizes do not fit together.
    """

    vocab: int
    width: int
    layers: int
    decoder_layers: int
    heads: int
    hidden: int
    positions: int = 1024
    activation: str = "gelu"
    scale_embedding: bool = False
    dropout: int | float = 0.1
    attention_dropout: int | float = 0.0
    activation_dropout: int | float = 0.0
    remat: Remat = "none"
    decoder_start: int = 2
    eos: tuple[int, ...] = ()
    bos: int | None = None
    pad: int | None = None

    def __post_init__(self):
        sizes = ("vocab", "width", "layers", "decoder_layers", "heads", "hidden", "positions")
        check_config(self, *sizes)
        check_heads(self)
        check_rates(self, "dropout", "attention_dropout", "activation_dropout")
        check_activation(self.activation)

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @classmethod
    def from_hugging_face(cls, settings: dict[str, Any]) -> "BartConfig":
        """The configuration that a parsed `config.json` says; a `ValueError` names every setting
        that is not known and might change the results."""
        return cls(**published.read(settings))

    def to_hugging_face(self) -> dict[str, Any]:
        """The settings of a `config.json` for this configuration."""
        return published.write(self)
