"""The settings and tensors of BART in Hugging Face's format."""

from typing import Any

from ...models.bart import BartConfig
from .._settings import REQUIRED, read_fields, read_settings, rename, write_fields
from .._tensors import Tensor
from ._tables import EMBED, HEADS_BIAS, INTO_HEADS, OUT_OF_HEADS, VECTOR, norm

BASE_PREFIX = "model."
BUFFERS = (r"^(model\.)?(encoder|decoder)\.version$",)
# Files of the base model lack it, and in all others it is zero unless a user has set it.
ZEROS = ("final_logits_bias",)

_NAMES = {
    "vocab": "vocab_size",
    "width": "d_model",
    "layers": "encoder_layers",
    "decoder_layers": "decoder_layers",
    "heads": "encoder_attention_heads",
    "hidden": "encoder_ffn_dim",
    "positions": "max_position_embeddings",
    "activation": "activation_function",
    "scale_embedding": "scale_embedding",
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
# Settings of heads that are not implemented, of generation, of distillation, and of old versions of
# `transformers`.
_IGNORED = """
    classifier_dropout classif_dropout _num_labels output_past save_step replacing_rate
    eos_token_ids force_bos_token_to_be_generated student_encoder_layers student_decoder_layers
"""
# Settings of other families that once shared the implementation of BART.
_NEVER = """
    normalize_before add_final_layer_norm add_bias_logits static_position_embeddings
    do_blenderbot_90_layernorm is_decoder
"""


def read(settings: dict[str, Any]) -> dict[str, Any]:
    settings = rename(settings, _OTHER_NAMES)
    defaults = {
        **dict.fromkeys(_NAMES.values(), REQUIRED),
        "max_position_embeddings": 1024,
        "activation_function": "gelu",
        "scale_embedding": False,
        "dropout": 0.1,
        **dict.fromkeys(("attention_dropout", "activation_dropout"), 0.0),
        "decoder_start_token_id": 2,
        "bos_token_id": 0,
        "pad_token_id": 1,
        "eos_token_id": 2,
    }
    only = {
        "model_type": ("bart",),
        "is_encoder_decoder": (True,),
        "tie_word_embeddings": (True,),
        "normalize_embedding": (True,),
        "extra_pos_embeddings": (2,),
        "decoder_attention_heads": (settings.get("encoder_attention_heads"),),
        "decoder_ffn_dim": (settings.get("encoder_ffn_dim"),),
        **dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop"), (0.0, None)),
        **dict.fromkeys(_NEVER.split(), (False,)),
    }
    c = read_settings(settings, defaults, only, tuple(_IGNORED.split()))
    return read_fields(c, _NAMES)


def write(config: BartConfig) -> dict[str, Any]:
    c = config
    settings = write_fields(c, _NAMES)
    return settings | {
        "architectures": ["BartForConditionalGeneration"],
        "model_type": "bart",
        "is_encoder_decoder": True,
        "tie_word_embeddings": True,
        "decoder_attention_heads": c.heads,
        "decoder_ffn_dim": c.hidden,
    }


def tensors(config: BartConfig) -> dict[str, Tensor]:
    """Maps each array to its published tensors."""
    return {
        "embed": Tensor("model.shared.weight", EMBED),
        **_stack("encoder"),
        **_stack("decoder"),
        "logits_bias": Tensor("final_logits_bias", "1 vocab -> vocab"),
    }


def _stack(stack: str) -> dict[str, Tensor]:
    prefix = f"model.{stack}."
    layer, leaf = prefix + "layers.{layer}.", stack + "/layers/"
    table = prefix + "embed_positions.weight"
    found = {
        f"{stack}/position_embed": Tensor(table, "positions width -> positions width"),
        **norm(f"{stack}/embed_norm", prefix + "layernorm_embedding"),
        **_attention(layer + "self_attn", leaf + "attention/"),
        **norm(leaf + "mlp_norm", layer + "final_layer_norm"),
        leaf + "up": Tensor(layer + "fc1.weight", "hidden width -> width hidden"),
        leaf + "up_bias": Tensor(layer + "fc1.bias", "hidden -> hidden"),
        leaf + "down": Tensor(layer + "fc2.weight", "width hidden -> hidden width"),
        leaf + "down_bias": Tensor(layer + "fc2.bias", VECTOR),
    }
    return found | (
        _attention(layer + "encoder_attn", leaf + "cross/") if stack == "decoder" else {}
    )


def _attention(name: str, leaf: str) -> dict[str, Tensor]:
    found = {
        **norm(leaf + "norm", name + "_layer_norm"),
        leaf + "wo": Tensor(name + ".out_proj.weight", OUT_OF_HEADS),
        leaf + "bo": Tensor(name + ".out_proj.bias", VECTOR),
    }
    for letter in "qkv":
        part = f"{name}.{letter}_proj."
        found[f"{leaf}w{letter}"] = Tensor(part + "weight", INTO_HEADS)
        found[f"{leaf}b{letter}"] = Tensor(part + "bias", HEADS_BIAS)
    return found


def duplicates(config: BartConfig) -> dict[str, str]:
    """Maps the names under which a file may hold a tensor again to the tensor's own name."""
    names = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
    return dict.fromkeys((*names, "lm_head.weight"), "model.shared.weight")
