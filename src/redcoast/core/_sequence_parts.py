"""The number of parts into which a traced program divides its sequences.

A plan may split the sequence of a batch that has fewer rows than there are devices. Attention and
losses in chunks then have a dimension for the parts, which is split over the devices, so that every
device computes with its own tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import jax

# JAX's caches depend on it, so that a function that was traced with parts is traced again without.
_parts = jax.make_user_context()


def sequence_parts() -> int:
    """The number of parts of a sequence; 1 if it is not split."""
    return _parts.value or 1


@contextmanager
def divided_into(parts: int) -> Iterator[None]:
    """Programs that are traced inside divide their sequences into parts."""
    with _parts(parts):
        yield
