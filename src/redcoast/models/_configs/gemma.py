"""The sizes of Gemma."""

from dataclasses import dataclass
from typing import Any

from .._checks import check_config, check_rates
from .._layers import Remat
from .._published import gemma as published
from .._rotary import RopeScaling


@dataclass(frozen=True)
class GemmaConfig:
    """The sizes of a `Gemma`.

    **Arguments:**

    - `vocab`, `width`, `layers`: how many different tokens, the size of the residual stream, and
      how many decoder layers there are.
    - `heads`, `kv_heads`, `head_dim`: how many query heads; how many key and value heads, a
      divisor of it; and the size of a head, an even number.
    - `hidden`: the hidden size of the feed-forward network.
    - `rope_base`, `rope_scaling`: the base of the rotary embeddings' wavelengths, and how they
      are stretched for long texts.
    - `local`: for each layer, whether a token sees only a window; without it, no layer has one.
    - `window`: in these layers, how many tokens back a token sees, itself included.
    - `local_rope_base`: the base of the rotary embeddings in these layers, which are not
      stretched; by default they are as in all others.
    - `post_norms`: whether what a layer adds to the residual stream is normed.
    - `qk_norm`: whether each head's Q and K are normed.
    - `score_scale`: attention's scores are divided by its root; the size of a head by default.
    - `score_cap`, `logit_cap`: bounds that attention's scores, and the logits, approach as a
      hyperbolic tangent does.
    - `norm_eps`: what RMSNorm adds to the mean square.
    - `tied`: whether the head is the embedding.
    - `attention_dropout`: the rate at which attention weights are dropped.
    - `context`: the length in tokens that the model is made for; it changes no result.
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
    kv_heads: int
    hidden: int
    head_dim: int = 256
    rope_base: int | float = 10000.0
    rope_scaling: RopeScaling | None = None
    local: tuple[bool, ...] = ()
    window: int | None = None
    local_rope_base: int | float | None = None
    post_norms: bool = False
    qk_norm: bool = False
    score_scale: int | float | None = None
    score_cap: int | float | None = None
    logit_cap: int | float | None = None
    norm_eps: int | float = 1e-6
    tied: bool = True
    attention_dropout: int | float = 0.0
    context: int = 8192
    remat: Remat = "none"
    eos: tuple[int, ...] = ()
    bos: int | None = None
    pad: int | None = None

    def __post_init__(self):
        check_config(self, "vocab", "width", "layers", "heads", "kv_heads", "hidden", "head_dim")
        check_rates(self, "attention_dropout")
        if self.head_dim % 2:
            raise ValueError(f"The size of a head must be even, but is {self.head_dim}.")
        if self.local and len(self.local) != self.layers:
            raise ValueError(
                f"`local` says of {len(self.local)} layers whether they have a window, and there "
                f"are {self.layers}."
            )
        if any(self.local) and self.window is None:
            raise ValueError("`local` gives layers a window, and `window` does not say its size.")

    @classmethod
    def from_hugging_face(cls, settings: dict[str, Any]) -> "GemmaConfig":
        """The configuration that a parsed `config.json` of Gemma, Gemma 2 or Gemma 3's text part
        says; a `ValueError` names every setting that is not known and might change the results."""
        return cls(**published.read(settings))

    def to_hugging_face(self) -> dict[str, Any]:
        """The settings of a `config.json` for this configuration; a `ValueError` if it is of no
        published generation."""
        return published.write(self)
