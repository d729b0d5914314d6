"""The sizes of T5."""

from dataclasses import dataclass
from typing import Any, Literal

from .._activations import check_activation
from .._checks import check_config, check_heads, check_rates
from .._distances import check_buckets
from .._layers import Remat
from .._published import t5 as published


@dataclass(frozen=True)
class T5Config:
    """The sizes of a `T5`.

    **Arguments:**

    - `vocab`, `width`: how many different tokens, and the size of the residual stream.
    - `layers`, `decoder_layers`: how many layers the encoder and the decoder have.
    - `heads`, `hidden`: how many heads, and the hidden size of the feed-forward network.
    - `head_size`: the size of a head; `width / heads` by default.
    - `buckets`, `distance`: how many ranges of distances between tokens are told apart, at least
      4; and the distance from which on all are one range, more than half as much.
    - `activation`, `gated`: of the feed-forward network, by its name in `config.json` files; and
      whether what it gives is multiplied with a second product.
    - `norm_eps`: what RMSNorm adds to the mean square.
    - `tied`: whether the head is the embedding.
    - `scale_head`: whether what goes into the head is divided by the root of the width; by
      default that of a tied head is.
    - `dropout`: the rate at which embeddings, attention weights, the feed-forward network's
      hidden features, and what is added to the residual stream or leaves it are dropped.
    - `remat`: what is computed again in the backward pass, to save memory: `"none"`, `"dots"`
      (everything but the products with weights) or `"full"` (everything in a layer).
    - `kind`: by what name `config.json` files are written; nothing is computed from it.
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
    head_size: int | None = None
    buckets: int = 32
    distance: int = 128
    activation: str = "relu"
    gated: bool = False
    norm_eps: int | float = 1e-6
    tied: bool = True
    scale_head: bool | None = None
    dropout: int | float = 0.1
    remat: Remat = "none"
    kind: Literal["t5", "mt5"] = "t5"
    decoder_start: int = 0
    eos: tuple[int, ...] = ()
    bos: int | None = None
    pad: int | None = None

    def __post_init__(self):
        check_config(self, "vocab", "width", "layers", "decoder_layers", "heads", "hidden")
        check_heads(self)
        check_rates(self, "dropout")
        check_activation(self.activation)
        check_buckets(self.buckets, self.distance)
        if self.scale_head and not self.tied:
            raise ValueError("Only a tied head is scaled: with `scale_head` set `tied`.")

    @property
    def head_dim(self) -> int:
        return self.head_size or self.width // self.heads

    @property
    def scaled(self) -> bool:
        return self.tied if self.scale_head is None else self.scale_head

    @classmethod
    def from_hugging_face(cls, settings: dict[str, Any]) -> "T5Config":
        """The configuration that a parsed `config.json` of T5 or mT5 says; a `ValueError` names
        every setting that is not known and might change the results."""
        return cls(**published.read(settings))

    def to_hugging_face(self) -> dict[str, Any]:
        """The settings of a `config.json` for this configuration."""
        return published.write(self)
