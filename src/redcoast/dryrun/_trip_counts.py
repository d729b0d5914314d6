"""The trip counts of while loops in a traced program.

As for compiled programs, they follow from the initial value of the loop's counter, the amount that
the body adds to it, and the bound that it is compared with.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from .hlo._trip_counts import MIRRORED, Carried, Value, added, iterations

_COMPARISONS = {"lt": "LT", "le": "LE", "gt": "GT", "ge": "GE", "ne": "NE"}
# Primitives that do not change the value of a scalar integer.
_SAME = frozenset(
    """
    convert_element_type copy copy_p optimization_barrier pvary reshape squeeze broadcast_in_dim
    """.split()  # noqa: SIM905
)
Env = dict[Any, Value]


def trip_count(loop: JaxprEqn, inputs: Sequence[Value]) -> int | None:
    """The number of times a loop's body runs, given the known operands; `None` if unknown."""
    params = loop.params
    first, second = params["cond_nconsts"], params["body_nconsts"]
    start = inputs[first + second :]
    carried = [Carried(place, 0) for place in range(len(start))]
    after = _results(params["body_jaxpr"], [*inputs[first : first + second], *carried])
    compared = _comparison(params["cond_jaxpr"], [*inputs[:first], *carried])
    if compared is None:
        return None
    left, direction, right = compared
    steady = lambda value: _steady(value, start, after)
    if not isinstance(left, Carried) or steady(left) is not None:
        left, direction, right = right, MIRRORED.get(direction, direction), left
    if not isinstance(left, Carried) or left.place is None:
        return None
    begin, moved, bound = start[left.place], after[left.place], steady(right)
    if not isinstance(begin, int) or bound is None:
        return None
    if not isinstance(moved, Carried) or moved.place != left.place:
        return None
    return iterations(begin + left.more, moved.more, direction, bound)


def _steady(value: Value, start: Sequence[Value], after: Sequence[Value]) -> int | None:
    """The value of a loop-invariant number: a constant, or carried unchanged."""
    if not isinstance(value, Carried):
        return value
    if value.place is None or after[value.place] != Carried(value.place, 0):
        return None
    begin = start[value.place]
    return begin + value.more if isinstance(begin, int) else None


def unchanged(
    body: ClosedJaxpr | Jaxpr, constants: Sequence[Value], start: Sequence[Value], more: int = 0
) -> list[Value]:
    """The initial values of a loop's carry that no iteration changes, `None` for all others.

    `more` is the number of inputs of the body after the carry.
    """
    carried = [Carried(place, 0) for place in range(len(start))]
    after = _results(body, [*constants, *carried, *[None] * more])
    return [
        begin if after[place] == Carried(place, 0) else None for place, begin in enumerate(start)
    ]


def follow(equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    """An equation's results, as far as they are known integers."""
    name = equation.primitive.name
    body = called(equation)
    if name in ("add", "sub"):
        return [added(inputs[0], inputs[1], 1 if name == "add" else -1)]
    if name == "mul" and all(isinstance(value, int) for value in inputs):
        left, right = inputs
        return [left * right if isinstance(left, int) and isinstance(right, int) else None]
    if name in _SAME and len(equation.outvars) <= len(inputs):
        sized = zip(equation.outvars, inputs, strict=False)
        return [value if _is_whole(var.aval) else None for var, value in sized]
    if name == "while":
        first = equation.params["cond_nconsts"]
        split = first + equation.params["body_nconsts"]
        return unchanged(equation.params["body_jaxpr"], inputs[first:split], inputs[split:])
    if body is not None:
        return _results(body, inputs)
    return [None] * len(equation.outvars)


def called(equation: JaxprEqn) -> ClosedJaxpr | Jaxpr | None:
    """The jaxpr that an equation calls once with its own operands; `None` for other equations."""
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        found = equation.params.get(key)
        if isinstance(found, ClosedJaxpr | Jaxpr) and equation.primitive.name not in _OTHERS:
            inner = open_jaxpr(found)
            fits = len(inner.invars) == len(equation.invars)
            return found if fits and len(inner.outvars) == len(equation.outvars) else None
    return None


_OTHERS = frozenset(["scan", "shard_map", "pallas_call"])


def walk(
    jaxpr: ClosedJaxpr | Jaxpr,
    inputs: Sequence[Value],
    visit: Callable[[JaxprEqn, list[Value]], None] = lambda equation, known: None,
) -> Env:
    """Calls `visit(equation, known)` for each equation; returns the known values of variables."""
    inner = open_jaxpr(jaxpr)
    env: Env = dict(zip(inner.invars, inputs, strict=True))
    if isinstance(jaxpr, ClosedJaxpr):
        env.update(zip(inner.constvars, map(_number, jaxpr.consts), strict=True))
    for equation in inner.eqns:
        known = [_read(env, atom) for atom in equation.invars]
        visit(equation, known)
        env.update(zip(equation.outvars, follow(equation, known), strict=True))
    return env


def open_jaxpr(jaxpr: ClosedJaxpr | Jaxpr) -> Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def _results(jaxpr: ClosedJaxpr | Jaxpr, inputs: Sequence[Value]) -> list[Value]:
    env = walk(jaxpr, inputs)
    return [_read(env, atom) for atom in open_jaxpr(jaxpr).outvars]


def _read(env: Env, atom: Any) -> Value:
    return _number(atom.val) if isinstance(atom, Literal) else env.get(atom)


def _number(x: Any) -> int | None:
    if isinstance(x, Tracer) or not _is_whole(jax.typeof(x)):
        return None
    return int(x)


def _is_whole(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and aval.shape == () and jnp.issubdtype(dtype, jnp.integer)


def _comparison(
    jaxpr: ClosedJaxpr | Jaxpr, inputs: Sequence[Value]
) -> tuple[Value, str, Value] | None:
    """The comparison that a loop's condition consists of."""
    found: list[tuple[JaxprEqn, list[Value]]] = []
    out = open_jaxpr(jaxpr).outvars[0]

    def visit(equation: JaxprEqn, known: list[Value]) -> None:
        if out in equation.outvars:
            found.append((equation, known))

    walk(jaxpr, inputs, visit)
    if not found:
        return None
    equation, known = found[0]
    if (direction := _COMPARISONS.get(equation.primitive.name)) is not None:
        return known[0], direction, known[1]
    body = called(equation)
    return None if body is None or len(equation.outvars) > 1 else _comparison(body, known)
