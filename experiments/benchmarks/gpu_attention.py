"""cuDNN's attention on this GPU, compared with attention without a kernel in float32.

    pip install "redcoast[experiments,cuda12]" && python experiments/benchmarks/gpu_attention.py

Each line has one kind of mask and one shape: batch, queries, keys, heads, key heads, and size of a
head. It says whether the compiled program calls cuDNN, and prints the maximum errors of the output
and of the gradients of queries, keys, values and, where there is one, the bias, each as a share of
the largest absolute value. The inputs are random and in bfloat16.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import PyTree

from redcoast.models._attention import AllReal, Visible, attend, causal_view, full_view
from redcoast.models._view import View

# batch, queries, keys, heads, key heads, size of a head
SHAPES = (
    (2, 256, 256, 4, 2, 64),
    (2, 257, 257, 4, 4, 128),
    (3, 130, 130, 6, 2, 96),
    (2, 256, 256, 4, 1, 256),
    (2, 33, 33, 4, 4, 72),
    (2, 1024, 1024, 4, 2, 128),
)
CROSS = ((2, 100, 181, 4, 4, 64), (2, 101, 180, 4, 4, 64))
LIMIT = 0.05  # of the largest absolute value; bfloat16 has eight bits


def main() -> None:
    """Prints a line for each case, and fails if an error is above 5 %."""
    wrong = []
    for name, shape, visible, has_bias in cases():
        kernel, errors = compare(shape, visible, has_bias)
        print(name, shape, "cuDNN" if kernel else "-", " ".join(f"{x:.1e}" for x in errors))
        if not max(errors) < LIMIT:
            wrong.append(f"{name} {shape}")
    if wrong:
        raise SystemExit(f"Errors above {LIMIT:.0%}: {', '.join(wrong)}.")


def cases() -> Iterator[tuple[str, Any, Callable[[], Visible], bool]]:
    """Yields a name, a shape, a function that returns the mask, and whether there is a bias."""
    for shape in SHAPES:
        batch, length = shape[:2]
        every = AllReal(length)
        counts = np.linspace(length // 2, length, batch).astype(int)[:, None]
        padded = jnp.asarray(np.arange(length)[None] < counts)
        thirds = np.broadcast_to(np.arange(length) // (length // 3), (batch, length))
        segments = jnp.asarray(thirds.astype(np.int32))
        yield "causal", shape, lambda x=every: causal_view(x), False
        yield "causal, window", shape, lambda x=every: causal_view(x, window=17), False
        yield "causal, padded", shape, lambda x=padded: causal_view(x), False
        yield "causal, packed", shape, lambda x=every, s=segments: causal_view(x, segments=s), False
        yield "causal, bias", shape, lambda x=every: causal_view(x), True
        yield "full", shape, lambda x=every: full_view(x), False
        yield "full, window", shape, lambda x=every: full_view(x, window=9), False
        yield "full, padded", shape, lambda x=padded: full_view(x), False
        yield "full, packed", shape, lambda x=every, s=segments: full_view(x, s), False
        yield "full, bias", shape, lambda x=every: full_view(x), True
    for shape in CROSS:
        yield "cross", shape, View, False


def compare(shape: Any, visible: Callable[[], Visible], has_bias: bool) -> tuple[bool, list[float]]:
    """Whether cuDNN is called, and the errors of the output and the gradients."""
    batch, queries, keys, heads, kv_heads, size = shape
    shapes = [(batch, queries, heads, size), *[(batch, keys, kv_heads, size)] * 2]
    if has_bias:
        shapes.append((1, heads, queries, keys))
    *seeds, last = jax.random.split(jax.random.key(0), len(shapes) + 1)
    normal = lambda key, shape: jax.random.normal(key, shape).astype(jnp.bfloat16)
    arrays = [normal(*pair) for pair in zip(seeds, shapes, strict=True)]
    cotangent = jax.random.normal(last, shapes[0])

    def summed(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None = None) -> PyTree:
        out = attend(q, k, v, visible=visible(), bias=bias).astype(jnp.float32)
        return jnp.sum(out * cotangent), out

    gradients = jax.jit(jax.grad(summed, argnums=tuple(range(len(arrays))), has_aux=True))
    compiled = gradients.lower(*arrays).compile()
    ours = compiled(*arrays)
    with jax.default_matmul_precision("highest"):
        exact = gradients(*[x.astype(jnp.float32) for x in arrays])
    pairs = zip(jax.tree.leaves(ours[::-1]), jax.tree.leaves(exact[::-1]), strict=True)
    errors = [np.abs(np.float32(x) - y).max() / np.abs(y).max() for x, y in pairs]
    return "fmha" in str(compiled.as_text()), [float(x) for x in errors]


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
