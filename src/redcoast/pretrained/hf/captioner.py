"""The settings and tensors of image captioners in Hugging Face's format."""

import dataclasses
from collections.abc import Collection

import jax
import jax.numpy as jnp

from ...models.captioner import CaptionerConfig
from ...models.gpt2 import GPT2Config
from ...models.vit import ViTConfig
from .._settings import REQUIRED, Fields, Settings, published_ids, read_settings, token_ids
from .._tensors import Tensor
from . import gpt2, vit
from ._labels import read_architecture
from ._tables import linear

BUFFERS = tuple(pattern.replace("^", r"^decoder\.", 1) for pattern in gpt2.BUFFERS)

_IDS = ("decoder_start_token_id", "bos_token_id", "eos_token_id", "pad_token_id")


def read(settings: Settings) -> Fields:
    defaults = {"encoder": REQUIRED, "decoder": REQUIRED, **dict.fromkeys(_IDS)}
    only = {"model_type": ("vision-encoder-decoder",), "is_encoder_decoder": (True,)}
    # The embeddings of the two parts are never tied. The decoder has its own settings for these.
    ignored = "tie_word_embeddings vocab_size is_decoder add_cross_attention"
    c, _ = read_settings(settings, {}, defaults, only=only, ignored=ignored)
    model = "VisionEncoderDecoderModel"
    read_architecture(settings, {model: None}, model)
    decoder = dict(c["decoder"])
    # Missing token ids are taken from the decoder. Captions start with `bos` by default.
    for name in _IDS:
        if c[name] is None:
            c[name] = decoder.get(name)
    start, bos, eos, pad = map(c.get, _IDS)
    if start is None:
        start = bos
    return {
        # The encoder has no head here, whatever its own settings are.
        "encoder": ViTConfig(**vit.read({**c["encoder"], "architectures": None})),
        "decoder": GPT2Config(**gpt2.read(decoder)),
        "decoder_start": start,
        "eos": token_ids(eos),
        "bos": bos,
        "pad": pad,
    }


def write(config: CaptionerConfig) -> Settings:
    c = config
    start = {"decoder_start_token_id": c.decoder_start, "is_encoder_decoder": True}
    return {
        **published_ids(eos=c.eos, bos=c.bos, pad=c.pad),
        **start,
        "encoder": vit.write(c.encoder),
        "decoder": gpt2.write(c.decoder) | {"is_decoder": True},
        "tie_word_embeddings": False,
        "architectures": ["VisionEncoderDecoderModel"],
        "model_type": "vision-encoder-decoder",
    }


def settle(config: CaptionerConfig, names: Collection[str]) -> CaptionerConfig:
    """The settings do not say whether the encoder has a pooler (which is not used)."""
    encoder = vit.settle(config.encoder, [n for n in names if n.startswith("encoder.")])
    return dataclasses.replace(config, encoder=encoder)


def tensors(config: CaptionerConfig) -> dict[str, Tensor]:
    # The tables of both parts, under their own names.
    parts = {"encoder": vit.tensors(config.encoder), "decoder": gpt2.tensors(config.decoder)}
    tensors_by_leaf = {}
    for part, table in parts.items():
        for leaf, tensor in table.items():
            name = f"{part}.{tensor.name}"
            tensors_by_leaf[f"{part}/{leaf}"] = Tensor(name, tensor.pattern, **dict(tensor.fixed))
    # `transformers` projects the encoder's outputs only where the widths differ.
    if config.encoder.width != config.decoder.width:
        tensors_by_leaf |= linear("bridge", "enc_to_dec_proj")
    return tensors_by_leaf


def module_name(name: str) -> str:
    # Only the encoder has other names in a model of `transformers` 5.
    of_encoder = name.removeprefix("base_model.model.").startswith("encoder.")
    if of_encoder:
        return vit.module_name(name)
    return name


def duplicates(config: CaptionerConfig) -> dict[str, str]:
    if not config.decoder.tied:
        return {}
    return {"decoder.lm_head.weight": "decoder.transformer.wte.weight"}


def example_inputs(config: CaptionerConfig, rows: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    tokens = jax.ShapeDtypeStruct((rows, min(128, config.positions)), jnp.int32)
    return (*vit.example_inputs(config.encoder, rows), tokens)
