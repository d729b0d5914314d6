"""Scans that each device runs on its own rows, so that gradients are summed once after them.

The gradient of a weight that a scan closes over is summed over the devices that divide the rows. If
each use of the weight can have a copy for each shard of the batch, this is done after the scan (see
`_loop_weights`). Otherwise XLA sums in every iteration, as for weights in a rematerialised body,
or in gradients that the body computes itself. If the rows are independent, each device can run the
entire scan on its own rows, and the sum follows.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from jax.extend.core import JaxprEqn

from ...core._control_flow import Scan, control_flow, primitive_name
from ...core._jaxpr import is_inexact, struct_of
from ..operations import shape_of
from ._graph import Value
from ._local_states import (
    OWN,
    SUM,
    LocalStates,
    NotLocal,
    State,
    equations_inside,
    have_rows,
    is_over_rows,
)
from ._loop_weights import can_hoist_gradient_sum, gets_copies, rearranges
from ._walk import Scope

BatchDim = Callable[[Value], int | None]  # the dimension of a value that is rows of the batch


def find_local_scans(scope: Scope, is_rows: Callable[[int], bool]) -> Iterator[JaxprEqn]:
    """The outermost scans that are run on each device's rows for the sake of gradients."""

    def batch_dim(value: Value) -> int | None:
        for d, node in enumerate(value.nodes):
            if is_rows(node):
                return d
        return None

    return _local_scans(scope, batch_dim)


def _local_scans(scope: Scope, batch_dim: BatchDim) -> Iterator[JaxprEqn]:
    for index, equation in enumerate(scope.jaxpr.eqns):
        if isinstance(control_flow(equation), Scan) and _is_local(equation, scope, batch_dim):
            yield equation
            continue
        for inner in scope.inner.get(index, ()):
            yield from _local_scans(inner, batch_dim)


def _is_local(equation: JaxprEqn, scope: Scope, batch_dim: BatchDim) -> bool:
    if not sums_in_every_iteration(equation, scope, batch_dim):
        return False
    results = _results(equation, row_states(equation, scope, batch_dim))
    return OWN not in results


def _results(equation: JaxprEqn, states: Sequence[State]) -> Sequence[State]:
    """What each device has of the results, if it runs the equation on its own rows."""
    try:
        return LocalStates(1).step(equation, states).results
    except NotLocal:
        return [OWN]


def sums_in_every_iteration(equation: JaxprEqn, scope: Scope, batch_dim: BatchDim) -> bool:
    """Whether devices would sum gradients or results over rows in each iteration of a scan."""
    scan = control_flow(equation)
    if not isinstance(scan, Scan) or scan.length < 2:
        return False
    states = row_states(equation, scope, batch_dim)
    if not have_rows(states) or is_over_rows(scan, states):
        return False
    _, _, x_states = scan.split(states)
    _, _, xs = scan.split(equation.invars)
    for atom, state in zip(xs, x_states, strict=True):
        # Layers, which are gathered and whose gradients are summed one at a time.
        if state is None and len(shape_of(atom)) > 1 and is_inexact(struct_of(atom)):
            return False
    # Each device would draw the random numbers of all rows from one key.
    for inner in equations_inside(equation):
        if primitive_name(inner) == "random_bits" and not shape_of(inner.invars[0]):
            return False
    (body,) = scope.inner[scope.jaxpr.eqns.index(equation)]
    # A weight has a copy for each shard of the batch, if it is only combined with rows.
    has_shards = partial(_has_shards, body, batch_dim)
    for var, state in zip(body.jaxpr.invars[: scan.consts], states, strict=False):
        is_weight = state is None and is_inexact(struct_of(var))
        if is_weight and not can_hoist_gradient_sum(body.jaxpr, var, has_shards):
            return True
    return SUM in _results(equation, states)


def row_states(equation: JaxprEqn, scope: Scope, batch_dim: BatchDim) -> list[State]:
    """The dimensions of the operands of an equation that are rows."""
    states: list[State] = []
    for atom in equation.invars:
        value = scope.value_of(atom)
        if value is None:
            states.append(None)
        else:
            states.append(batch_dim(value))
    return states


def _has_shards(scope: Scope, batch_dim: BatchDim, equation: JaxprEqn) -> bool:
    """Whether a weight is combined with rows that its result has, or only rearranged."""
    # What is inside of a call is not looked at.
    if gets_copies(equation) is not None:
        return False
    return rearranges(equation) or batch_dim(scope.values[equation.outvars[0]]) is not None
