"""The sizes of a captioner."""

from dataclasses import dataclass
from typing import Any

from .._checks import check_fields
from .._published import captioner as published
from .gpt2 import GPT2Config
from .vit import ViTConfig


@dataclass(frozen=True)
class CaptionerConfig:
    """The parts of a `Captioner`.

    **Arguments:**

    - `encoder`: of the ViT, which has no head.
    - `decoder`: of the GPT-2, whose layers attend to a memory: `cross_attention=True`.
    - `decoder_start`: the token that each caption begins with, which generating needs.
    - `eos`, `bos`, `pad`: the tokens that end a caption, begin a text, and fill what is behind.

    **Raises:**

    `ValueError` if the parts do not fit together.
    """

    encoder: ViTConfig
    decoder: GPT2Config
    decoder_start: int | None = None
    eos: tuple[int, ...] = ()
    bos: int | None = None
    pad: int | None = None

    def __post_init__(self):
        check_fields(self)
        if self.encoder.head is not None:
            raise ValueError("A captioner reads hidden states: its encoder must be without a head.")
        if not self.decoder.cross_attention:
            raise ValueError("A captioner's decoder must have `cross_attention=True`.")

    @property
    def vocab(self) -> int:
        return self.decoder.vocab

    @property
    def positions(self) -> int:
        return self.decoder.positions

    @classmethod
    def from_hugging_face(cls, settings: dict[str, Any]) -> "CaptionerConfig":
        """The configuration that a parsed `config.json` of a vision-encoder-decoder says, of ViT
        and GPT-2; a `ValueError` names every setting that is not known and might change the
        results."""
        return cls(**published.read(settings))

    def to_hugging_face(self) -> dict[str, Any]:
        """The settings of a `config.json` for this configuration."""
        return published.write(self)
