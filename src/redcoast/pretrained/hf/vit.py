"""The settings and tensors of ViT in Hugging Face's format."""

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from ...models.vit import ViTConfig
from .._settings import REQUIRED, read_fields, read_settings, write_fields
from .._tensors import Tensor, tensor_names
from ._labels import read_architecture, read_labels, write_labels
from ._tables import HEADS_BIAS, INTO_HEADS, OUT_OF_HEADS, TURNED, VECTOR, linear, norm

_NAMES = {
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "hidden": "intermediate_size",
    "channels": "num_channels",
    "pooler_size": "pooler_output_size",
    "activation": "hidden_act",
    "norm_eps": "layer_norm_eps",
    "qkv_bias": "qkv_bias",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
}
_HEADS = {"ViTModel": None, "ViTForImageClassification": "classification"}


def read(settings: dict[str, Any]) -> dict[str, Any]:
    defaults = {
        **dict.fromkeys(_NAMES.values(), REQUIRED),
        "image_size": 224,
        "patch_size": 16,
        "num_channels": 3,
        "pooler_output_size": None,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "qkv_bias": True,
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    }
    only = {
        "model_type": ("vit",),
        "pooler_act": ("tanh",),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
        "is_encoder_decoder": (False,),
    }
    # Settings of masked image modelling, and of text models.
    ignored = """
        encoder_stride bos_token_id eos_token_id pad_token_id decoder_start_token_id
        tie_word_embeddings
    """
    c = read_settings(settings, defaults, only, tuple(ignored.split()))
    head = read_architecture(settings, _HEADS, "ViTModel")
    fields = read_fields(c, _NAMES)
    fields |= read_labels(settings) if head else {}
    size = None if c["pooler_output_size"] == c["hidden_size"] else c["pooler_output_size"]
    fields |= {"image": _pair(c["image_size"]), "patch": _pair(c["patch_size"])}
    return fields | {"head": head, "pooler": head is None, "pooler_size": size}


def _pair(size: Any) -> tuple[int, int]:
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def _size(pair: tuple[int, int]) -> int | list[int]:
    return pair[0] if pair[0] == pair[1] else list(pair)


def write(config: ViTConfig) -> dict[str, Any]:
    c = config
    name = next(name for name, head in _HEADS.items() if head == c.head)
    settings = write_fields(c, _NAMES)
    settings |= {"image_size": _size(c.image), "patch_size": _size(c.patch)}
    settings |= {"pooler_output_size": c.pooler_size or c.width} | write_labels(c)
    return settings | {"architectures": [name], "model_type": "vit"}


def settle(config: ViTConfig, names: Collection[str]) -> ViTConfig:
    """Completes a configuration from the names of the tensors in the files.

    The settings do not say whether there is a pooler.
    """
    pooler = config.head is None and any(name.endswith("pooler.dense.weight") for name in names)
    return dataclasses.replace(config, pooler=pooler)


def tensors(config: ViTConfig) -> dict[str, Tensor]:
    """Maps each array to its published tensors."""
    base = "vit." if config.head else ""
    embeddings, layer = base + "embeddings.", base + "encoder.layer.{layer}."
    attention = layer + "attention.attention."
    patch = "patch_embeddings.projection."
    kernel = "width channels rows columns -> channels rows columns width"
    fixed = {"heads": config.heads}
    found = {
        "patch_embed": Tensor(embeddings + patch + "weight", kernel),
        "patch_bias": Tensor(embeddings + patch + "bias", VECTOR),
        "cls_token": Tensor(embeddings + "cls_token", "1 1 width -> width"),
        "position_embed": Tensor(
            embeddings + "position_embeddings", "1 tokens width -> tokens width"
        ),
        **norm("layers/attention_norm", layer + "layernorm_before"),
        "layers/wo": Tensor(layer + "attention.output.dense.weight", OUT_OF_HEADS, **fixed),
        "layers/bo": Tensor(layer + "attention.output.dense.bias", VECTOR),
        **norm("layers/mlp_norm", layer + "layernorm_after"),
        **_pair_of("layers/up", "_bias", layer + "intermediate.dense", TURNED),
        **_pair_of("layers/down", "_bias", layer + "output.dense", TURNED),
        **norm("norm", base + "layernorm"),
    }
    for letter, name in {"q": "query", "k": "key", "v": "value"}.items():
        found[f"layers/w{letter}"] = Tensor(f"{attention}{name}.weight", INTO_HEADS, **fixed)
        if config.qkv_bias:
            found[f"layers/b{letter}"] = Tensor(f"{attention}{name}.bias", HEADS_BIAS, **fixed)
    if config.head:
        return found | linear("head", "classifier")
    return found | (linear("pooler", "pooler.dense") if config.pooler else {})


def _pair_of(leaf: str, suffix: str, name: str, pattern: str) -> dict[str, Tensor]:
    bias = Tensor(name + ".bias", VECTOR)
    return {leaf: Tensor(name + ".weight", pattern), leaf + suffix: bias}


# The modules of `transformers` 5, whose files keep the names of earlier versions.
_MODULES = {
    "encoder.layer.": "layers.",
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
}


def module_name(name: str) -> str:
    """Returns the name that a tensor of the files has in a model of `transformers` 5."""
    for old, new in _MODULES.items():
        name = name.replace(old, new)
    return name


def duplicates(config: ViTConfig) -> dict[str, str]:
    """Maps other names under which a file may hold a tensor to the tensor's own name."""
    if config.head:
        return {}
    table = tensors(config).values()
    names = [name for t in table for name in tensor_names(t, (config.layers,)).values()]
    return {"vit." + name: name for name in names}


def example_inputs(config: ViTConfig, rows: int) -> tuple[Any, ...]:
    """Returns abstract inputs for planning."""
    return (jax.ShapeDtypeStruct((rows, config.channels, *config.image), jnp.float32),)
