"""The sizes of transformers, and their batches."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Sizes:
    layers: int = 4
    width: int = 256
    heads: int = 8
    kv_heads: int = 8
    hidden: int = 1024
    vocab: int = 4096
    seq: int = 128
    batch: int = 16


SMALL = Sizes()
GROUPED = Sizes(heads=16, kv_heads=8)
LLAMA_7B = Sizes(32, 4096, 32, 32, 11_008, 32_000, 1024, 8)
OPT_66B = Sizes(64, 9216, 72, 72, 36_864, 50_272, 512, 64)


def token_batch(sizes: Sizes, *names: str) -> Callable[[], Any]:
    """Creates a function that returns tokens, the next tokens as labels, and other token arrays."""

    def batch() -> dict[str, np.ndarray]:
        rng = np.random.default_rng(0)
        shape = (sizes.batch, sizes.seq)
        arrays = {name: _tokens(rng, sizes.vocab, shape) for name in names}
        text = _tokens(rng, sizes.vocab, (sizes.batch, sizes.seq + 1))
        return {"tokens": text[:, :-1], "labels": text[:, 1:]} | arrays

    return batch


def abstract_batch(sizes: Sizes) -> Callable[[], Any]:
    array = jax.ShapeDtypeStruct((sizes.batch, sizes.seq), jnp.int32)
    return lambda: {"tokens": array, "labels": array}


def _tokens(rng: np.random.Generator, vocab: int, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(0, vocab, shape).astype(np.int32)
