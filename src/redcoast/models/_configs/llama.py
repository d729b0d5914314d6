"""The sizes of LLaMA and what is made like it."""

from dataclasses import dataclass
from typing import Any

from .._checks import check_config, check_heads
from .._layers import Remat
from .._published import llama as published
from .._rotary import RopeScaling


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a `Llama`.

    **Arguments:**

    - `vocab`, `width`, `layers`: how many different tokens, the size of the residual stream, and
      how many decoder layers there are.
    - `heads`, `kv_heads`: how many query heads; how many key and value heads, a divisor of it.
    - `hidden`: the hidden size of the feed-forward network, usually about 8/3 of the width.
    - `head_size`: the size of a head, an even number; `width / heads` by default.
    - `rope_base`, `rope_scaling`: the base of the rotary embeddings' wavelengths, and how they
      are stretched for long texts.
    - `norm_eps`: what RMSNorm adds to the mean square.
    - `tied`: whether the head is the embedding.
    - `window`: how many tokens back one sees, itself included; all by default.
    - `qkv_bias`, `qk_norm`: whether Q, K and V have biases; whether Q and K are normalised.
    - `attention_dropout`: the rate at which attention weights are dropped.
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
    kv_heads: int
    hidden: int
    head_size: int | None = None
    rope_base: int | float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: int | float = 1e-5
    tied: bool = False
    window: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    attention_dropout: int | float = 0.0
    context: int = 2048
    remat: Remat = "none"
    eos: tuple[int, ...] = ()
    bos: int | None = None
    pad: int | None = None

    def __post_init__(self):
        check_config(self, "vocab", "width", "layers", "heads", "kv_heads", "hidden")
        check_heads(self, even=True)

    @property
    def head_dim(self) -> int:
        return self.head_size or self.width // self.heads

    @classmethod
    def from_hugging_face(cls, settings: dict[str, Any]) -> "LlamaConfig":
        """The configuration that a parsed `config.json` of LLaMA, Mistral, Qwen2 or Qwen3 says;
        a `ValueError` names every setting that is not known and might change the results."""
        return cls(**published.read(settings))

    def to_hugging_face(self) -> dict[str, Any]:
        """The settings of a `config.json` for this configuration."""
        return published.write(self)
