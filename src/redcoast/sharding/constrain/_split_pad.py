"""Pads arrays of split examples whose padded sizes do not divide."""

import jax
import jax.numpy as jnp

from ..program._trace import Arrays
from ._bound_equation import BoundEquation


def run_split_pad(bound: BoundEquation) -> Arrays | None:
    """The result of padding after the last element of a split dimension, as a concatenation; None
    of others.

    XLA gives the derivative of the padding another shape than its parts have, and then refuses to
    compile it (JAX 0.10.2 to 0.12).
    """
    shardings, (result,) = bound.shardings, bound.results
    padding = bound.equation.params["padding_config"]
    ends: list[int] = []
    for d, (low, high, interior) in enumerate(padding):
        if result.nodes[d] in shardings.uneven and low == interior == 0 and high > 0:
            ends.append(d)
    if not shardings.splits_examples or not ends:
        return None
    x, number = bound.operands
    others = list(padding)
    for d in ends:
        others[d] = (0, 0, 0)
    x = jax.lax.pad(x, number, others)
    for d in ends:
        shape = [*x.shape]
        shape[d] = padding[d][1]
        x = jnp.concatenate([x, jnp.full(shape, number, x.dtype)], d)
    return [x]
