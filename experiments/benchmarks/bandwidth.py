"""The bandwidth of the memory, and the bytes that decoding reads for each token."""

import statistics
import time
from collections.abc import Callable
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from _timing import elapsed
from jaxtyping import PyTree


def copy_bandwidth(size: int, rounds: int = 5) -> float:
    """Bytes read and written per second by a copy of so many bytes to where they were."""
    # A copy to new memory would measure how fast the operating system hands it out.
    copy, many = jax.jit(lambda x: x + 1, donate_argnums=0), 10
    x = jnp.zeros(size // 4, jnp.int32)

    def run() -> None:
        nonlocal x
        for _ in range(many):
            x = copy(x)
        jax.block_until_ready(x)

    return many * 2 * size / seconds_of(run, rounds)


def bytes_read(model: PyTree, *, batch: int, length: int) -> int:
    """Bytes that a decoder reads for one new token of each row: the weights, and the keys and
    values of `length` tokens of each row."""
    c, itemsize = model.config, model.embed.dtype.itemsize
    # Of an embedding that is not the head as well, only a few rows are read.
    weights = parameters(model) - (0 if c.tied else model.embed.size)
    return itemsize * (weights + batch * length * 2 * c.layers * c.kv_heads * c.head_dim)


def parameters(model: PyTree) -> int:
    return sum(prod(x.shape) for x in jax.tree.leaves(model))


def seconds_of(run: Callable[[], Any], rounds: int) -> float:
    """The median time of a call, after one that compiles."""
    run()
    return statistics.median(elapsed(run, time.perf_counter) for _ in range(rounds))
