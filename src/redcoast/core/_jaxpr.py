from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn


def bind_again(equation: JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    """Binds an equation's primitive to other inputs, as one step of a jaxpr interpreter."""
    params = equation.primitive.get_bind_params(equation.params)
    # Older versions of JAX return the functions to call separately from the parameters.
    subfuns, params = params if isinstance(params, tuple) else ((), params)
    with equation.ctx.manager:
        found = equation.primitive.bind(*subfuns, *inputs, **params)
    return list(found) if equation.primitive.multiple_results else [found]
