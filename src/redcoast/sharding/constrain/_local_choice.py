"""Which equations each device runs on its own rows, and why it does not run others so."""

from collections.abc import Iterator, Sequence
from itertools import compress
from math import prod
from operator import or_

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from ...core._control_flow import (
    AnyJaxpr,
    Call,
    CallKind,
    Scan,
    While,
    control_flow,
    is_callback,
    open_jaxpr,
)
from ...core._jaxpr import struct_of, variables
from .._mesh_axes import used_axes
from ..program._graph import Source
from ..program._local_scans import row_states, sums_in_every_iteration
from ..program._local_states import (
    NotLocal,
    State,
    equations_inside,
    have_rows,
    is_over_rows,
    is_vmapped,
)
from ..program._walk import Scope
from ._custom_rules import differentiate
from ._local_region import LocalRegion, RuleError, asks_any_row, waits_for_rows
from ._shardings import Shardings

# Rows depend on each other; JAX has no rule for an operation inside of `jax.shard_map`, or refuses
# its parts for their shapes, types or axes; or a rule of Equinox's finds other inputs there.
REFUSALS = (NotLocal, NotImplementedError, TypeError, ValueError, AssertionError)

Choice = tuple[LocalRegion, Sequence[State]]  # the region, and the states of the operands


def choose_region(equation: JaxprEqn, scope: Scope, shardings: Shardings) -> Choice | None:
    """The devices that run an equation on their own rows, if they would communicate otherwise.

    Raises `NotLocal` if the equation combines rows.
    """
    # The stages of a pipeline run one after the other, each for some rows.
    devices = prod(shardings.mesh.shape.values())
    if shardings.in_pipeline or shardings.splits_examples or devices == 1:
        return None
    waits, sums = waits_for_rows(equation), False
    if isinstance(control_flow(equation), Scan):
        sums = sums_in_every_iteration(equation, scope, shardings.batch_dim)
    if not waits and not sums:
        return None
    region, states = _rows_of(equation, scope, shardings)
    if not (sums and region.axes) and not region.is_worth_it(equation, states):
        return None
    return region, states


def has_custom_rule(equation: JaxprEqn) -> bool:
    """Whether an equation runs a function with a custom derivative."""
    for flow in map(control_flow, equations_inside(equation)):
        if isinstance(flow, Call) and flow.kind in (CallKind.CUSTOM_JVP, CallKind.CUSTOM_VJP):
            return True
    return False


def has_symbolic_rule(equation: JaxprEqn) -> bool:
    """Whether an equation runs a `custom_vjp` whose rules learn what has no derivative.

    They may refuse derivatives of everything, which is what is known before they are called.
    """
    for inner in equations_inside(equation):
        flow = control_flow(inner)
        if isinstance(flow, Call) and flow.kind is CallKind.CUSTOM_VJP and flow.symbolic_zeros:
            return True
    return False


def used_results(equation: JaxprEqn, jaxpr: Jaxpr) -> list[bool]:
    """Which results of an equation another one or a result of its jaxpr reads."""
    used = set(variables(jaxpr.outvars))
    for other in jaxpr.eqns:
        used.update(variables(other.invars))
    return [var in used for var in equation.outvars]


def find_waiting(
    scope: Scope, shardings: Shardings, source: Source = ()
) -> Iterator[tuple[Source, Sequence[State], NotLocal]]:
    """The equations in which devices wait for each other's rows, or run all rows, and why.

    Each follows those around it, `source`, and comes with the states of its operands.
    """
    for index, equation in enumerate(scope.jaxpr.eqns):
        around = (*source, equation)
        try:
            choice = choose_region(equation, scope, shardings)
            if choice is not None:
                region, states = choice
                used = used_results(equation, scope.jaxpr)
                region.results(equation, states, used)
                refusal = _refusal_of_rules(choice, equation, scope, used)
                if refusal is None:
                    continue
                yield around, states, refusal
        except NotLocal as error:
            _, states = _rows_of(equation, scope, shardings)
            match control_flow(equation):
                case While() as loop:
                    communicates = _ends_by_rows(loop, states)
                case Scan() as scan:
                    asks = asks_any_row(equation) and have_rows(states)
                    communicates = asks or is_over_rows(scan, states)
                case _:
                    communicates = is_vmapped(equation) and have_rows(states)
            if communicates:
                yield around, states, error
        for inner in scope.inner.get(index, ()):
            yield from find_waiting(inner, shardings, around)


def _refusal_of_rules(
    choice: Choice, equation: JaxprEqn, scope: Scope, used: Sequence[bool]
) -> NotLocal | None:
    """Why each device cannot run an equation on its own rows for its custom derivative rules.

    The rules are only known once they are traced.
    """
    region, states = choice
    if not has_custom_rule(equation):
        return None
    perturbed: list[bool] = []
    for atom in equation.invars:
        value = scope.value_of(atom)
        perturbed.append(value is not None and value.grad and not region.forward_only)
    run = lambda *xs: region.run(equation, xs, states, used)
    try:
        jax.eval_shape(
            lambda *xs: differentiate(run, perturbed, xs), *map(struct_of, equation.invars)
        )
    except NotLocal as error:
        return error
    except REFUSALS as error:
        return NotLocal(f"JAX refuses it with {type(error).__name__}")
    except Exception as error:
        return RuleError(error)
    return None


def _ends_by_rows(loop: While, states: Sequence[State]) -> bool:
    """Whether the number of iterations depends on rows."""
    has_rows = [isinstance(state, int) for state in states]
    cond_consts, body_consts, carry = loop.split(has_rows)
    # What is carried depends on more and more rows, so that this ends.
    while True:
        after = _follow(loop.body, [*body_consts, *carry])
        joined = list(map(or_, carry, after))
        if joined == carry:
            return _follow(loop.cond, [*cond_consts, *carry])[0]
        carry = joined


def _follow(jaxpr: AnyJaxpr, inputs: Sequence[bool]) -> list[bool]:
    """Which outputs of a jaxpr depend on one of the chosen inputs."""
    opened = open_jaxpr(jaxpr)
    # Every result of an equation is taken to depend on all that it reads.
    chosen = set(compress(opened.invars, inputs))
    for equation in opened.eqns:
        if not chosen.isdisjoint(variables(equation.invars)):
            chosen.update(equation.outvars)
    return [isinstance(atom, Var) and atom in chosen for atom in opened.outvars]


def _rows_of(equation: JaxprEqn, scope: Scope, shardings: Shardings) -> Choice:
    """The devices that divide the rows of an equation, and the rows of its operands."""
    values = list(map(scope.value_of, equation.invars))
    axes = used_axes(shardings.batch_axes, shardings.mesh.shape)
    flow = control_flow(equation)
    # No derivative goes through a loop with any number of iterations, or through the host.
    forward_only = isinstance(flow, While) or (isinstance(flow, Scan) and _is_of_calls(flow))
    is_call = is_callback(equation)  # of the host, with entire rows
    forward_only = forward_only or is_call
    sharded = ()
    if not is_call and any(map(shardings.is_parallel, filter(None, values))):
        sharded = shardings.compute.model_axes
    states: list[State] = [None] * len(values)
    if axes:
        states = row_states(equation, scope, shardings.batch_dim)
    return LocalRegion(shardings.mesh, axes, sharded, forward_only), states


def _is_of_calls(scan: Scan) -> bool:
    """Whether all that an iteration returns comes from the host."""
    body = open_jaxpr(scan.body)
    returned: set[Var] = set()
    for equation in filter(is_callback, body.eqns):
        returned.update(equation.outvars)
    return returned.issuperset(variables(body.outvars))
