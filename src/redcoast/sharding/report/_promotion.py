"""Where NumPy's rank promotion combines each prediction with the labels of all examples.

Predictions of shape `(8, 1)` minus labels of shape `(8,)` have the shape `(8, 8)`. It is a mistake
if one of the two depends on the model, and nobody wrote a dimension of size 1: pairwise differences
that are meant have a `[:, None]`, a `keepdims`, or are a matrix product.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn, Literal

from ...core._control_flow import Cond, Scan, While, control_flow
from ...core._frames import own_line
from ..program._walk import Scope
from ..solver._strategy import Program, batch_dims

_WIDENING = frozenset(["broadcast_in_dim", "reshape", "expand_dims"])
_CONTRACTIONS = frozenset(["dot_general", "conv_general_dilated", "gather"])
_BATCHING = "batching.py"  # of JAX: the operations that `jax.vmap` adds


class _Origin(NamedTuple):
    """Whether a value depends on the model's arrays, and whether a dimension of size 1 was added to
    a flat array for it."""

    model: bool = False
    widened: bool = False


@dataclass
class _Search:
    program: Program
    size: int  # the number of examples
    lines: dict[str, None] = field(default_factory=dict)  # of the user's code


def find_promotions(program: Program) -> tuple[str, ...]:
    """The lines of the user's code that combine every example with every other by mistake."""
    traced, given = program.traced, program.batch.given
    if not given or program.graph.sizes[given[0]] < 2:
        return ()
    search = _Search(program, program.graph.sizes[given[0]])
    count = len(program.scope.jaxpr.invars)
    _follow(search, program.scope, [_Origin(model=i < traced.arrays) for i in range(count)])
    return tuple(search.lines)


def _follow(search: _Search, scope: Scope, inputs: Sequence[_Origin]) -> list[_Origin]:
    jaxpr = scope.jaxpr
    env: dict[Any, _Origin] = dict(zip(jaxpr.invars, inputs, strict=True))
    promoted: dict[Any, JaxprEqn] = {}  # flat arrays that were broadcast to a row
    read = lambda atom: _Origin() if isinstance(atom, Literal) else env.get(atom, _Origin())
    for place, equation in enumerate(jaxpr.eqns):
        operands = [read(atom) for atom in equation.invars]
        if place in scope.inner:
            results = _nested(search, equation, scope.inner[place], operands)
        else:
            if _is_row(search, equation):
                promoted[equation.outvars[0]] = equation
            elif _is_mistake(search, scope, equation, operands, promoted):
                search.lines[own_line(equation.source_info.traceback)] = None
            results = [_result(equation, operands)] * len(equation.outvars)
        env.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _nested(
    search: _Search, equation: JaxprEqn, inner: list[Scope], operands: Sequence[_Origin]
) -> list[_Origin]:
    """The results of loops, branches and calls."""
    before = len(search.lines)
    match control_flow(equation):
        case Cond():
            branches = [_follow(search, scope, operands[1:]) for scope in inner]
            results = [_merged(several) for several in zip(*branches, strict=True)]
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
        search.lines[own_line(equation.source_info.traceback)] = None
    return results


def _loop(
    search: _Search,
    body: Scope,
    consts: Sequence[_Origin],
    carry: Sequence[_Origin],
    xs: Sequence[_Origin],
) -> list[_Origin]:
    results = _follow(search, body, [*consts, *carry, *xs])
    carried = [_merged(pair) for pair in zip(carry, results, strict=False)]
    return _follow(search, body, [*consts, *carried, *xs])


def _merged(origins: Sequence[_Origin]) -> _Origin:
    model = any(origin.model for origin in origins)
    return _Origin(model, any(origin.widened for origin in origins))


def _result(equation: JaxprEqn, operands: Sequence[_Origin]) -> _Origin:
    name = equation.primitive.name
    origin = _merged(operands)
    if name in _CONTRACTIONS:
        return origin._replace(widened=False)
    if name in _WIDENING:
        before, after = _shape(equation.invars[0]), _shape(equation.outvars[0])
        is_wider = len(after) > len(before) >= 1 and before[0] > 1
        return origin._replace(widened=origin.widened or is_wider)
    return origin


def _is_row(search: _Search, equation: JaxprEqn) -> bool:
    """Whether a flat array of all examples is broadcast to a single row."""
    if equation.primitive.name != "broadcast_in_dim":
        return False
    shapes = _shape(equation.invars[0]), _shape(equation.outvars[0])
    return shapes == ((search.size,), (1, search.size))


def _is_mistake(
    search: _Search,
    scope: Scope,
    equation: JaxprEqn,
    operands: Sequence[_Origin],
    promoted: dict[Any, JaxprEqn],
) -> bool:
    """Whether an operation combines a column of predictions with a flat array, or labels in a
    column with flat predictions."""
    size = search.size
    if len(operands) != 2 or _shape(equation.outvars[0]) != (size, size):
        return False
    atoms = equation.invars
    if any(isinstance(atom, Literal) for atom in atoms):
        return False
    row = next((i for i, atom in enumerate(atoms) if atom in promoted), None)
    if row is None or _shape(atoms[1 - row]) != (size, 1):
        return False
    if operands[1 - row].widened or operands[0].model == operands[1].model:
        return False
    has = batch_dims(search.program, 1).has
    if not all(map(has, scope.values[equation.outvars[0]].dims)):
        return False
    return _is_implicit(promoted[atoms[row]], equation)


def _is_implicit(broadcast: JaxprEqn, equation: JaxprEqn) -> bool:
    """Whether an operation itself did the broadcast, which then has the same frames."""
    frames = _frames(broadcast)
    added = any(file.endswith(_BATCHING) for file, *_ in frames)
    return bool(frames) and not added and frames == _frames(equation)


def _frames(equation: JaxprEqn) -> list[tuple[str, str, int]]:
    trace = getattr(equation.source_info, "traceback", None)
    return [(f.file_name, f.function_name, f.line_num) for f in getattr(trace, "frames", ())]


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))
