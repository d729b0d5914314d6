"""The sizes of GPT-J."""

from dataclasses import dataclass
from typing import Any

from .._activations import check_activation
from .._checks import check_config, check_heads, check_rates
from .._layers import Remat
from .._published import gptj as published


@dataclass(frozen=True)
class GPTJConfig:
    """The sizes of a `GPTJ`.

    **Arguments:**

    - `vocab`, `width`, `layers`, `heads`: how many different tokens, the size of the residual
      stream, and how many layers and heads there are.
    - `hidden`: the hidden size of the feed-forward network, usually four times the width.
    - `rotary_dim`: how many features of each head the rotary embeddings turn, an even number.
    - `activation`: of the feed-forward network, by its name in `config.json` files.
    - `norm_eps`: what the norms add to the variance.
    - `tied`: whether the head is the embedding. It has a bias either way.
    - `embed_dropout`, `residual_dropout`, `attention_dropout`: the rates at which are dropped: the
      embeddings, what is added to the residual stream, and attention weights.
    - `context`: the length in tokens that the weights were trained for. Nothing enforces it.
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
    rotary_dim: int = 64
    activation: str = "gelu_new"
    norm_eps: int | float = 1e-5
    tied: bool = False
    embed_dropout: int | float = 0.0
    residual_dropout: int | float = 0.0
    attention_dropout: int | float = 0.0
    context: int = 2048
    remat: Remat = "none"
    eos: tuple[int, ...] = ()
    bos: int | None = None
    pad: int | None = None

    def __post_init__(self):
        check_config(self, "vocab", "width", "layers", "heads", "hidden", "rotary_dim")
        check_heads(self)
        check_activation(self.activation)
        check_rates(self, "embed_dropout", "residual_dropout", "attention_dropout")
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ValueError(
                "`rotary_dim` must be even and at most the size of a head, which is "
                f"{self.head_dim}, but is {self.rotary_dim}."
            )

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @classmethod
    def from_hugging_face(cls, settings: dict[str, Any]) -> "GPTJConfig":
        """The configuration that a parsed `config.json` says; a `ValueError` names every setting
        that is not known and might change the results."""
        return cls(**published.read(settings))

    def to_hugging_face(self) -> dict[str, Any]:
        """The settings of a `config.json` for this configuration."""
        return published.write(self)
