"""Marks in a traced program, with which redcoast's models pass information to the planner.

A mark is an identity with its own primitive, so it cannot be confused with names in user code.
"""

from enum import Enum

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Shaped


class Mark(Enum):
    """The meaning of a mark."""

    WHOLE_SEQUENCE = "its sequence is needed as a whole from here on"
    ONLY_LARGEST = "only its largest element is used, and only to skip needless work"


# How to run, trace, compile, batch and transpose it: as the identity.
_mark_p = Primitive("redcoast_mark")
_mark_p.def_impl(lambda x, *, mark: x)
_mark_p.def_abstract_eval(lambda aval, *, mark: aval)
mlir.register_lowering(_mark_p, lambda context, x, *, mark: [x])
batching.defvectorized(_mark_p)
ad.deflinear2(_mark_p, lambda cotangent, x, *, mark: [cotangent])


def gather_sequence(x: Array) -> Array:
    """Returns `x`, and marks it in a program: its sequence is needed as a whole from here on.

    The sequence is the third dimension from the last of (batch, keys, heads, head_dim), and the
    last of (batch, keys).
    """
    return _mark_p.bind(x, mark=Mark.WHOLE_SEQUENCE)


def gathered_dimension(equation: JaxprEqn) -> int | None:
    """The dimension that an equation marks with `gather_sequence`, if it does."""
    if _mark_of(equation) is not Mark.WHOLE_SEQUENCE:
        return None
    rank = len(equation.invars[0].aval.shape)  # pyright: ignore[reportAttributeAccessIssue]
    if rank >= 4:
        return rank - 3
    return rank - 1


@jax.jit
def most_of_rows(x: Shaped[Array, "..."]) -> Shaped[Array, ""]:
    """Returns the largest element of `x`, and marks it: results do not depend on it.

    A pipeline, which computes with some of the rows at a time, may take the largest element of
    these instead.
    """
    return jnp.max(_mark_p.bind(x, mark=Mark.ONLY_LARGEST))


def is_most(equation: JaxprEqn) -> bool:
    """Whether an equation marks what only the largest element of is used."""
    return _mark_of(equation) is Mark.ONLY_LARGEST


def _mark_of(equation: JaxprEqn) -> Mark | None:
    if equation.primitive is not _mark_p:
        return None
    return equation.params["mark"]
