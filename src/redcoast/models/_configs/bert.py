"""The sizes of BERT and RoBERTa."""

from dataclasses import dataclass
from typing import Any, Literal

from .._activations import check_activation
from .._checks import check_config, check_heads, check_rates
from .._heads import check_labels
from .._layers import Remat
from .._published import bert as published

Head = Literal["masked", "pretraining", "classification"]


@dataclass(frozen=True)
class BertConfig:
    """The sizes of a `Bert`.

    **Arguments:**

    - `vocab`, `width`, `layers`, `heads`: how many different tokens, the size of the residual
      stream, and how many layers and heads there are.
    - `hidden`: the hidden size of the feed-forward network, usually four times the width.
    - `kind`: `"bert"`; or `"roberta"`, whose first position is the one after `pad`.
    - `positions`: the greatest length in tokens, since positions are learned.
    - `types`: how many token types there are.
    - `head`: what a call returns. Hidden states, without one; with `"masked"`, logits of each
      token; `"pretraining"` is the same with BERT's second head beside, whose logits are
      `model.head.follows(model.pool(hidden))`; with `"classification"`, logits of the row's
      labels, or with one label what regression predicts.
    - `labels`, `label_names`: of classification.
    - `pooler`: whether there is a pooler where no head needs one; `"pretraining"` and
      `"classification"` do.
    - `activation`: of the feed-forward network, by its name in `config.json` files.
    - `norm_eps`: what the norms add to the variance.
    - `dropout`, `attention_dropout`, `head_dropout`: the rates at which are dropped: the
      embeddings and what is added to the residual stream; attention weights; what a
      classification head reads, as much as `dropout` by default.
    - `remat`: what is computed again in the backward pass, to save memory: `"none"`, `"dots"`
      (everything but the products with weights) or `"full"` (everything in a layer).
    - `pad`, `bos`, `eos`: the tokens that fill what is behind a text, begin it and end it.

    **Raises:**

    `ValueError` if the sizes do not fit together.
    """

    vocab: int
    width: int
    layers: int
    heads: int
    hidden: int
    kind: Literal["bert", "roberta"] = "bert"
    positions: int = 512
    types: int = 2
    head: Head | None = None
    labels: int = 2
    label_names: tuple[str, ...] | None = None
    pooler: bool = False
    activation: str = "gelu"
    norm_eps: int | float = 1e-12
    dropout: int | float = 0.1
    attention_dropout: int | float = 0.1
    head_dropout: int | float | None = None
    remat: Remat = "none"
    pad: int | None = None
    bos: int | None = None
    eos: tuple[int, ...] = ()

    def __post_init__(self):
        sizes = ("vocab", "width", "layers", "heads", "hidden", "positions", "types")
        check_config(self, *sizes)
        check_heads(self)
        check_activation(self.activation)
        check_labels(self)
        check_rates(self, "dropout", "attention_dropout", "head_rate")
        if self.kind == "roberta" and self.pad is None:
            raise ValueError("RoBERTa needs `pad`: its first position is the one after it.")
        if self.kind == "roberta" and self.head == "pretraining":
            raise ValueError("RoBERTa was trained with the head 'masked' alone.")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def first_position(self) -> int:
        """The row of the table of positions that a text begins with."""
        return self.pad + 1 if self.kind == "roberta" and self.pad is not None else 0

    @property
    def pools(self) -> bool:
        return self.pooler or self.head in ("pretraining", "classification")

    @property
    def head_rate(self) -> int | float:
        return self.dropout if self.head_dropout is None else self.head_dropout

    @classmethod
    def from_hugging_face(cls, settings: dict[str, Any]) -> "BertConfig":
        """The configuration that a parsed `config.json` of BERT or RoBERTa says; a `ValueError`
        names every setting that is not known and might change the results."""
        return cls(**published.read(settings))

    def to_hugging_face(self) -> dict[str, Any]:
        """The settings of a `config.json` for this configuration."""
        return published.write(self)
