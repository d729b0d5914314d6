"""Propagates dimensions through a jaxpr, with a rule for each primitive."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from ...core._control_flow import (
    AnyJaxpr,
    Call,
    CallKind,
    Cond,
    LinearSolve,
    Scan,
    While,
    consts_of,
    control_flow,
    inner_jaxprs,
    open_jaxpr,
    primitive_name,
)
from ...core._markers import gathered_dimension
from ..operations import Rule, opaque_rule, rule_of
from ..operations._rule_table import REDUCTIONS
from ._follow_rule import follow_rule
from ._graph import Graph, Value
from ._loop_weights import can_hoist_gradient_sum
from ._marked import gathered, record_constraint
from ._remat import Region, find_needed

# Only the results of these are constrained. XLA propagates shardings through other operations.
CONSTRAINED = frozenset(
    """
    conv_general_dilated dot_general gather ragged_dot ragged_dot_general scatter
    scatter-add scatter_add
    """.split()  # noqa: SIM905
)
# The derivatives of these need their results. XLA recomputes other elementwise results.
KEPT = frozenset(
    """
    cos div erf exp exp2 expm1 integer_pow log log1p log2 logistic max pow rsqrt sin sqrt square
    tanh
    """.split()  # noqa: SIM905
)
# The assumed number of iterations of a `while` loop.
ASSUMED_TRIPS = 10


@dataclass(eq=False)
class Scope:
    """The values of a jaxpr, and by index of an equation, its rule and the scopes of its jaxprs."""

    jaxpr: Jaxpr
    consts: Sequence[Any] = ()
    values: dict[Any, Value] = field(default_factory=dict)
    rules: dict[int, Rule | None] = field(default_factory=dict)
    inner: dict[int, list["Scope"]] = field(default_factory=dict)


Walked = tuple[list[Value], list[Scope]]  # the results of an equation, and the scopes inside it


def walk(graph: Graph, closed: AnyJaxpr, inputs: Sequence[Value]) -> Scope:
    """Propagates the dimensions of `inputs` through a jaxpr, and records them in the graph."""
    jaxpr = open_jaxpr(closed)
    scope = Scope(jaxpr, consts_of(closed))
    scope.values.update((var, graph.value(var.aval)) for var in jaxpr.constvars)
    graph.held.update(node for value in scope.values.values() for node in value.dims)
    scope.values.update(zip(jaxpr.invars, inputs, strict=True))
    regions, grads = graph.regions, [value.grad for value in inputs]
    used, differentiated, *remats = [find_needed(jaxpr, one, grads) for one in regions]
    for index, equation in enumerate(jaxpr.eqns):
        values = [_read(graph, scope, atom) for atom in equation.invars]
        if index not in differentiated.equations:
            values = [_copy(value, grad=False) for value in values]
        graph.forwards = 1.0 + sum(index in each.equations for each in remats)
        graph.kept = all(region.keeps(equation) for region in regions[2:])
        graph.inner = [each.inner[index] for each in (used, differentiated, *remats)]
        outer = graph.source
        graph.source = (*outer, equation)
        scope.rules[index] = rule_of(equation)
        with _repeated(graph, 1.0 if index in used.equations else 0.0):
            results, inner = _apply_rule(graph, equation, scope.rules[index], values)
        graph.source = outer
        if inner:
            scope.inner[index] = inner
        scope.values.update(zip(equation.outvars, results, strict=True))
    return scope


def outputs_of(graph: Graph, scope: Scope) -> list[Value]:
    """Returns the values of a jaxpr's outputs."""
    return [_read(graph, scope, atom) for atom in scope.jaxpr.outvars]


def _read(graph: Graph, scope: Scope, atom: Any) -> Value:
    return graph.value(atom.aval) if isinstance(atom, Literal) else scope.values[atom]


def _apply_rule(
    graph: Graph, equation: JaxprEqn, rule: Rule | None, inputs: Sequence[Value]
) -> Walked:
    name = primitive_name(equation)
    if (d := gathered_dimension(equation)) is not None:
        return gathered(graph, equation, inputs, d), []
    if rule is not None:
        for value in inputs:
            graph.first_use.setdefault(value.dims, graph.source)
        results = follow_rule(graph, equation, rule, inputs)
        if name == "sharding_constraint":
            record_constraint(graph, equation, inputs[0])
        if name in CONSTRAINED or name in KEPT:
            graph.save(results[0])
        if name in CONSTRAINED:
            graph.compute(results[0])
        if name in CONSTRAINED or name in REDUCTIONS:
            # XLA fuses other operations with one of these, so their results stay out of memory.
            for value in (*inputs, *results):
                graph.move(value)
        return results, []
    match control_flow(equation):
        case Scan() as scan:
            return _scan(graph, equation, scan, inputs)
        case While() as loop:
            return _while(graph, loop, inputs)
        case Cond() as cond:
            return _cond(graph, equation, cond, inputs)
        case Call() as call:
            return _call(graph, equation, call, inputs)
        case LinearSolve() as solve:
            # Without a scope, the equation is re-bound unchanged.
            scope = _walk_called(graph, solve.solve, [inputs[place] for place in solve.places])
            return outputs_of(graph, scope), []
    graph.unknown[equation.primitive.name] += 1
    return follow_rule(graph, equation, opaque_rule(equation), inputs), []


def _call(graph: Graph, equation: JaxprEqn, call: Call, inputs: Sequence[Value]) -> Walked:
    # A loop with a derivative of its own, such as attention in blocks, keeps its results and
    # computes what happens inside it again.
    recomputes = call.kind is CallKind.CUSTOM_VJP and any(
        isinstance(control_flow(inner), Scan | While)
        for jaxpr in inner_jaxprs(equation)
        for inner in jaxpr.eqns
    )
    wanted = (False,) * len(equation.outvars)
    regions = [Region(wanted)] if recomputes else []
    if call.kind is CallKind.REMAT:
        regions = [Region(wanted, True, call.policy)]
    before = len(graph.works)
    scope = _walk_called(graph, call.jaxpr, inputs, *regions)
    results = outputs_of(graph, scope)
    if recomputes:
        # The scores are half of the products.
        graph.works[before:] = [
            replace(work, flops=work.flops + work.forward / 2) for work in graph.works[before:]
        ]
        for value in results:
            graph.save(value)
    return results, [scope]


def _walk_called(graph: Graph, jaxpr: AnyJaxpr, inputs: Sequence[Value], *regions: Region) -> Scope:
    """Walks through a jaxpr that an equation calls, perhaps as a rematerialised region."""
    outside = graph.regions, graph.inner, graph.forwards, graph.kept
    graph.regions = (*(seen[open_jaxpr(jaxpr)] for seen in graph.inner), *regions)
    scope = walk(graph, jaxpr, inputs)
    graph.regions, graph.inner, graph.forwards, graph.kept = outside
    return scope


@contextmanager
def _repeated(graph: Graph, times: int | float) -> Iterator[None]:
    before = graph.times
    graph.times = before * times
    yield
    graph.times = before


def _scan(graph: Graph, equation: JaxprEqn, scan: Scan, inputs: Sequence[Value]) -> Walked:
    body, length = open_jaxpr(scan.body), scan.length
    consts, carry, xs = scan.split(inputs)
    const_vars, _, x_vars = scan.split(body.invars)
    hoisted = lambda var: graph.times if can_hoist_gradient_sum(body, var) else None
    consts = [_copy(x, x.grad, hoisted(var)) for x, var in zip(consts, const_vars, strict=True)]
    # A carry whose initial value has no gradient may have one after the first iteration.
    grad = any(value.grad for value in inputs)
    carry = [_copy(value, grad) for value in carry]
    layers = [value.dims[0] for value in xs]
    graph.blocked.update(layers)
    graph.stacks.update(layers)
    pairs = zip(xs, x_vars, strict=True)
    slices = [graph.value(var.aval, value.dims[1:], grad=value.grad) for value, var in pairs]
    with _repeated(graph, 0 if id(equation) in graph.skipped else length):
        for value in carry:
            graph.save(value)
        scope = _walk_called(graph, scan.body, [*consts, *carry, *slices])
    outputs = outputs_of(graph, scope)
    _link(graph, carry, outputs[: len(carry)])
    results = []
    for value, var in zip(outputs, equation.outvars, strict=True):
        stacked = len(results) >= len(carry)
        leading = (graph.node(length, blocked=True),) if stacked else ()
        results.append(graph.value(var.aval, (*leading, *value.dims), grad=value.grad))
    return results, [scope]


def _copy(value: Value, grad: bool, reduced: int | float | None = None) -> Value:
    """A distinct value with the same dimensions: inside a loop its cotangent is summed anew."""
    return Value(value.dims, value.shape, value.itemsize, grad, reduced)


def _link(graph: Graph, some: Sequence[Value], others: Sequence[Value]) -> None:
    for one, other in zip(some, others, strict=True):
        graph.link_all(one.dims, other.dims)


def _while(graph: Graph, loop: While, inputs: Sequence[Value]) -> Walked:
    cond_consts, body_consts, carry = loop.split(inputs)
    grad = any(value.grad for value in (*body_consts, *carry))
    carry = [_copy(value, grad) for value in carry]
    cond_consts, body_consts = (
        [_copy(value, value.grad) for value in consts] for consts in (cond_consts, body_consts)
    )
    with _repeated(graph, ASSUMED_TRIPS):
        cond = _walk_called(graph, loop.cond, [*cond_consts, *carry])
        body = _walk_called(graph, loop.body, [*body_consts, *carry])
    _link(graph, carry, outputs_of(graph, body))
    return carry, [cond, body]


def _cond(graph: Graph, equation: JaxprEqn, cond: Cond, inputs: Sequence[Value]) -> Walked:
    scopes = [_walk_called(graph, branch, inputs[1:]) for branch in cond.branches]
    outputs = [outputs_of(graph, scope) for scope in scopes]
    for other in outputs[1:]:
        _link(graph, outputs[0], other)
    results = [
        graph.value(var.aval, values[0].dims, grad=any(value.grad for value in values))
        for var, values in zip(equation.outvars, zip(*outputs, strict=True), strict=True)
    ]
    return results, scopes
