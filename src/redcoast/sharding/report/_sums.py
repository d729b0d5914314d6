"""Which results of a loss are sums over the examples of a batch, and not means.

Each value has a degree: by which power of the number of examples it grows. A sum over examples
raises it by one; a division by their number, or by a sum over them, such as the sum of a mask,
lowers it. A degree that is not known is `None`, and nothing is said about such a result.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import jax
import numpy as np

from ...core._pytree import join, show_path
from ..operations import stops_gradient
from ..operations._rule_table import HOMOGENEOUS
from ..program._batch_dims import BatchDims, find_examples
from ..program._facts import Facts, Operation, alike, follow_facts
from ..program._program import Program


@dataclass(frozen=True)
class _Growth:
    """How a value grows with the number of examples, and what else is known of it.

    `number` is its value if the program contains it. `divided` is whether the value of each
    example was divided by a multiple of the number of examples, as in `sum(losses / n)`. `line` is
    the line of the user's code of the last sum over examples.
    """

    degree: int | None = 0
    number: float | None = None
    divided: bool = False
    line: str = ""


Growths = Sequence[_Growth]
_UNKNOWN = _Growth(None)


def find_sums(program: Program) -> dict[str, str]:
    """The scalar results that are sums over examples, by path, with lines of the user's code."""
    traced, scope = program.traced, program.scope
    examples = find_examples(program)
    if examples is None:
        return {}
    # An array of the batch without rows may be anything, such as the number of tokens.
    inputs = program.for_each_input(model=_Growth(), batch=_UNKNOWN, other=_Growth())
    for place, var in enumerate(scope.jaxpr.invars):
        if any(map(examples.has, scope.values[var].nodes)):
            inputs[place] = _Growth()
    facts = Facts(
        of_number=lambda value: _Growth(number=_number(value)),
        of_results=alike(partial(_growth, examples)),
        join=_largest,
        widen=_widened,
    )
    results = follow_facts(facts, scope, inputs)
    output = join(scope.jaxpr.outvars, traced.output)
    paths = {id(var): show_path(path) for path, var in jax.tree_util.tree_leaves_with_path(output)}
    sums: dict[str, str] = {}
    for var, growth in zip(scope.jaxpr.outvars, results, strict=True):
        is_scalar = getattr(var.aval, "shape", None) == ()
        if is_scalar and growth.degree is not None and growth.degree > 0:
            sums[paths[id(var)]] = growth.line
    return sums


def _widened(before: _Growth, after: _Growth) -> _Growth:
    if before.degree != after.degree:
        return _UNKNOWN  # its degree changes in each iteration
    return replace(before, number=None)


def _are_apart(examples: BatchDims, operation: Operation) -> bool:
    """Whether the examples of an operand are divided into several dimensions."""
    for value in operation.operands:
        if value is None:
            continue
        for node, size in zip(value.nodes, value.shape, strict=True):
            if examples.has(node) and 1 < size < examples.size:
                return True
    return False


def _is_count(examples: BatchDims, x: float | None) -> bool:
    """Whether a number is the number of examples or a multiple, as the number of elements."""
    if x is None or not math.isfinite(x) or abs(x) < examples.size:
        return False
    multiple = x / examples.size
    return math.isclose(multiple, round(multiple), rel_tol=1e-5)


def _growth(examples: BatchDims, operation: Operation, operands: Growths) -> _Growth:
    """How the results of an operation grow."""
    name, rule = operation.name, operation.rule
    if getattr(operation.equation.outvars[0].aval, "dtype", None) == np.bool_:
        return _Growth()
    # What nothing is known of is not reported: a false warning is worse than none.
    if not _are_known(operands):
        return _UNKNOWN
    if name == "sub":
        x, other = operation.equation.invars
        stop = operation.producer(other)
        # `x - stop_gradient(x)` is zero, and carries a gradient of the user's own.
        if stop is not None and stops_gradient(stop) and stop.invars[0] is x:
            return _Growth(number=0.0)
    if name == "div":
        return _quotient(examples, *operands)
    if name == "mul":
        return _product(examples, *operands)
    result = _largest(operands)
    if rule is not None and rule.sums:
        sums = operation.along(examples.has, rule.reduced)
        if sums and (rule.writes is not None or _are_apart(examples, operation)):
            return _UNKNOWN
        if rule.writes is not None:
            return replace(result, number=None)
        # The degrees of the factors of a product add up.
        degree = 0
        for x in operands:
            degree += x.degree or 0
        if result.number == 0 or not sums:
            return replace(result, degree=degree)
        return _Growth(degree + (not result.divided), line=operation.line())
    if rule is not None and rule.copies:
        return result  # a number of the program stays a number
    if name in HOMOGENEOUS or (rule is not None and rule.linear):
        return replace(result, number=None)
    # As the softmax over the classes of each example.
    if not any(map(attrgetter("degree"), operands)):
        return _Growth()  # a function of values that do not grow does not grow
    return _UNKNOWN


def _are_known(operands: Growths) -> bool:
    return None not in map(attrgetter("degree"), operands)


def _largest(operands: Growths) -> _Growth:
    if not _are_known(operands):
        return _UNKNOWN
    most = max(operands, key=lambda x: x.degree or 0, default=_Growth())
    number = None
    if len(operands) == 1:
        number = operands[0].number
    is_divided = any(map(attrgetter("divided"), operands))
    return _Growth(most.degree, number, is_divided, most.line)


def _quotient(examples: BatchDims, over: _Growth, under: _Growth) -> _Growth:
    """How the quotient of two values of known degree grows."""
    by_count = _is_count(examples, under.number)
    degree = (over.degree or 0) - (under.degree or 0)
    if by_count and degree > 0:
        return replace(over, degree=degree - 1, number=None)
    if degree > 0 and under.number not in (None, 1, 2, 3):
        return _UNKNOWN  # an expected number of examples, or one that is scaled
    divided = over.divided or by_count or degree < 0
    number = None
    if over.number is not None and under.number:  # it is not divided by 0
        number = over.number / under.number
    return _Growth(max(degree, 0), number, divided, over.line)


def _product(examples: BatchDims, a: _Growth, b: _Growth) -> _Growth:
    """How the product of two values of known degree grows."""
    # A product with 1 / n is a quotient.
    for factor, other in ((a, b), (b, a)):
        if factor.number and _is_count(examples, 1 / factor.number):
            return _quotient(examples, other, _Growth(number=1 / factor.number))
    if 0 in (a.number, b.number):
        return _Growth(number=0.0)
    degree = (a.degree or 0) + (b.degree or 0)
    divided = a.divided or b.divided
    line = _largest([a, b]).line
    if divided and degree > 0:  # a sum, and a value that was divided by the number of examples
        return _Growth(degree - 1, line=line)
    number = None
    if a.number is not None and b.number is not None:
        number = a.number * b.number
    return _Growth(degree, number, divided, line)


def _number(value: Any) -> float | None:
    try:
        if np.ndim(value) == 0:
            return float(value)
    except (TypeError, ValueError):  # a key
        pass
    return None
