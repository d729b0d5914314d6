"""Random masks, as of dropout, that are the same for every example of a batch.

They are drawn from one key outside `jax.vmap`, or for a shape without the batch dimension.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from math import prod
from typing import Any

from jax.extend.core import JaxprEqn, Literal

from ...core._control_flow import Cond, Scan, While, control_flow
from ...core._frames import own_line
from ..program._graph import Value
from ..program._walk import Scope
from ..solver._strategy import Program, batch_dims

_COMPARISONS = frozenset(["eq", "ge", "gt", "le", "lt", "ne"])


class _From(IntEnum):
    """What a value is computed from; the largest for several operands."""

    NUMBERS = 0
    RANDOM = 1  # random numbers alone
    MASK = 2  # a comparison of them
    ARRAYS = 3  # the model or the batch


@dataclass
class _Search:
    has: Callable[[int], bool]  # whether a dimension is the batch dimension
    lines: dict[str, None] = field(default_factory=dict)  # of the user's code

    def rows(self, value: Value) -> int:
        return sum(map(self.has, value.dims))


def find_shared_masks(program: Program) -> tuple[str, ...]:
    """The lines of the user's code that use a random mask for all examples alike."""
    traced, given = program.traced, program.batch.given
    if not given or program.graph.sizes[given[0]] < 2:
        return ()
    search, invars = _Search(batch_dims(program, 1).has), program.scope.jaxpr.invars
    known = traced.arrays + traced.batch
    inputs = [_From.ARRAYS if i < known else _From.NUMBERS for i in range(len(invars))]
    _follow(search, program.scope, inputs)
    return tuple(search.lines)


def _follow(search: _Search, scope: Scope, inputs: Sequence[_From]) -> list[_From]:
    jaxpr = scope.jaxpr
    env: dict[Any, _From] = dict(zip(jaxpr.invars, inputs, strict=True))
    read = lambda x: _From.NUMBERS if isinstance(x, Literal) else env.get(x, _From.NUMBERS)
    for place, equation in enumerate(jaxpr.eqns):
        operands = [read(atom) for atom in equation.invars]
        if place in scope.inner:
            results = _nested(search, equation, scope.inner[place], operands)
        else:
            results = [_result(search, scope, equation, operands)] * len(equation.outvars)
        env.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _nested(
    search: _Search, equation: JaxprEqn, inner: list[Scope], operands: Sequence[_From]
) -> list[_From]:
    """The results of loops, branches and calls."""
    before = len(search.lines)
    match control_flow(equation):
        case Cond():
            branches = [_follow(search, scope, operands[1:]) for scope in inner]
            results = [max(several) for several in zip(*branches, strict=True)]
        case Scan() as scan:
            results = _loop(search, inner[0], *scan.split(operands))
        case While() as loop:
            _, consts, carry = loop.split(operands)
            results = _loop(search, inner[1], consts, carry, [])
        case _:
            results = _follow(search, inner[0], operands)
    if len(search.lines) > before and "" in search.lines:
        # A compiled function of a library has no line of the user's code in it.
        del search.lines[""]
        search.lines[_line(equation)] = None
    return results


def _loop(
    search: _Search,
    body: Scope,
    consts: Sequence[_From],
    carry: Sequence[_From],
    xs: Sequence[_From],
) -> list[_From]:
    results = _follow(search, body, [*consts, *carry, *xs])
    carried = [max(pair) for pair in zip(carry, results, strict=False)]
    return _follow(search, body, [*consts, *carried, *xs])


def _result(search: _Search, scope: Scope, equation: JaxprEqn, operands: Sequence[_From]) -> _From:
    name, values = equation.primitive.name, scope.values
    if name == "random_bits":
        return _From.RANDOM
    if not equation.outvars:
        return _From.NUMBERS
    result = values[equation.outvars[0]]
    for origin, atom in zip(operands, equation.invars, strict=True):
        if origin is not _From.MASK or isinstance(atom, Literal):
            continue
        mask = values[atom]
        if prod(mask.shape) > 1 and not search.rows(mask) and search.rows(result):
            search.lines[_line(equation)] = None
    origin = max(operands, default=_From.NUMBERS)
    return _From.MASK if name in _COMPARISONS and origin is _From.RANDOM else origin


def _line(equation: JaxprEqn) -> str:
    return own_line(getattr(equation.source_info, "traceback", None))
