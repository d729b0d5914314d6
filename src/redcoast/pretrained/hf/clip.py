"""The settings and tensors of CLIP in Hugging Face's format."""

from ...models.clip import ClipConfig, ClipImageConfig, ClipTextConfig
from .._settings import FieldNames, Fields, Settings, read_settings, write_fields
from .._tensors import Tensor
from ._labels import read_architecture
from ._pairs import BUFFERS, IMAGE, OF_IMAGES, OF_TEXTS, example_inputs, pair_tensors, read_encoder
from ._tables import KERNEL, TURNED, VECTOR, norm

__all__ = ["BUFFERS", "example_inputs", "read", "tensors", "write"]

_BOTH: FieldNames = {
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
    **OF_IMAGES,
    "patch": ("patch_size", 32),
}
_TEXT = {
    **_BOTH,
    "width": ("hidden_size", 512),
    "heads": ("num_attention_heads", 8),
    "hidden": ("intermediate_size", 2048),
    "vocab": ("vocab_size", 49408),
    "positions": ("max_position_embeddings", 77),
    **OF_TEXTS,
}
# The entire model determines the size of the outputs.
_IGNORED = "projection_dim"


def read(settings: Settings) -> Fields:
    # The oldest files have settings of the two encoders twice.
    parts = ("text_config", "vision_config", "text_config_dict", "vision_config_dict")
    defaults = {**dict.fromkeys(parts), "projection_dim": 512}
    # The embedding of tokens is tied to nothing.
    options = {"only": {"model_type": ("clip",)}, "ignored": "tie_word_embeddings"}
    c, _ = read_settings(settings, {}, defaults, **options)
    read_architecture(settings, {"CLIPModel": None}, "CLIPModel")
    # If a setting is there twice, the second one counts.
    text = {**(c["text_config"] or {}), **(c["text_config_dict"] or {})}
    image = {**(c["vision_config"] or {}), **(c["vision_config_dict"] or {})}
    image_kind = {"model_type": ("clip_vision_model",)}
    text_kind = {"model_type": ("clip_text_model",)}
    return {
        "image": ClipImageConfig(**read_encoder(image, _IMAGE, image_kind, _IGNORED)),
        "text": ClipTextConfig(**read_encoder(text, _TEXT, text_kind, _IGNORED)),
        "outputs": c["projection_dim"],
    }


def write(config: ClipConfig) -> Settings:
    image, text = write_fields(config.image, _IMAGE), write_fields(config.text, _TEXT)
    # All three configurations have it.
    size = {"projection_dim": config.outputs}
    return {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "vision_config": image | size | {"model_type": "clip_vision_model"},
        "text_config": text | size | {"model_type": "clip_text_model"},
        **size,
    }


def tensors(config: ClipConfig) -> dict[str, Tensor]:
    return {
        **pair_tensors(config),
        "image/patch_embed": Tensor(IMAGE + "embeddings.patch_embedding.weight", KERNEL),
        "image/class_embed": Tensor(IMAGE + "embeddings.class_embedding", VECTOR),
        # The name is misspelt in the files.
        **norm("image/first_norm", IMAGE + "pre_layrnorm"),
        "image/head": Tensor("visual_projection.weight", TURNED),
        "text/head": Tensor("text_projection.weight", TURNED),
        # A single number in the file, and an array of one element in the model.
        "logit_scale": Tensor("logit_scale", "-> 1"),
    }
