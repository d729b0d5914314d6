from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn


def bind_again(equation: JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    """The results of an equation's primitive on other inputs: one step of an interpreter."""
    params = equation.primitive.get_bind_params(equation.params)
    # Functions to call are among the parameters in newer versions of JAX, and beside them in older.
    subfuns, params = params if isinstance(params, tuple) else ((), params)
    with equation.ctx.manager:
        found = equation.primitive.bind(*subfuns, *inputs, **params)
    return list(found) if equation.primitive.multiple_results else [found]
