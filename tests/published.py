"""Hugging Face directories whose weights a formula makes, alike on every machine, and inputs."""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

ROWS, LENGTH, PROMPT = 4, 12, 10


def uniform(name: str, count: int) -> np.ndarray:
    """Numbers between -1 and 1 that look random: integers mixed with shifts and products."""
    x = np.arange(count, dtype=np.uint32) + np.uint32(zlib.crc32(name.encode()))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x / 2.0**31 - 1


def formula(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor by its published name: scales of norms are about 1, biases about 0, and matrices
    such that their products stay of order 1."""
    x = uniform(name, int(np.prod(shape))).reshape(shape)
    if len(shape) > 1:
        x = x * np.sqrt(6 / np.prod(shape[1:]))
    else:
        x = x / 3 + name.endswith("weight")
    return x.astype(np.float32)


def write_weights(directory: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    tensors = {name: formula(name, tuple(shape)) for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def rewrite_weights(directory: Path) -> dict[str, tuple[int, ...]]:
    """Puts the formula's values into a directory's floating tensors; their names and shapes."""
    tensors = load_file(directory / "model.safetensors")
    shapes = {name: x.shape for name, x in tensors.items() if x.dtype.kind == "f"}
    if len(shapes) < len(tensors):
        raise ValueError(f"Not floating: {tensors.keys() - shapes.keys()}.")
    write_weights(directory, shapes)
    return shapes


def settings_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


def make_tokens(name: str, vocab: int, length: int = LENGTH) -> np.ndarray:
    """Tokens above those that may mean padding, or the beginning or end of a text."""
    share = (uniform(name, ROWS * length).reshape(ROWS, length) + 1) / 2
    return (4 + share * (vocab - 4)).astype(np.int32)


def ragged(padding: tuple[int, ...], length: int = LENGTH) -> np.ndarray:
    """1 at real tokens: for each row, so many are padding on the left, or negative, the right."""
    at = np.arange(length)[None]
    columns = np.array(padding)[:, None]
    return ((at >= columns) & (at < length + np.minimum(columns, 0))).astype(np.int32)


def make_batch(settings: dict[str, Any], *, pixels: bool, text: bool) -> dict[str, np.ndarray]:
    """The arguments of a model, by their names; and the `targets` of a model of `text`, with a
    weight of 1 where a real token follows a real one."""
    batch = {}
    if pixels:
        vision = settings.get("encoder", settings)
        shape = (ROWS, vision["num_channels"], vision["image_size"], vision["image_size"])
        batch["pixels"] = uniform("pixels", int(np.prod(shape))).reshape(shape).astype(np.float32)
    else:
        batch["tokens"] = make_tokens("tokens", settings["vocab_size"])
        batch["mask"] = ragged((0, 3, -3, 5))
    if settings.get("is_encoder_decoder"):
        vocab = settings.get("decoder", settings)["vocab_size"]
        batch["decoder_tokens"] = make_tokens("decoder_tokens", vocab)
        batch["decoder_mask"] = ragged((0, -2, 0, -6))
    if text:
        tokens = batch.get("decoder_tokens", batch.get("tokens"))
        mask = batch.get("decoder_mask", batch.get("mask"))
        batch["targets"] = np.roll(tokens, -1, axis=1)
        batch["weight"] = np.pad(mask[:, 1:] * mask[:, :-1], ((0, 0), (0, 1)))
    return batch
