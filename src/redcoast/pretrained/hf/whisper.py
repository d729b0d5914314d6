"""The settings and tensors of Whisper in Hugging Face's format."""

import jax
import jax.numpy as jnp

from ...models.whisper import WhisperConfig
from .._settings import Fields, Settings, read_settings, rename, write_fields
from .._tensors import Tensor
from ._labels import read_architecture
from ._stacks import OTHER_STACK_NAMES, STACK_FIELDS, only_stacks, stack_tensors, write_stacks
from ._tables import EMBED, dense, norm

BASE_PREFIX = "model."

_FIELDS = {
    **STACK_FIELDS,
    "mels": ("num_mel_bins", 80),
    "positions": ("max_target_positions", 448),
    "decoder_start": ("decoder_start_token_id", 50257),
    "bos": ("bos_token_id", 50256),
    "pad": ("pad_token_id", 50256),
}
# Settings of generation, of heads for classification, of masks that only training applies where
# `apply_spec_augment` is set, and one that `transformers` does not use.
_IGNORED = """
    forced_decoder_ids median_filter_width classifier_proj_size use_weighted_layer_sum
    mask_time_prob mask_time_length mask_time_min_masks mask_feature_prob mask_feature_length
    mask_feature_min_masks scale_embedding
"""
_MODELS: dict[str, None] = {"WhisperForConditionalGeneration": None, "WhisperModel": None}


def read(settings: Settings) -> Fields:
    settings = rename(settings, OTHER_STACK_NAMES)
    defaults = {"max_source_positions": 1500, "eos_token_id": 50256}
    only = {"model_type": ("whisper",), **only_stacks(settings), "apply_spec_augment": (False,)}
    c, fields = read_settings(settings, _FIELDS, defaults, only=only, ignored=_IGNORED)
    read_architecture(settings, _MODELS, "WhisperForConditionalGeneration")
    # The second convolution has a stride of 2.
    return fields | {"frames": 2 * c["max_source_positions"]}


def write(config: WhisperConfig) -> Settings:
    return {
        **write_fields(config, _FIELDS),
        **write_stacks(config),
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "max_source_positions": config.frames // 2,
    }


def tensors(config: WhisperConfig) -> dict[str, Tensor]:
    """Keys have no bias."""
    # Torch's convolutions over time are (outputs, inputs, taps).
    kernel = "outputs inputs taps -> taps inputs outputs"
    table = {
        "embed": Tensor("model.decoder.embed_tokens.weight", EMBED),
        **dense("encoder/first", "model.encoder.conv1", kernel),
        **dense("encoder/second", "model.encoder.conv2", kernel),
    }
    for stack in ("encoder", "decoder"):
        table |= stack_tensors(stack, "qvo")
        table |= norm(f"{stack}/norm", f"model.{stack}.layer_norm")
    return table


def computed(config: WhisperConfig) -> dict[str, tuple[int, ...]]:
    return {"encoder.embed_positions.weight": (config.frames // 2, config.width)}


def duplicates(config: WhisperConfig) -> dict[str, str]:
    return {"proj_out.weight": "model.decoder.embed_tokens.weight"}


def example_inputs(config: WhisperConfig, rows: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    # (rows, mels, frames), and (rows, tokens).
    features = jax.ShapeDtypeStruct((rows, config.mels, config.frames), jnp.float32)
    return features, jax.ShapeDtypeStruct((rows, min(128, config.positions)), jnp.int32)
