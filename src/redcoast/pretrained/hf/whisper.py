"""The settings and tensors of Whisper in Hugging Face's format."""

from typing import Any

import jax
import jax.numpy as jnp

from ...models.whisper import WhisperConfig
from .._settings import REQUIRED, read_fields, read_settings, rename, write_fields
from .._tensors import Tensor
from ._labels import read_architecture
from ._tables import EMBED, HEADS_BIAS, INTO_HEADS, OUT_OF_HEADS, TURNED, VECTOR, norm

BASE_PREFIX = "model."

_NAMES = {
    "vocab": "vocab_size",
    "width": "d_model",
    "layers": "encoder_layers",
    "decoder_layers": "decoder_layers",
    "heads": "encoder_attention_heads",
    "hidden": "encoder_ffn_dim",
    "mels": "num_mel_bins",
    "positions": "max_target_positions",
    "activation": "activation_function",
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "activation_dropout": "activation_dropout",
    "decoder_start": "decoder_start_token_id",
    "bos": "bos_token_id",
    "pad": "pad_token_id",
}
_OTHER_NAMES = {
    "hidden_size": "d_model",
    "num_attention_heads": "encoder_attention_heads",
    "num_hidden_layers": "encoder_layers",
}
# Settings of generation, of heads for classification, of masks that only training applies where
# `apply_spec_augment` is set, and one that `transformers` does not use.
_IGNORED = """
    forced_decoder_ids median_filter_width classifier_proj_size use_weighted_layer_sum
    mask_time_prob mask_time_length mask_time_min_masks mask_feature_prob mask_feature_length
    mask_feature_min_masks scale_embedding
"""
_MODELS: dict[str, Any] = {"WhisperForConditionalGeneration": None, "WhisperModel": None}


def read(settings: dict[str, Any]) -> dict[str, Any]:
    settings = rename(settings, _OTHER_NAMES)
    defaults = {
        **dict.fromkeys(_NAMES.values(), REQUIRED),
        "num_mel_bins": 80,
        "max_source_positions": 1500,
        "max_target_positions": 448,
        "activation_function": "gelu",
        **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0),
        "decoder_start_token_id": 50257,
        **dict.fromkeys(("bos_token_id", "pad_token_id", "eos_token_id"), 50256),
    }
    only = {
        "model_type": ("whisper",),
        "is_encoder_decoder": (True,),
        "tie_word_embeddings": (True,),
        "apply_spec_augment": (False,),
        "decoder_attention_heads": (settings.get("encoder_attention_heads"),),
        "decoder_ffn_dim": (settings.get("encoder_ffn_dim"),),
        **dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop"), (0.0, None)),
    }
    c = read_settings(settings, defaults, only, tuple(_IGNORED.split()))
    read_architecture(settings, _MODELS, "WhisperForConditionalGeneration")
    return read_fields(c, _NAMES) | {"frames": 2 * c["max_source_positions"]}


def write(config: WhisperConfig) -> dict[str, Any]:
    c = config
    settings = write_fields(c, _NAMES)
    return settings | {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "is_encoder_decoder": True,
        "tie_word_embeddings": True,
        "decoder_attention_heads": c.heads,
        "decoder_ffn_dim": c.hidden,
        "max_source_positions": c.frames // 2,
    }


def tensors(config: WhisperConfig) -> dict[str, Tensor]:
    """Maps each array to its published tensors."""
    return {
        "embed": Tensor("model.decoder.embed_tokens.weight", EMBED),
        **_convolution("encoder/first", "model.encoder.conv1"),
        **_convolution("encoder/second", "model.encoder.conv2"),
        **_stack("encoder"),
        **_stack("decoder"),
    }


def _convolution(leaf: str, name: str) -> dict[str, Tensor]:
    kernel = "outputs inputs taps -> taps inputs outputs"
    bias = Tensor(name + ".bias", VECTOR)
    return {leaf: Tensor(name + ".weight", kernel), leaf + "_bias": bias}


def _stack(stack: str) -> dict[str, Tensor]:
    prefix = f"model.{stack}."
    layer, leaf = prefix + "layers.{layer}.", stack + "/layers/"
    table = prefix + "embed_positions.weight"
    found = {
        f"{stack}/position_embed": Tensor(table, "positions width -> positions width"),
        **norm(f"{stack}/norm", prefix + "layer_norm"),
        **_attention(layer + "self_attn", leaf + "attention/"),
        **norm(leaf + "mlp_norm", layer + "final_layer_norm"),
        leaf + "up": Tensor(layer + "fc1.weight", TURNED),
        leaf + "up_bias": Tensor(layer + "fc1.bias", "hidden -> hidden"),
        leaf + "down": Tensor(layer + "fc2.weight", TURNED),
        leaf + "down_bias": Tensor(layer + "fc2.bias", VECTOR),
    }
    cross = _attention(layer + "encoder_attn", leaf + "cross/") if stack == "decoder" else {}
    return found | cross


def _attention(name: str, leaf: str) -> dict[str, Tensor]:
    found = {
        **norm(leaf + "norm", name + "_layer_norm"),
        leaf + "wo": Tensor(name + ".out_proj.weight", OUT_OF_HEADS),
        leaf + "bo": Tensor(name + ".out_proj.bias", VECTOR),
    }
    for letter in "qkv":
        found[f"{leaf}w{letter}"] = Tensor(f"{name}.{letter}_proj.weight", INTO_HEADS)
    for letter in "qv":
        found[f"{leaf}b{letter}"] = Tensor(f"{name}.{letter}_proj.bias", HEADS_BIAS)
    return found


def duplicates(config: WhisperConfig) -> dict[str, str]:
    """Maps the names under which a file may hold a tensor again to the tensor's own name."""
    return {"proj_out.weight": "model.decoder.embed_tokens.weight"}


def example_inputs(config: WhisperConfig, rows: int) -> tuple[Any, ...]:
    """Returns abstract inputs for planning."""
    features = jax.ShapeDtypeStruct((rows, config.mels, config.frames), jnp.float32)
    return features, jax.ShapeDtypeStruct((rows, min(128, config.positions)), jnp.int32)
