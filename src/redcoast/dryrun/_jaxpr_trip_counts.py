"""The trip counts of while loops in a traced program.

As in compiled programs, a trip count is derived from the initial value of the loop's counter, the
amount that the body adds to it, and the bound that it is compared with.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import JaxprEqn

from ..core._control_flow import AnyJaxpr, Call, While, consts_of, control_flow, open_jaxpr
from ..core._jaxpr import evaluate_jaxpr
from ..sharding.operations._rule_table import VIEWS
from .hlo._trip_counts import Carried, Value, added, solve

_COMPARISONS = {"lt": "LT", "le": "LE", "gt": "GT", "ge": "GE", "ne": "NE"}
# Primitives that do not change the value of a scalar integer.
_SAME = VIEWS | {"broadcast_in_dim", "convert_element_type", "pvary"}


def jaxpr_trip_count(loop: While, inputs: Sequence[Value]) -> int | None:
    """Returns how many times a loop's body runs, given the known operands; `None` if unknown."""
    cond_consts, body_consts, start = loop.split(inputs)
    # Evaluates an iteration with symbols: `Carried(i, 1)` after it is a counter that grows by 1.
    carried = [Carried(place, 0) for place in range(len(start))]
    after = _results(loop.body, [*body_consts, *carried])
    compared = _comparison(loop.cond, [*cond_consts, *carried])
    if compared is None:
        return None
    return solve(compared, start.__getitem__, after.__getitem__)


def unchanged(
    body: AnyJaxpr, constants: Sequence[Value], start: Sequence[Value], more: int = 0
) -> list[Value]:
    """The initial values of a loop's carry that no iteration changes, `None` for all others.

    `more` is the number of inputs of the body after the carry.
    """
    carried = [Carried(place, 0) for place in range(len(start))]
    after = _results(body, [*constants, *carried, *[None] * more])
    values: list[Value] = []
    for place, begin in enumerate(start):
        if after[place] == Carried(place, 0):
            values.append(begin)
        else:
            values.append(None)
    return values


def known_results(equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    """Computes an equation's results, as far as they are known integers."""
    name = equation.primitive.name
    unknown: list[Value] = [None] * len(equation.outvars)
    if name == "add":
        return [added(inputs[0], inputs[1], 1)]
    if name == "sub":
        return [added(inputs[0], inputs[1], -1)]
    if name == "mul":
        left, right = inputs
        if isinstance(left, int) and isinstance(right, int):
            return [left * right]
        return unknown
    if name in _SAME and len(equation.outvars) <= len(inputs):
        results = list(unknown)
        for place, var in enumerate(equation.outvars):
            # An array that an integer is broadcast to is no integer.
            if _is_integer(var.aval):
                results[place] = inputs[place]
        return results
    match control_flow(equation):
        case While() as loop:
            _, body_consts, start = loop.split(inputs)
            return unchanged(loop.body, body_consts, start)
        case Call(jaxpr):
            return _results(jaxpr, inputs)
    return unknown


def evaluate_integers(
    jaxpr: AnyJaxpr,
    inputs: Sequence[Value],
    handle: Callable[[int, JaxprEqn, list[Value]], list[Value]],
) -> list[Value]:
    """Evaluates a jaxpr with values that are None where no integer is known."""
    inner = open_jaxpr(jaxpr)
    env: dict[Any, Value] = dict.fromkeys(inner.constvars)
    env.update(zip(inner.constvars, map(_integer, consts_of(jaxpr)), strict=False))
    env.update(zip(inner.invars, inputs, strict=True))
    return evaluate_jaxpr(inner, env, handle, lambda literal: _integer(literal.val))


def _results(jaxpr: AnyJaxpr, inputs: Sequence[Value]) -> list[Value]:
    return evaluate_integers(
        jaxpr, inputs, lambda _, equation, known: known_results(equation, known)
    )


def _integer(x: Any) -> int | None:
    # Constants of a program that is traced within another one have no value yet.
    if isinstance(x, Tracer) or not _is_integer(jax.typeof(x)):
        return None
    return int(x)


def _is_integer(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and aval.shape == () and jnp.issubdtype(dtype, jnp.integer)


def _comparison(jaxpr: AnyJaxpr, inputs: Sequence[Value]) -> tuple[Value, str, Value] | None:
    """The comparison that computes a loop's condition, as operand, direction, operand."""
    computing: list[tuple[JaxprEqn, list[Value]]] = []  # the equation that computes it
    out = open_jaxpr(jaxpr).outvars[0]

    def record(_: int, equation: JaxprEqn, known: list[Value]) -> list[Value]:
        if out in equation.outvars:
            computing.append((equation, known))
        return known_results(equation, known)

    evaluate_integers(jaxpr, inputs, record)
    if not computing:
        return None
    equation, known = computing[0]
    direction = _COMPARISONS.get(equation.primitive.name)
    if direction is not None:
        return known[0], direction, known[1]
    call = control_flow(equation)
    if not isinstance(call, Call) or len(equation.outvars) > 1:
        return None
    return _comparison(call.jaxpr, known)
