"""The settings and tensors of SigLIP in Hugging Face's format."""

from typing import Any

import jax
import jax.numpy as jnp

from ...models.siglip import SiglipConfig, SiglipImageConfig, SiglipTextConfig
from .._settings import REQUIRED, defaults_of, read_fields, read_settings, write_fields
from .._tensors import Tensor
from ._labels import image_inputs, read_architecture, read_side
from ._tables import EMBED, OUT_PROJ, attention, dense, linear, norm, patches

BUFFERS = (r"\.embeddings\.position_ids$",)

# Published files often only have settings that differ from the base size.
_BOTH: dict[str, Any] = {
    "width": ("hidden_size", 768),
    "layers": ("num_hidden_layers", 12),
    "heads": ("num_attention_heads", 12),
    "hidden": ("intermediate_size", 3072),
    "activation": ("hidden_act", "gelu_pytorch_tanh"),
    "norm_eps": ("layer_norm_eps", 1e-6),
    "attention_dropout": ("attention_dropout", 0.0),
}
_IMAGE = {
    **_BOTH,
    "image": ("image_size", 224),
    "patch": ("patch_size", 16),
    "channels": ("num_channels", 3),
}
_TEXT = {
    **_BOTH,
    "vocab": ("vocab_size", 32000),
    "positions": ("max_position_embeddings", 64),
    "outputs": ("projection_size", None),
    "bos": ("bos_token_id", 49406),
    "pad": ("pad_token_id", 1),
}


def read(settings: dict[str, Any]) -> dict[str, Any]:
    c = read_settings(
        settings,
        {"text_config": REQUIRED, "vision_config": REQUIRED},
        {"model_type": ("siglip",)},
        # The embedding of tokens is tied to nothing.
        ("tie_word_embeddings",),
    )
    read_architecture(settings, {"SiglipModel": None}, "SiglipModel")
    image = read_settings(
        c["vision_config"] or {},
        defaults_of(_IMAGE),
        {"model_type": ("siglip_vision_model",), "vision_use_head": (True,)},
    )
    for name in ("image_size", "patch_size"):
        image[name] = read_side(image[name], name)
    text = read_settings(
        c["text_config"] or {},
        defaults_of(_TEXT) | {"eos_token_id": 49407},
        {"model_type": ("siglip_text_model",)},
    )
    return {
        "image": SiglipImageConfig(**read_fields(image, _IMAGE)),
        "text": SiglipTextConfig(**read_fields(text, _TEXT)),
    }


def write(config: SiglipConfig) -> dict[str, Any]:
    image, text = write_fields(config.image, _IMAGE), write_fields(config.text, _TEXT)
    text |= {"projection_size": config.text.outputs or config.text.width}
    return {
        "architectures": ["SiglipModel"],
        "model_type": "siglip",
        "vision_config": image | {"model_type": "siglip_vision_model"},
        "text_config": text | {"model_type": "siglip_text_model"},
    }


def tensors(config: SiglipConfig) -> dict[str, Tensor]:
    """Maps each array to its published tensors. Q, K and V of the pooler are in one."""
    image, text, kept = "vision_model.", "text_model.", "rows width -> rows width"
    positions = "embeddings.position_embedding.weight"
    return {
        **patches("image/", image + "embeddings.patch_embedding"),
        "image/position_embed": Tensor(image + positions, kept),
        **encoder_layers("image/layers/", image, config.image.heads),
        **norm("image/norm", image + "post_layernorm"),
        **_pooler("image/pooler/", image + "head.", config.image.heads),
        "text/embed": Tensor(text + "embeddings.token_embedding.weight", EMBED),
        "text/position_embed": Tensor(text + positions, kept),
        **encoder_layers("text/layers/", text, config.text.heads),
        **norm("text/norm", text + "final_layer_norm"),
        **linear("text/head", text + "head"),
        "logit_scale": Tensor("logit_scale", "1 -> 1"),
        "logit_bias": Tensor("logit_bias", "1 -> 1"),
    }


def encoder_layers(leaf: str, part: str, heads: int) -> dict[str, Tensor]:
    """Returns the layers of either encoder."""
    layer = part + "encoder.layers.{layer}."
    return {
        **norm(leaf + "attention_norm", layer + "layer_norm1"),
        **attention(leaf, layer + "self_attn.", OUT_PROJ, biases="qkvo", heads=heads),
        **norm(leaf + "mlp_norm", layer + "layer_norm2"),
        **dense(leaf + "up", layer + "mlp.fc1"),
        **dense(leaf + "down", layer + "mlp.fc2"),
    }


def _pooler(leaf: str, name: str, heads: int) -> dict[str, Tensor]:
    inside = name + "attention."
    found = {
        leaf + "query": Tensor(name + "probe", "1 1 width -> width"),
        **attention(leaf + "attention/", inside, {"o": "out_proj"}, biases="o", heads=heads),
        **norm(leaf + "norm", name + "layernorm"),
        **dense(leaf + "up", name + "mlp.fc1"),
        **dense(leaf + "down", name + "mlp.fc2"),
    }
    for i, letter in enumerate("qkv"):
        weight, bias = (inside + f"in_proj_{kind}" for kind in ("weight", "bias"))
        part = "(part heads head_dim) width -> width heads head_dim"
        fixed = {"part": (i, 3), "heads": heads}
        found[f"{leaf}attention/w{letter}"] = Tensor(weight, part, **fixed)
        part = "(part heads head_dim) -> heads head_dim"
        found[f"{leaf}attention/b{letter}"] = Tensor(bias, part, **fixed)
    return found


def example_inputs(config: SiglipConfig, rows: int) -> tuple[Any, ...]:
    """Returns abstract inputs for planning."""
    tokens = jax.ShapeDtypeStruct((rows, config.text.positions), jnp.int32)
    return (*image_inputs(config.image, rows), tokens)
