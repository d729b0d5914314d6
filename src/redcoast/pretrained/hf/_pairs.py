"""The settings and the tensors that CLIP and SigLIP share in Hugging Face's format: those of an
encoder of images and one of texts."""

import jax
import jax.numpy as jnp

from ...models import ClipConfig, SiglipConfig
from .._settings import FieldNames, Fields, Implemented, Settings, read_settings
from .._tensors import Tensor
from ._labels import image_inputs, read_sides
from ._tables import EMBED, OUT_PROJ, TABLE, attention, dense, norm

BUFFERS = (r"\.embeddings\.position_ids$",)
IMAGE, TEXT = "vision_model.", "text_model."
# The size of a photograph, and the tokens that begin a text and pad it.
OF_IMAGES = {"image": ("image_size", 224), "channels": ("num_channels", 3)}
OF_TEXTS = {"bos": ("bos_token_id", 49406), "pad": ("pad_token_id", 1)}


def read_encoder(
    settings: Settings | None, fields: FieldNames, only: Implemented, ignored: str = ""
) -> Fields:
    """Reads the settings of one encoder, which are often only those that differ from the base
    size."""
    # Only an encoder of texts has tokens, one of which ends a text.
    of_images = "image" in fields
    defaults = {}
    if not of_images:
        defaults = {"eos_token_id": 49407}
    c, values = read_settings(settings or {}, fields, defaults, only=only, ignored=ignored)
    if of_images:
        values |= read_sides(c)
    return values


def pair_tensors(config: ClipConfig | SiglipConfig) -> dict[str, Tensor]:
    """Returns the positions, the layers and the final norm of both encoders, and the embedding of
    tokens."""
    positions = "embeddings.position_embedding.weight"
    return {
        "image/position_embed": Tensor(IMAGE + positions, TABLE),
        **_encoder_layers("image/layers/", IMAGE, config.image.heads),
        **norm("image/norm", IMAGE + "post_layernorm"),
        "text/embed": Tensor(TEXT + "embeddings.token_embedding.weight", EMBED),
        "text/position_embed": Tensor(TEXT + positions, TABLE),
        **_encoder_layers("text/layers/", TEXT, config.text.heads),
        **norm("text/norm", TEXT + "final_layer_norm"),
    }


def _encoder_layers(leaf: str, part: str, heads: int) -> dict[str, Tensor]:
    layer = part + "encoder.layers.{layer}."
    return {
        **norm(leaf + "attention_norm", layer + "layer_norm1"),
        **attention(leaf, layer + "self_attn.", OUT_PROJ, biases="qkvo", heads=heads),
        **norm(leaf + "mlp_norm", layer + "layer_norm2"),
        **dense(leaf + "up", layer + "mlp.fc1"),
        **dense(leaf + "down", layer + "mlp.fc2"),
    }


def example_inputs(
    config: ClipConfig | SiglipConfig, rows: int
) -> tuple[jax.ShapeDtypeStruct, ...]:
    # A text is padded to all positions.
    tokens = jax.ShapeDtypeStruct((rows, config.text.positions), jnp.int32)
    return (*image_inputs(config.image, rows), tokens)
