"""The settings and tensors of CLIP in Hugging Face's format."""

from typing import Any

from ...models.clip import ClipConfig, ClipImageConfig, ClipTextConfig
from .._settings import defaults_of, read_fields, read_settings, write_fields
from .._tensors import Tensor
from ._labels import read_architecture, read_side
from ._tables import EMBED, KERNEL, TURNED, VECTOR, norm
from .siglip import encoder_layers, example_inputs

__all__ = ["example_inputs", "read", "tensors", "write"]

BUFFERS = (r"\.embeddings\.position_ids$",)

# Published files often only have settings that differ from the base size.
_BOTH: dict[str, Any] = {
    "layers": ("num_hidden_layers", 12),
    "activation": ("hidden_act", "quick_gelu"),
    "norm_eps": ("layer_norm_eps", 1e-5),
    "attention_dropout": ("attention_dropout", 0.0),
}
_IMAGE = {
    **_BOTH,
    "width": ("hidden_size", 768),
    "heads": ("num_attention_heads", 12),
    "hidden": ("intermediate_size", 3072),
    "image": ("image_size", 224),
    "patch": ("patch_size", 32),
    "channels": ("num_channels", 3),
}
_TEXT = {
    **_BOTH,
    "width": ("hidden_size", 512),
    "heads": ("num_attention_heads", 8),
    "hidden": ("intermediate_size", 2048),
    "vocab": ("vocab_size", 49408),
    "positions": ("max_position_embeddings", 77),
    "bos": ("bos_token_id", 49406),
    "pad": ("pad_token_id", 1),
}
# The entire model determines the size of the outputs.
_IGNORED = ("projection_dim",)


def read(settings: dict[str, Any]) -> dict[str, Any]:
    parts = ("text_config", "vision_config")
    defaults = {**dict.fromkeys(parts), "projection_dim": 512}
    defaults |= {part + "_dict": None for part in parts}
    # The embedding of tokens is tied to nothing.
    c = read_settings(settings, defaults, {"model_type": ("clip",)}, ("tie_word_embeddings",))
    read_architecture(settings, {"CLIPModel": None}, "CLIPModel")
    # If the oldest files have a setting twice, the second one counts.
    text, image = ({**(c[part] or {}), **(c[part + "_dict"] or {})} for part in parts)
    kind = {"model_type": ("clip_vision_model",)}
    image = read_settings(image, defaults_of(_IMAGE), kind, _IGNORED)
    for name in ("image_size", "patch_size"):
        image[name] = read_side(image[name], name)
    kind = {"model_type": ("clip_text_model",)}
    text = read_settings(text, defaults_of(_TEXT) | {"eos_token_id": 49407}, kind, _IGNORED)
    return {
        "image": ClipImageConfig(**read_fields(image, _IMAGE)),
        "text": ClipTextConfig(**read_fields(text, _TEXT)),
        "outputs": c["projection_dim"],
    }


def write(config: ClipConfig) -> dict[str, Any]:
    image, text = write_fields(config.image, _IMAGE), write_fields(config.text, _TEXT)
    size = {"projection_dim": config.outputs}
    return {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "vision_config": image | size | {"model_type": "clip_vision_model"},
        "text_config": text | size | {"model_type": "clip_text_model"},
        **size,
    }


def tensors(config: ClipConfig) -> dict[str, Tensor]:
    """Maps each array to its published tensors."""
    image, text, kept = "vision_model.", "text_model.", "rows width -> rows width"
    positions = "embeddings.position_embedding.weight"
    return {
        "image/patch_embed": Tensor(image + "embeddings.patch_embedding.weight", KERNEL),
        "image/class_embed": Tensor(image + "embeddings.class_embedding", VECTOR),
        "image/position_embed": Tensor(image + positions, kept),
        **norm("image/first_norm", image + "pre_layrnorm"),
        **encoder_layers("image/layers/", image, config.image.heads),
        **norm("image/norm", image + "post_layernorm"),
        "image/head": Tensor("visual_projection.weight", TURNED),
        "text/embed": Tensor(text + "embeddings.token_embedding.weight", EMBED),
        "text/position_embed": Tensor(text + positions, kept),
        **encoder_layers("text/layers/", text, config.text.heads),
        **norm("text/norm", text + "final_layer_norm"),
        "text/head": Tensor("text_projection.weight", TURNED),
        "logit_scale": Tensor("logit_scale", "-> 1"),
    }
