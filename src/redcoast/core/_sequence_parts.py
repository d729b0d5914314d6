"""The number of parts into which a program that is traced divides its sequences.

A plan may split the sequence of a batch that has fewer rows than there are devices. Attention and
losses in chunks then have a dimension for the parts, which is split over the devices, so that every
device computes with its own tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax.extend.core import JaxprEqn
from jaxtyping import Array

# JAX's caches depend on it, so that nothing that was traced with parts is used without them.
_parts = jax.make_user_context()
_NAME = "gather_sequence"


def sequence_parts() -> int:
    """The number of parts of a sequence; 1 if it is not split."""
    return _parts.value or 1


@contextmanager
def divided_into(parts: int) -> Iterator[None]:
    """Programs that are traced inside divide their sequences into parts."""
    with _parts(parts):
        yield


@jax.jit
def gather_sequence(x: Array) -> Array:
    """Returns `x`, and marks it in a program: its sequence is needed as a whole from here on.

    The sequence is the third dimension from the last of (batch, keys, heads, head_dim), and the
    last of (batch, keys).
    """
    return x


def gathered_dimension(equation: JaxprEqn) -> int | None:
    """The dimension that an equation marks with `gather_sequence`, if it does."""
    name: Any = equation.params.get("name")
    if name != _NAME or equation.primitive.name not in ("jit", "pjit"):
        return None
    rank = len(equation.invars[0].aval.shape)  # pyright: ignore[reportAttributeAccessIssue]
    return rank - 3 if rank >= 4 else rank - 1
