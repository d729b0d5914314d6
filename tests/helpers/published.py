"""Hugging Face directories whose weights a formula makes, alike on every machine, and inputs."""

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

ROWS, LENGTH, PROMPT = 4, 12, 10


def uniform(name: str, count: int) -> np.ndarray:
    """Numbers between -1 and 1 that look random: integers mixed with shifts and products."""
    x = np.arange(count, dtype=np.uint32) + np.uint32(zlib.crc32(name.encode()))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x / 2.0**31 - 1


def formula(name: str, shape: Sequence[int]) -> np.ndarray:
    """A tensor by its published name: scales of norms are about 1, biases about 0, and matrices
    such that the products stay of order 1."""
    x = uniform(name, int(np.prod(shape))).reshape(shape)
    if len(shape) > 1:
        return (x * np.sqrt(6 / np.prod(shape[1:]))).astype(np.float32)
    return np.asarray(x / 3 + name.endswith("weight"), np.float32)


def write_weights(directory: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    tensors = {name: formula(name, shape) for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def shapes_of(directory: Path) -> dict[str, list[int]]:
    """The names and shapes of the tensors in a directory."""
    with safe_open(directory / "model.safetensors", "numpy") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


def settings_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


def make_tokens(name: str, vocab: int, length: int = LENGTH) -> np.ndarray:
    """Tokens above those that may mean padding, or the beginning or end of a text."""
    share = (uniform(name, ROWS * length).reshape(ROWS, length) + 1) / 2
    return (4 + share * (vocab - 4)).astype(np.int32)


def ragged(padding: Sequence[int], length: int = LENGTH) -> np.ndarray:
    """1 at real tokens: in each row, so many are padding on the left, or if negative, the right."""
    at, columns = np.arange(length)[None], np.array(padding)[:, None]
    return ((at >= columns) & (at < length + np.minimum(columns, 0))).astype(np.int32)


def make_batch(settings: Mapping[str, Any], *, pixels: bool, text: bool) -> dict[str, np.ndarray]:
    """The arguments of a model, by their names; and the `targets` of a model of `text`, with a
    `weight` of 1 where a real token follows a real one."""
    batch = {}
    if "num_mel_bins" in settings:
        shape = (ROWS, settings["num_mel_bins"], 2 * settings["max_source_positions"])
        batch["features"] = uniform("features", int(np.prod(shape))).reshape(shape).astype("f4")
    elif pixels:
        vision = settings.get("vision_config", settings.get("encoder", settings))
        shape = (ROWS, vision["num_channels"], vision["image_size"], vision["image_size"])
        batch["pixels"] = uniform("pixels", int(np.prod(shape))).reshape(shape).astype(np.float32)
        if texts := settings.get("text_config"):  # as long as the texts that it is trained on
            positions = texts["max_position_embeddings"]
            batch["tokens"] = make_tokens("tokens", texts["vocab_size"], positions)
    else:
        batch["tokens"] = make_tokens("tokens", settings["vocab_size"])
        batch["mask"] = ragged((0, 3, -3, 5))
    if settings.get("is_encoder_decoder"):
        vocab = settings.get("decoder", settings)["vocab_size"]
        batch["decoder_tokens"] = make_tokens("decoder_tokens", vocab)
        batch["decoder_mask"] = ragged((0, -2, 0, -6))
    if text:
        name = "decoder_" if "decoder_tokens" in batch else ""
        mask = batch[f"{name}mask"]
        batch["targets"] = np.roll(batch[f"{name}tokens"], -1, axis=1)
        batch["weight"] = np.pad(mask[:, 1:] * mask[:, :-1], ((0, 0), (0, 1)))
    return batch


def apply(model: Any, batch: Mapping[str, Any]) -> Any:
    inputs = [
        batch[name] for name in ("pixels", "features", "tokens", "decoder_tokens") if name in batch
    ]
    masks = {name: batch[name] for name in ("mask", "decoder_mask") if name in batch}
    return model(*inputs, **masks)


def rows_of(outputs: Any, batch: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """What a model gives for each row, without that for padding."""
    mask = batch.get("decoder_mask", batch.get("mask"))
    if mask is None or outputs.ndim < 3:
        return list(np.asarray(outputs))
    return [row[real == 1] for row, real in zip(np.asarray(outputs), mask, strict=True)]


def sample(row: np.ndarray) -> np.ndarray:
    """Some of what a model gives for a row: at the last token, or of all labels."""
    return row[-1, ::3] if row.ndim > 1 else row
