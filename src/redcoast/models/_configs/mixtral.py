"""The sizes of Mixtral."""

from dataclasses import dataclass
from typing import Any

from .._checks import check_config, check_heads, check_rates
from .._layers import Remat
from .._published import mixtral as published
from .._rotary import RopeScaling


@dataclass(frozen=True)
class MixtralConfig:
    """The sizes of a `Mixtral`.

    **Arguments:**

    - `vocab`, `width`, `layers`: how many different tokens, the size of the residual stream, and
      how many decoder layers there are.
    - `heads`, `kv_heads`: how many query heads; how many key and value heads, a divisor of it.
    - `hidden`: the hidden size of each expert.
    - `experts`, `chosen`: how many experts a layer has, and how many of them see each token.
    - `head_size`: the size of a head, an even number; `width / heads` by default.
    - `rope_base`, `rope_scaling`: the base of the rotary embeddings' wavelengths, and how they
      are stretched for long texts.
    - `norm_eps`: what RMSNorm adds to the mean square.
    - `tied`: whether the head is the embedding.
    - `window`: how many tokens back a token sees, itself included; all by default.
    - `attention_dropout`: the rate at which attention weights are dropped.
    - `router_loss_weight`: what `router_loss` of `hidden_and_router_loss` is to be multiplied by in
      a training loss.
    - `context`: the length in tokens that the model is made for; it changes no result.
    - `remat`: what is computed again in the backward pass, to save memory: `"none"`, `"dots"`
      (everything but the products with weights of attention) or `"full"` (everything in a layer).
    - `eos`, `bos`, `pad`: the tokens that end a text, begin it, and fill what is behind.

    **Raises:**

    `ValueError` if the sizes do not fit together.
    """

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    experts: int = 8
    chosen: int = 2
    head_size: int | None = None
    rope_base: int | float = 1000000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: int | float = 1e-5
    tied: bool = False
    window: int | None = None
    attention_dropout: int | float = 0.0
    router_loss_weight: int | float = 0.001
    context: int = 32768
    remat: Remat = "none"
    eos: tuple[int, ...] = ()
    bos: int | None = None
    pad: int | None = None

    def __post_init__(self):
        check_config(self, "vocab", "width", "layers", "heads", "kv_heads", "hidden", "chosen")
        check_heads(self, even=True)
        check_rates(self, "attention_dropout")
        if self.chosen > self.experts:
            raise ValueError(
                f"`chosen` must be at most `experts`, but {self.chosen} of {self.experts} experts "
                "cannot see a token."
            )

    @property
    def head_dim(self) -> int:
        return self.head_size or self.width // self.heads

    @classmethod
    def from_hugging_face(cls, settings: dict[str, Any]) -> "MixtralConfig":
        """The configuration that a parsed `config.json` says; a `ValueError` names every setting
        that is not known and might change the results."""
        return cls(**published.read(settings))

    def to_hugging_face(self) -> dict[str, Any]:
        """The settings of a `config.json` for this configuration."""
        return published.write(self)
