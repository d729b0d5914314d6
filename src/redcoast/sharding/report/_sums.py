"""Which results of a loss are sums over the examples of a batch, and not means.

Each value has a degree: by which power of the number of examples it grows. A sum over examples
raises it by one; a division by their number, or by a sum over them, such as that of a mask, lowers
it. A degree that is not known is `None`, and nothing is said about such a result.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from ...core._control_flow import Cond, Scan, While, control_flow
from ...core._frames import own_line
from ...core._pytree import join, show_path
from ..program._graph import Value
from ..program._walk import Scope
from ..solver._strategy import Program, batch_dims

# The result grows as the operand that grows most.
_LINEAR = frozenset(
    """
    abs add add_any broadcast_in_dim clamp concatenate convert_element_type copy copy_p
    dynamic_slice expand_dims gather max min neg pad real reduce_max reduce_min reduce_precision
    reshape rev select_n sharding_constraint slice sort split squeeze stop_gradient sub transpose
    """.split()  # noqa: SIM905
)
_SUMS = frozenset(["reduce_sum", "psum", "psum_invariant", "dot_general"])
_SCATTERS = frozenset(["scatter-add", "scatter_add"])
# Their results are the same for more examples, or none that a mean is taken of.
_CONDITIONS = frozenset("and argmax argmin eq ge gt is_finite le lt ne not or".split())  # noqa: SIM905
# Numbers of the program stay numbers.
_NUMBERS = frozenset("broadcast_in_dim convert_element_type copy reshape squeeze".split())  # noqa: SIM905


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


@dataclass(frozen=True)
class _Examples:
    has: Callable[[int], bool]  # whether a dimension is the batch dimension
    size: int  # the number of examples

    def rows(self, value: Value) -> int:
        return sum(map(self.has, value.dims))

    def apart(self, scope: Scope, equation: JaxprEqn) -> bool:
        """Whether the examples of an operand are divided into several dimensions."""
        operands = [scope.values[x] for x in equation.invars if not isinstance(x, Literal)]
        dims = [pair for x in operands for pair in zip(x.dims, x.shape, strict=True)]
        return any(self.has(node) and 1 < size < self.size for node, size in dims)

    def divides(self, x: float | None) -> bool:
        """Whether a number is the number of examples or a multiple, as the number of elements."""
        if x is None or not math.isfinite(x) or abs(x) < self.size:
            return False
        return math.isclose(x / self.size, round(x / self.size), rel_tol=1e-5)


def find_sums(program: Program) -> dict[str, str]:
    """The scalar results that are sums over examples, by path, with lines of the user's code."""
    traced, given = program.traced, program.batch.given
    if not given or (size := program.graph.sizes[given[0]]) < 2:
        return {}
    examples, scope = _Examples(batch_dims(program, 1).has, size), program.scope
    batch = range(traced.arrays, traced.arrays + traced.batch)
    # An array of the batch without rows may be anything, such as the number of its tokens.
    own = lambda i, var: i in batch and not examples.rows(scope.values[var])
    inputs = [_UNKNOWN if own(i, var) else _Growth() for i, var in enumerate(scope.jaxpr.invars)]
    results = _follow(examples, scope, inputs)
    scalars = [getattr(var.aval, "shape", None) == () for var in scope.jaxpr.outvars]
    output = join(scope.jaxpr.outvars, traced.output)
    paths = {id(x): show_path(path) for path, x in jax.tree_util.tree_leaves_with_path(output)}
    return {
        paths[id(var)]: growth.line
        for var, growth, scalar in zip(scope.jaxpr.outvars, results, scalars, strict=True)
        if scalar and growth.degree is not None and growth.degree > 0
    }


def _follow(examples: _Examples, scope: Scope, inputs: Growths) -> list[_Growth]:
    jaxpr = scope.jaxpr
    env: dict[Any, _Growth] = dict(zip(jaxpr.invars, inputs, strict=True))
    consts = zip(jaxpr.constvars, scope.consts, strict=False)
    env.update((var, _Growth(number=_number(value))) for var, value in consts)

    def read(atom: Any) -> _Growth:
        if isinstance(atom, Literal):
            return _Growth(number=_number(atom.val))
        return env.get(atom, _Growth())

    stops = (equation for equation in jaxpr.eqns if equation.primitive.name == "stop_gradient")
    stopped = {equation.outvars[0]: equation.invars[0] for equation in stops}
    for place, equation in enumerate(jaxpr.eqns):
        operands = [read(atom) for atom in equation.invars]
        if place in scope.inner:
            results = _nested(examples, equation, scope.inner[place], operands)
        elif _is_zero(equation, stopped):
            results = [_Growth(number=0.0)]
        else:
            result = _growth(examples, scope, equation, operands)
            results = [result] * len(equation.outvars)
        env.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _is_zero(equation: JaxprEqn, stopped: Mapping[Any, Any]) -> bool:
    """Whether this is `x - stop_gradient(x)`, which carries a gradient of the user's own."""
    if equation.primitive.name != "sub" or isinstance(equation.invars[1], Literal):
        return False
    x, other = equation.invars
    return stopped.get(other) is x


def _nested(
    examples: _Examples, equation: JaxprEqn, inner: list[Scope], operands: Growths
) -> list[_Growth]:
    """The results of loops, branches and calls."""
    match control_flow(equation):
        case Cond():
            branches = [_follow(examples, scope, operands[1:]) for scope in inner]
            return [_largest(results) for results in zip(*branches, strict=True)]
        case Scan() as scan:
            return _loop(examples, inner[0], *scan.split(operands))
        case While() as loop:
            _, consts, carry = loop.split(operands)
            return _loop(examples, inner[1], consts, carry, [])
    return _follow(examples, inner[0], operands)


def _loop(
    examples: _Examples, body: Scope, consts: Growths, carry: Growths, xs: Growths
) -> list[_Growth]:
    before = [replace(x, number=None) for x in carry]
    results = _follow(examples, body, [*consts, *before, *xs])
    pairs = list(zip(before, results, strict=False))
    if all(x.degree == y.degree for x, y in pairs):
        return results
    # Its degree changes in each iteration.
    after = [x if x.degree == y.degree else _UNKNOWN for x, y in pairs]
    return _follow(examples, body, [*consts, *after, *xs])


def _growth(examples: _Examples, scope: Scope, equation: JaxprEqn, operands: Growths) -> _Growth:
    """How the results of an operation grow."""
    name = equation.primitive.name
    if name in _CONDITIONS or not equation.outvars:
        return _Growth()
    if any(x.degree is None for x in operands):
        return _UNKNOWN
    result = _largest(operands)
    sums = name in _SUMS | _SCATTERS and _sums_examples(examples, scope, equation)
    if sums and (name in _SCATTERS or examples.apart(scope, equation)):
        return _UNKNOWN
    if name == "div":
        return _quotient(examples, *operands)
    if name == "mul":
        return _product(examples, *operands)
    if name in _SUMS:
        degree = sum(x.degree or 0 for x in operands)
        if result.number == 0 or not sums:
            return replace(result, degree=degree)
        line = own_line(getattr(equation.source_info, "traceback", None))
        return _Growth(degree + (not result.divided), line=line)
    if name in _LINEAR or name in _SCATTERS:
        return result if name in _NUMBERS else replace(result, number=None)
    # Of a value that does not grow, no function does.
    return _Growth() if all(x.degree == 0 for x in operands) else _UNKNOWN


def _largest(operands: Growths) -> _Growth:
    if any(x.degree is None for x in operands):
        return _UNKNOWN
    most = max(operands, key=lambda x: x.degree or 0, default=_Growth())
    number = operands[0].number if len(operands) == 1 else None
    return _Growth(most.degree, number, any(x.divided for x in operands), most.line)


def _quotient(examples: _Examples, over: _Growth, under: _Growth) -> _Growth:
    by_count = examples.divides(under.number)
    degree = (over.degree or 0) - (under.degree or 0)
    if by_count and degree > 0:
        return replace(over, degree=degree - 1, number=None)
    if degree > 0 and under.number not in (None, 1, 2, 3):
        return _UNKNOWN  # an expected number of examples, or one that is scaled
    divided = over.divided or by_count or (under.degree or 0) > (over.degree or 0)
    known = over.number is not None and under.number not in (None, 0)
    number = over.number / under.number if known else None  # pyright: ignore
    return _Growth(max(degree, 0), number, divided, over.line)


def _product(examples: _Examples, a: _Growth, b: _Growth) -> _Growth:
    for x, y in ((a, b), (b, a)):
        if x.number and examples.divides(1 / x.number):
            return _quotient(examples, y, _Growth(number=1 / x.number))
    if 0 in (a.number, b.number):
        return _Growth(number=0.0)
    degree = (a.degree or 0) + (b.degree or 0)
    divided = a.divided or b.divided
    if divided and degree > 0:  # a sum, and a number of which it was divided
        return _Growth(degree - 1, line=_largest([a, b]).line)
    known = a.number is not None and b.number is not None
    number = a.number * b.number if known else None  # pyright: ignore
    return _Growth(degree, number, divided, _largest([a, b]).line)


def _sums_examples(examples: _Examples, scope: Scope, equation: JaxprEqn) -> bool:
    """Whether an operation adds up examples."""
    name, values = equation.primitive.name, scope.values
    operands = [values[x] for x in equation.invars if not isinstance(x, Literal)]
    if not operands:
        return False
    if name == "dot_general":
        (left, right), _ = equation.params["dimension_numbers"]
        sides = zip(equation.invars, (left, right), strict=True)
        return any(
            examples.has(values[x].dims[d])
            for x, dims in sides
            if not isinstance(x, Literal)
            for d in dims
        )
    most = max(map(examples.rows, operands))
    return most > examples.rows(values[equation.outvars[0]])


def _number(value: Any) -> float | None:
    try:
        return float(value) if np.ndim(value) == 0 else None
    except (TypeError, ValueError):  # a key
        return None
