"""A marker for what a program asks of all rows of a batch only to skip needless work."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jaxtyping import Array, Shaped

_NAME = "most_of_rows"


@jax.jit
def most_of_rows(x: Shaped[Array, "..."]) -> Shaped[Array, ""]:
    """Returns the largest element of `x`, and marks it: results do not depend on it.

    A pipeline, which computes with some of the rows at a time, may take the largest element of
    these instead.
    """
    return jnp.max(x)


def is_most(equation: JaxprEqn) -> bool:
    """Whether an equation is a call of `most_of_rows`."""
    name: Any = equation.params.get("name")
    return name == _NAME and equation.primitive.name in ("jit", "pjit")
