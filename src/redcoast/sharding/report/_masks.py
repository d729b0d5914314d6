"""Random masks, as of dropout, that are the same for every example of a batch.

They are drawn from one key outside `jax.vmap`, or for a shape without the batch dimension.
"""

from collections.abc import Sequence
from enum import IntEnum
from functools import partial
from math import prod

import numpy as np

from ...core._control_flow import primitive_name
from ...core._jaxpr import iter_equations
from ..program._batch_dims import BatchDims, find_examples
from ..program._facts import Facts, Operation, alike, follow_facts
from ..program._program import Program


class _From(IntEnum):
    """What a value is computed from; the largest for several operands."""

    NUMBERS = 0
    RANDOM = 1  # random numbers alone
    MASK = 2  # a comparison of them
    ARRAYS = 3  # the model or the batch


def find_shared_masks(program: Program) -> tuple[str, ...]:
    """The lines of the user's code that use a random mask for all examples alike."""
    examples = find_examples(program)
    # Most programs draw nothing, and need not be followed.
    names = map(primitive_name, iter_equations(program.scope.jaxpr))
    if examples is None or "random_bits" not in names:
        return ()
    lines: dict[str, None] = {}  # in the order of the program
    facts = Facts(
        of_number=lambda number: _From.NUMBERS,
        of_results=alike(partial(_origin, examples, lines)),
        join=max,
    )
    inputs = program.for_each_input(model=_From.ARRAYS, batch=_From.ARRAYS, other=_From.NUMBERS)
    follow_facts(facts, program.scope, inputs)
    return tuple(lines)


def _origin(
    examples: BatchDims, lines: dict[str, None], operation: Operation, operands: Sequence[_From]
) -> _From:
    """What the results of an operation are computed from; a shared mask's line is recorded."""
    if operation.name == "random_bits":
        return _From.RANDOM
    for origin, value in zip(operands, operation.operands, strict=True):
        if origin is not _From.MASK or value is None:
            continue
        # A mask of one element, as for a whole layer, is meant.
        is_for_all = prod(value.shape) > 1 and not any(map(examples.has, value.nodes))
        if is_for_all and any(map(examples.has, operation.result.nodes)):
            lines[operation.line()] = None
    origin = max(operands, default=_From.NUMBERS)
    # `uniform(key) < rate` is how a mask is drawn.
    is_comparison = getattr(operation.equation.outvars[0].aval, "dtype", None) == np.bool_
    if is_comparison and origin is _From.RANDOM:
        return _From.MASK
    return origin
