"""The bases of configurations, with the options that many families share, and their checks."""

import dataclasses
from dataclasses import KW_ONLY, dataclass
from typing import Any

from ..core._decoding import GREEDY, Decoding
from ._basic import check_activation
from ._check_config import check_fields, check_labels, check_multiple, where
from ._scan_layers import Remat, check_remat


class LayerSizes:
    """The sizes that every configuration of layers has as fields."""

    width: int
    layers: int
    heads: int


class HeadSizes(LayerSizes):
    """Configurations with heads of one size, `width / heads` or the field `head_size`."""

    @property
    def head_dim(self) -> int:
        return getattr(self, "head_size", None) or self.width // self.heads


@dataclass(frozen=True)
class TokenSizes(HeadSizes):
    """The sizes of a decoder or an encoder of tokens."""

    vocab: int
    width: int
    layers: int
    heads: int
    hidden: int


@dataclass(frozen=True)
class StackSizes(HeadSizes):
    """The sizes of an encoder of `layers` layers, and of a decoder that attends to it."""

    vocab: int
    width: int
    layers: int
    decoder_layers: int
    heads: int
    hidden: int


@dataclass(frozen=True)
class ImageSizes(HeadSizes):
    """The sizes of an encoder of images."""

    width: int
    layers: int
    heads: int
    hidden: int


class RotarySizes(HeadSizes):
    """Configurations in which rotary embeddings rotate some features of each head, or all."""

    rotary_dim: int | None

    @property
    def rotated(self) -> int:
        """The number of rotated features of each head."""
        return self.rotary_dim or self.head_dim


@dataclass(frozen=True, kw_only=True)
class LayersConfig(LayerSizes):
    """Options of a loop over layers, which do not change its results. `LlamaConfig` describes
    them."""

    remat: Remat = "none"
    unroll: int | None = None

    @property
    def loop_options(self) -> dict[str, Any]:
        """The options with which `scan_layers` and `scan_kinds` are called."""
        return {"remat": self.remat, "unroll": self.unroll}


@dataclass(frozen=True, kw_only=True)
class TextConfig(LayersConfig):
    """The token ids of the end of a sequence (one or several), of its start, and of padding."""

    eos: tuple[int, ...] = ()
    bos: int | None = None
    pad: int | None = None


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(TextConfig):
    """Options of decoding: `decoding` has the defaults of [`redcoast.generate`][] for a model."""

    decoding: Decoding = GREEDY


@dataclass(frozen=True)
class GroupedConfig(DecoderConfig):
    """The common sizes and options of decoders with grouped queries, RMSNorm and rotary embeddings.
    Each family documents its own."""

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    _: KW_ONLY
    rope_base: int | float = 10000.0
    norm_eps: int | float = 1e-6
    tied: bool = False
    attention_dropout: int | float = 0.0
    context: int = 8192


def check_config(config: LayersConfig, *sizes: str) -> None:
    """Raises if a field has a wrong type or is out of range, if a size or `unroll` is below 1, if
    `kv_heads` does not divide `heads`, if a dropout rate is not in [0, 1), if an activation
    function or `remat` is unknown, if heads of one size do not divide `width`, or if `label_names`
    does not have a name for each of the `labels`.

    Integers without a default value are sizes, and so are the fields named in `sizes`. Sets
    `head_size` to None if it is `width / heads`, so that configurations of the same model are
    equal.
    """
    check_remat(config.remat)
    check_fields(config)
    for field in dataclasses.fields(config):
        required = field.type is int and field.default is dataclasses.MISSING
        is_size = required or field.name in sizes
        value = getattr(config, field.name)
        if (is_size or field.name == "unroll") and value is not None and value < 1:
            raise ValueError(f"`{field.name}` must be at least 1, but is {value}{where(config)}.")
    if hasattr(config, "kv_heads"):
        check_multiple(config, "heads", "kv_heads")
    for name, value in vars(config).items():
        if name.endswith("activation"):
            check_activation(value)
        if name.endswith("dropout") and value is not None and not 0 <= value < 1:
            raise ValueError(
                f"`{name}` must be at least 0 and less than 1, but is {value}{where(config)}."
            )
    if isinstance(config, HeadSizes):
        size = getattr(config, "head_size", None)
        if size is None:
            check_multiple(config, "width", "heads")
        elif size * config.heads == config.width:
            # The field says nothing new then, and files may or may not have it.
            object.__setattr__(config, "head_size", None)
    if hasattr(config, "labels"):
        check_labels(config)


def check_even_heads(config: HeadSizes) -> None:
    """Raises if the head size is odd, since rotary embeddings rotate pairs of features."""
    if config.head_dim % 2:
        raise ValueError(f"The head size must be even, but is {config.head_dim}{where(config)}.")


def check_rotary_dim(config: RotarySizes) -> None:
    """Raises if the number of rotated features is odd or larger than the head size.

    Sets `rotary_dim` to None if all features are rotated, so that configurations of the same model
    are equal.
    """
    if config.rotary_dim is None:
        check_even_heads(config)
        return
    if config.rotary_dim % 2 or not 0 < config.rotary_dim <= config.head_dim:
        raise ValueError(
            f"`rotary_dim` must be even, positive and at most the head size {config.head_dim}, but "
            f"is {config.rotary_dim}."
        )
    if config.rotary_dim == config.head_dim:
        object.__setattr__(config, "rotary_dim", None)
