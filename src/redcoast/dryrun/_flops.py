"""Counts the floating point operations of the contractions in a traced program."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import JaxprEqn
from jax.interpreters.partial_eval import dce_jaxpr

from ..core._control_flow import (
    AnyJaxpr,
    Call,
    Cond,
    Kernel,
    LinearSolve,
    Manual,
    Scan,
    While,
    close_jaxpr,
    consts_of,
    control_flow,
    open_jaxpr,
)
from ..core._jaxpr import evaluate_jaxpr, multiply_adds
from ..sharding.operations._rule_table import VIEWS
from .hlo._trip_counts import Carried, Value, added, solve

Flops = Counter[str]
_OPEN = "open loops"  # a key besides the names of dtypes
# Parameters that hold programs which are not run with the equation, such as derivatives.
_NOT_RUN = ("transpose", "jvp", "fwd", "bwd", "cond_jaxpr")


@dataclass(frozen=True)
class Contractions:
    """The floating point operations of contractions, by dtype.

    `open_loops` is the number of loops whose trip count depends on data, counted as one iteration.
    """

    flops: dict[str, int]
    open_loops: int


def contractions(jaxpr: AnyJaxpr) -> Contractions:
    """Counts the floating point operations of a program's contractions, by dtype of their operands.

    Returns two operations for each multiply-add of dot products and convolutions (eight for complex
    numbers), of the entire program on all devices, before partitioning. Unused results are not
    counted. A loop counts its trip count, or one iteration if that depends on data; a conditional
    counts its most expensive branch. For convolutions, zeros that pad the input are counted, and
    zeros that dilate it are not.
    """
    inner = open_jaxpr(jaxpr)
    # Rematerialised programs contain many unused computations.
    live, _ = dce_jaxpr(inner, [True] * len(inner.outvars), instantiate=True)
    flops, _ = _evaluate(close_jaxpr(live, consts_of(jaxpr)))
    open_loops = flops.pop(_OPEN, 0)
    return Contractions(dict(sorted(flops.items())), open_loops)


def _count(jaxpr: AnyJaxpr, inputs: Sequence[Value] | None = None) -> Flops:
    """The operations of a jaxpr, given the inputs that are known integers."""
    return _evaluate(jaxpr, inputs)[0]


def _evaluate(jaxpr: AnyJaxpr, inputs: Sequence[Value] | None = None) -> tuple[Flops, list[Value]]:
    """The operations of a jaxpr, and its results that are known integers."""
    total: Flops = Counter()

    def count(_: int, equation: JaxprEqn, known: list[Value]) -> list[Value]:
        call = control_flow(equation)
        if isinstance(call, Call):
            # Both at once: calls in calls would be followed twice at each level.
            flops, results = _evaluate(call.jaxpr, known)
            total.update(flops)
            return results
        total.update(_count_equation(equation, known))
        return known_results(equation, known)

    unknown: list[Value] = [None] * len(open_jaxpr(jaxpr).invars)
    results = evaluate_integers(jaxpr, inputs or unknown, count)
    return total, results


def _count_equation(equation: JaxprEqn, known: list[Value]) -> Flops:
    """The operations of an equation, including all jaxprs that it runs."""
    if (count := multiply_adds(equation)) is not None:
        # The zeros between the elements of a dilated input are counted as its elements are.
        return _flops(equation, count // prod(equation.params.get("lhs_dilation", ())))
    match control_flow(equation):
        case Scan() as scan:
            consts, start, xs = scan.split(known)
            # Only what is the same in all iterations is known.
            carry = unchanged(scan.body, consts, start, len(xs))
            body = _count(scan.body, [*consts, *carry, *[None] * len(xs)])
            return _times(scan.length, body)
        case While() as loop:
            return _while(loop, known)
        case Cond(branches):
            # The first operand is the number of the branch.
            counts = [_count(branch, known[1:]) for branch in branches]
            return max(counts, key=lambda flops: flops.total() - flops[_OPEN])
        case Manual() as manual:
            # Along other axes, all devices compute the same, which counts once.
            devices = prod(manual.mesh.shape[axis] for axis in manual.axes)
            return _times(devices, _count(manual.body, known))
        case Kernel(body, points):
            # A size that is not known counts as 1.
            steps = prod(size for size in points if isinstance(size, int))
            return _times(steps, _count(body))
        case LinearSolve(solve, places):
            return _count(solve, [known[place] for place in places])
    total: Flops = Counter()
    for key, param in equation.params.items():
        if key.startswith(_NOT_RUN):
            continue
        candidates = [param]
        if isinstance(param, tuple | list):
            candidates = param
        for candidate in candidates:
            if isinstance(candidate, AnyJaxpr):
                total.update(_count(candidate))
    return total


def _times(count: int, flops: Flops) -> Flops:
    """The operations of `count` executions. A loop of unknown length in them is still one loop."""
    total: Flops = Counter()
    for key, number in flops.items():
        if key == _OPEN:
            total[key] = number
        else:
            total[key] = count * number
    return total


def _flops(equation: JaxprEqn, count: int) -> Flops:
    """The operations of a number of multiply-adds, by the wider of the operands' dtypes."""
    operands: Any = equation.invars[:2]
    dtypes = [operand.aval.dtype for operand in operands]
    dtype = max(dtypes, key=lambda each: each.itemsize)
    operations = 2
    if jnp.issubdtype(dtype, jnp.complexfloating):
        # Four multiplications and four additions.
        operations = 8
    return Counter({str(dtype): operations * count})


def _while(loop: While, known: list[Value]) -> Flops:
    """The operations of a loop; of one iteration, if the number of times that it runs depends on
    data."""
    cond_consts, body_consts, start = loop.split(known)
    carry = unchanged(loop.body, body_consts, start)
    body = _count(loop.body, [*body_consts, *carry])
    cond = _count(loop.cond, [*cond_consts, *carry])
    # Evaluates an iteration with symbols: `Carried(i, 1)` after it is a counter that grows by 1.
    carried = [Carried(place, 0) for place in range(len(start))]
    after = _results(loop.body, [*body_consts, *carried])
    compared = _comparison(loop.cond, [*cond_consts, *carried])
    trips = None
    if compared is not None:
        trips = solve(compared, start.__getitem__, after.__getitem__)
    if trips is None:
        total = body + cond
        if body or cond:
            total[_OPEN] += 1
        return total
    # The condition runs once more than the body.
    return _times(trips, body) + _times(trips + 1, cond)


_COMPARISONS = {"lt": "LT", "le": "LE", "gt": "GT", "ge": "GE", "ne": "NE"}
# Primitives that do not change the value of a scalar integer.
_SAME = VIEWS | {"broadcast_in_dim", "convert_element_type", "pvary"}


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
