"""The settings and tensors of SigLIP in Hugging Face's format."""

from ...models.siglip import SiglipConfig, SiglipImageConfig, SiglipTextConfig
from .._settings import REQUIRED, FieldNames, Fields, Settings, read_settings, write_fields
from .._tensors import Tensor
from ._labels import read_architecture
from ._pairs import (
    BUFFERS,
    IMAGE,
    OF_IMAGES,
    OF_TEXTS,
    TEXT,
    example_inputs,
    pair_tensors,
    read_encoder,
)
from ._tables import OUT_PROJ, attention, dense, fused, linear, norm, patches, under

__all__ = ["BUFFERS", "example_inputs", "read", "tensors", "write"]

_BOTH: FieldNames = {
    "width": ("hidden_size", 768),
    "layers": ("num_hidden_layers", 12),
    "heads": ("num_attention_heads", 12),
    "hidden": ("intermediate_size", 3072),
    "activation": ("hidden_act", "gelu_pytorch_tanh"),
    "norm_eps": ("layer_norm_eps", 1e-6),
    "attention_dropout": ("attention_dropout", 0.0),
}
_IMAGE = {**_BOTH, **OF_IMAGES, "patch": ("patch_size", 16)}
_TEXT = {
    **_BOTH,
    "vocab": ("vocab_size", 32000),
    "positions": ("max_position_embeddings", 64),
    "outputs": ("projection_size", None),
    **OF_TEXTS,
}


def read(settings: Settings) -> Fields:
    defaults = {"text_config": REQUIRED, "vision_config": REQUIRED}
    # The embedding of tokens is tied to nothing.
    options = {"only": {"model_type": ("siglip",)}, "ignored": "tie_word_embeddings"}
    c, _ = read_settings(settings, {}, defaults, **options)
    read_architecture(settings, {"SiglipModel": None}, "SiglipModel")
    image_kind = {"model_type": ("siglip_vision_model",), "vision_use_head": (True,)}
    text_kind = {"model_type": ("siglip_text_model",)}
    return {
        "image": SiglipImageConfig(**read_encoder(c["vision_config"], _IMAGE, image_kind)),
        "text": SiglipTextConfig(**read_encoder(c["text_config"], _TEXT, text_kind)),
    }


def write(config: SiglipConfig) -> Settings:
    image, text = write_fields(config.image, _IMAGE), write_fields(config.text, _TEXT)
    text |= {"projection_size": config.text.outputs or config.text.width}
    return {
        "architectures": ["SiglipModel"],
        "model_type": "siglip",
        "vision_config": image | {"model_type": "siglip_vision_model"},
        "text_config": text | {"model_type": "siglip_text_model"},
    }


def tensors(config: SiglipConfig) -> dict[str, Tensor]:
    heads, leaf, name = config.image.heads, "image/pooler/", IMAGE + "head."
    inside = name + "attention."
    table = {
        **pair_tensors(config),
        **patches("image/", IMAGE + "embeddings.patch_embedding"),
        **linear("text/head", TEXT + "head"),
        # Learned numbers, by which similarities become logits.
        "logit_scale": Tensor("logit_scale", "1 -> 1"),
        "logit_bias": Tensor("logit_bias", "1 -> 1"),
        # A learned query, which attends to all patches.
        leaf + "query": Tensor(name + "probe", "1 1 width -> width"),
        **attention(leaf + "attention/", inside, OUT_PROJ, letters="o", biases="o", heads=heads),
        **norm(leaf + "norm", name + "layernorm"),
        **dense(leaf + "up", name + "mlp.fc1"),
        **dense(leaf + "down", name + "mlp.fc2"),
    }
    # The pooler is torch's `MultiheadAttention`, which has Q, K and V in one tensor.
    weight = "(part heads head_dim) width -> width heads head_dim"
    bias = "(part heads head_dim) -> heads head_dim"
    qkv = fused(("wq", "wk", "wv"), inside + "in_proj_weight", weight, heads=heads)
    qkv |= fused(("bq", "bk", "bv"), inside + "in_proj_bias", bias, heads=heads)
    return table | under(leaf + "attention/", qkv)
