"""The settings and tensors of ViT in Hugging Face's format."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from functools import partial

from ...models.vit import ViTConfig
from .._settings import Fields, Settings, read_settings, write_fields
from .._tensors import Tensor
from ._labels import architecture_of, image_inputs, read_architecture, read_labels, write_labels
from ._tables import BERT_FIELDS, attention, dense, linear, norm, patches, with_prefix

_FIELDS = {
    **BERT_FIELDS,
    "channels": ("num_channels", 3),
    "pooler_size": ("pooler_output_size", None),
    "qkv_bias": ("qkv_bias", True),
}
VIT_ATTENTION = {
    "q": "attention.query",
    "k": "attention.key",
    "v": "attention.value",
    "o": "output.dense",
}
_HEADS = {"ViTModel": None, "ViTForImageClassification": "classification"}


def read(settings: Settings) -> Fields:
    defaults = {"image_size": 224, "patch_size": 16}
    only = {
        "model_type": ("vit",),
        "pooler_act": ("tanh",),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
    }
    # Settings of masked image modelling, and of text models.
    ignored = "encoder_stride tie_word_embeddings"
    c, fields = read_settings(settings, _FIELDS, defaults, only=only, ignored=ignored)
    head = read_architecture(settings, _HEADS, "ViTModel")
    fields |= {"head": head, "pooler": head is None}
    fields |= {"image": _pair(c["image_size"]), "patch": _pair(c["patch_size"])}
    if head:
        fields |= read_labels(settings)
    # Stated in files even where it is the default.
    if c["pooler_output_size"] == c["hidden_size"]:
        fields["pooler_size"] = None
    return fields


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    # One number is the side of a square.
    if isinstance(size, int):
        return size, size
    height, width = size
    return height, width


def _size(pair: tuple[int, int]) -> int | list[int]:
    if pair[0] == pair[1]:
        return pair[0]
    return list(pair)


def write(config: ViTConfig) -> Settings:
    c = config
    name = architecture_of(c.head, _HEADS)
    settings = write_fields(c, _FIELDS)
    settings |= {"image_size": _size(c.image), "patch_size": _size(c.patch)}
    settings |= {"pooler_output_size": c.pooler_size or c.width} | write_labels(c)
    return settings | {"architectures": [name], "model_type": "vit"}


def settle(config: ViTConfig, names: Collection[str]) -> ViTConfig:
    """The settings do not say whether there is a pooler."""
    pooler = config.head is None and any(name.endswith("pooler.dense.weight") for name in names)
    return dataclasses.replace(config, pooler=pooler)


def tensors(config: ViTConfig) -> dict[str, Tensor]:
    base, biases, modules = "", "o", VIT_ATTENTION
    if config.head:
        base = "vit."
    if config.qkv_bias:
        biases = "qkvo"
    embeddings, layer = base + "embeddings.", base + "encoder.layer.{layer}."
    positions = embeddings + "position_embeddings"
    table = {
        **patches("", embeddings + "patch_embeddings.projection"),
        "cls_token": Tensor(embeddings + "cls_token", "1 1 width -> width"),
        "position_embed": Tensor(positions, "1 tokens width -> tokens width"),
        **norm("layers/attention_norm", layer + "layernorm_before"),
        **attention("layers/", layer + "attention.", modules, biases=biases, heads=config.heads),
        **norm("layers/mlp_norm", layer + "layernorm_after"),
        **dense("layers/up", layer + "intermediate.dense"),
        **dense("layers/down", layer + "output.dense"),
        **norm("norm", base + "layernorm"),
    }
    if config.head:
        return table | linear("head", "classifier")
    if config.pooler:
        return table | linear("pooler", "pooler.dense")
    return table


# The modules of `transformers` 5, whose files keep the names of earlier versions.
VIT_MODULES = {
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
}
_MODULES = {
    "encoder.layer.": "layers.",
    **VIT_MODULES,
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
}


def rename_modules(modules: Mapping[str, str], name: str) -> str:
    """The name that a tensor of the files has in a model of `transformers` 5, from new names of
    modules by their old ones."""
    for old, new in modules.items():
        name = name.replace(old, new)
    return name


module_name = partial(rename_modules, _MODULES)


def duplicates(config: ViTConfig) -> dict[str, str]:
    if config.head:
        return {}
    return with_prefix("vit.", tensors(config), config.layers)


example_inputs = image_inputs
