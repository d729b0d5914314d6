"""The sizes of GPT-2."""

from dataclasses import dataclass
from typing import Any

from .._activations import check_activation
from .._checks import check_config, check_heads, check_rates
from .._layers import Remat
from .._published import gpt2 as published


@dataclass(frozen=True)
class GPT2Config:
    """The sizes of a `GPT2`.

    **Arguments:**

    - `vocab`, `width`, `layers`, `heads`: how many different tokens, the size of the residual
      stream, and how many layers and heads there are.
    - `hidden`: the hidden size of the feed-forward network, usually four times the width.
    - `positions`: the greatest length in tokens, since positions are learned.
    - `activation`: of the feed-forward network, by its name in `config.json` files.
    - `norm_eps`: what the norms add to the variance.
    - `tied`: whether the head is the embedding.
    - `scale_scores`, `scale_by_layer`: whether attention's scores are divided by the root of the
      size of a head; and, in layer `i` from 0, by `i + 1`.
    - `cross_attention`: whether each layer attends to a memory, too.
    - `embed_dropout`, `residual_dropout`, `attention_dropout`: the rates at which are dropped: the
      embeddings, what is added to the residual stream, and attention weights.
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
    positions: int = 1024
    activation: str = "gelu_new"
    norm_eps: int | float = 1e-5
    tied: bool = True
    scale_scores: bool = True
    scale_by_layer: bool = False
    cross_attention: bool = False
    embed_dropout: int | float = 0.1
    residual_dropout: int | float = 0.1
    attention_dropout: int | float = 0.1
    remat: Remat = "none"
    eos: tuple[int, ...] = ()
    bos: int | None = None
    pad: int | None = None

    def __post_init__(self):
        check_config(self, "vocab", "width", "layers", "heads", "hidden", "positions")
        check_heads(self)
        check_activation(self.activation)
        check_rates(self, "embed_dropout", "residual_dropout", "attention_dropout")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @classmethod
    def from_hugging_face(cls, settings: dict[str, Any]) -> "GPT2Config":
        """The configuration that a parsed `config.json` says; a `ValueError` names every setting
        that is not known and might change the results."""
        return cls(**published.read(settings))

    def to_hugging_face(self) -> dict[str, Any]:
        """The settings of a `config.json` for this configuration."""
        return published.write(self)
