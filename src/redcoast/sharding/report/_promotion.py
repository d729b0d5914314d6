"""Where NumPy's rank promotion combines each prediction with the labels of all examples.

Predictions of shape `(8, 1)` minus labels of shape `(8,)` have the shape `(8, 8)`. It is a mistake
if one of the two depends on the model, and nobody wrote a dimension of size 1: pairwise differences
that are meant have a `[:, None]`, a `keepdims`, or are a matrix product.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from jax.extend.core import JaxprEqn, Literal

from ...core._jaxpr import iter_equations
from ..operations import shape_of
from ..program._batch_dims import BatchDims, find_examples
from ..program._facts import Facts, Operation, alike, follow_facts
from ..program._program import Program

_BATCHING = "batching.py"  # of JAX: the operations that `jax.vmap` adds


class _Origin(NamedTuple):
    """Whether a value depends on the model's arrays, and whether a dimension of size 1 was added to
    a flat array for it."""

    model: bool = False
    widened: bool = False


def find_promotions(program: Program) -> tuple[str, ...]:
    """The lines of the user's code that combine every example with every other by mistake."""
    examples = find_examples(program)
    if examples is None:
        return ()
    shapes: set[tuple[int, ...]] = set()
    for equation in iter_equations(program.scope.jaxpr):
        shapes.update(map(shape_of, equation.outvars))
    # Most programs combine no examples with all others, and need not be followed.
    if (examples.size, examples.size) not in shapes:
        return ()
    lines: dict[str, None] = {}  # in the order of the program
    facts = Facts(
        of_number=lambda number: _Origin(),
        of_results=alike(partial(_origin, examples, lines)),
        join=_merged,
    )
    inputs = program.for_each_input(model=_Origin(model=True), batch=_Origin(), other=_Origin())
    follow_facts(facts, program.scope, inputs)
    return tuple(lines)


def _merged(origins: Sequence[_Origin]) -> _Origin:
    merged = _Origin()
    for origin in origins:
        merged = _Origin(merged.model or origin.model, merged.widened or origin.widened)
    return merged


def _origin(
    examples: BatchDims, lines: dict[str, None], operation: Operation, operands: Sequence[_Origin]
) -> _Origin:
    """The origin of an operation's results; the line of a mistake is recorded."""
    if _is_mistake(examples, operation, operands):
        lines[operation.line()] = None
    equation, rule, origin = operation.equation, operation.rule, _merged(operands)
    if rule is not None and rule.reduced and len(operands) > 1:
        # A product or a lookup is meant.
        return origin._replace(widened=False)
    if rule is not None and rule.copies:
        before, after = shape_of(equation.invars[0]), shape_of(equation.outvars[0])
        is_wider = len(after) > len(before) >= 1 and before[0] > 1
        return origin._replace(widened=origin.widened or is_wider)
    return origin


def _is_mistake(examples: BatchDims, operation: Operation, operands: Sequence[_Origin]) -> bool:
    """Whether an operation combines a column of predictions with a flat array, or labels in a
    column with flat predictions."""
    equation, size = operation.equation, examples.size
    if len(operands) != 2 or shape_of(equation.outvars[0]) != (size, size):
        return False
    if any(isinstance(atom, Literal) for atom in equation.invars):
        return False
    # Either operand may be the column: `predictions - labels`, or `labels - predictions`.
    for row, column in ((0, 1), (1, 0)):
        broadcast = operation.producer(equation.invars[row])
        if broadcast is None or not broadcast.invars:  # as of `iota`
            continue
        # (n,) is broadcast to (1, n), which makes (n, n) with (n, 1).
        shapes = map(shape_of, (broadcast.invars[0], broadcast.outvars[0], equation.invars[column]))
        if tuple(shapes) != ((size,), (1, size), (size, 1)):
            continue
        differ = operands[0].model != operands[1].model and not operands[column].widened
        of_batch = all(map(examples.has, operation.result.nodes))
        # The operation itself did the broadcast, which then has the same frames.
        frames = _frames(broadcast)
        added = any(file.endswith(_BATCHING) for file, *_ in frames)
        is_implicit = bool(frames) and not added and frames == _frames(equation)
        return differ and of_batch and is_implicit
    return False


def _frames(equation: JaxprEqn) -> list[tuple[str, str, int]]:
    trace = getattr(equation.source_info, "traceback", None)
    return [(f.file_name, f.function_name, f.line_num) for f in getattr(trace, "frames", ())]
