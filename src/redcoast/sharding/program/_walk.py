"""Propagates dimensions through a jaxpr, with a rule for each primitive."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.sharding import PartitionSpec as P

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
    is_callback,
    open_jaxpr,
    primitive_name,
)
from ...core._jaxpr import iter_equations
from ...core._mapped_callbacks import independent_levels
from ...core._markers import gathered_dimension
from ..operations import Atom, Rule, opaque_rule, rule_of
from ..operations._batched_rules import OF_ANY_ROW
from ..operations._rule import at_places
from ..operations._rule_table import KEPT, LARGE_OPERATIONS, REDUCTIONS
from ..operations._scan_over_rows import sums_over_iterations
from ..tree._overrides import spec_axes
from ._follow_rule import follow_rule
from ._graph import Cursor, Graph, Nodes, ProgramConstraint, Value, have_grad
from ._interpolation import Constants
from ._loop_weights import can_hoist_gradient_sum
from ._remat import Region, find_needed

# The cotangents of their results are rearranged likewise, and added to those of other uses.
_REARRANGING = "convert_element_type", "reshape", "slice", "squeeze", "transpose"
# The assumed number of iterations of a `while` loop.
ASSUMED_TRIPS = 10


@dataclass(eq=False)
class Scope:
    """The values of a jaxpr, and by index of an equation, its rule and the scopes of its jaxprs."""

    jaxpr: Jaxpr
    consts: Sequence[object] = ()
    values: dict[Atom, Value] = field(default_factory=dict)
    rules: dict[int, Rule | None] = field(default_factory=dict)
    inner: dict[int, list["Scope"]] = field(default_factory=dict)

    @cached_property
    def constants(self) -> Constants:
        return Constants(self.jaxpr, self.consts)

    def value_of(self, atom: Atom) -> Value | None:
        """The value of a variable; None for a literal."""
        if isinstance(atom, Literal):
            return None
        return self.values[atom]

    def varies(self, atom: Atom) -> bool:
        """Whether the loss is differentiated by this value."""
        return not isinstance(atom, Literal) and self.values[atom].grad


Walked = tuple[list[Value], list[Scope]]  # the results of an equation, and the scopes inside it


def walk(graph: Graph, closed: AnyJaxpr, inputs: Sequence[Value]) -> Scope:
    """Propagates the dimensions of `inputs` through a jaxpr, and records them in the graph."""
    jaxpr = open_jaxpr(closed)
    scope = Scope(jaxpr, consts_of(closed))
    for var in jaxpr.constvars:
        scope.values[var] = graph.value(var.aval)
        graph.of_constants.update(scope.values[var].nodes)
    scope.values.update(zip(jaxpr.invars, inputs, strict=True))
    cursor, grads = graph.cursor, [value.grad for value in inputs]
    needed = [find_needed(jaxpr, region, grads) for region in cursor.regions]
    # What the results depend on, what the loss depends on, and what each rematerialisation computes
    # again.
    used, differentiated, *remats = needed
    _, _, *rematerialised = cursor.regions
    # In the order of the program: a value is known before it is read.
    for index, equation in enumerate(jaxpr.eqns):
        values = _read(graph, scope, equation.invars)
        # What the loss does not depend on has no cotangent, as metrics.
        if index not in differentiated.equations:
            values = _copies(values, grad=False)
        rule = scope.rules[index] = rule_of(equation)
        if rule is not None and (rule.is_product or rule.is_lookup):
            graph.constants[id(equation)] = scope.constants
        graph.cursor = Cursor(
            cursor.regions,
            source=(*cursor.source, equation),
            # The compiler removes what no result needs, but for effects.
            times=cursor.times * (index in used.equations or bool(equation.effects)),
            forwards=1.0 + sum(index in remat.equations for remat in remats),
            is_saved=all(region.keeps(equation) for region in rematerialised),
            needed=tuple(of_region.inner[index] for of_region in needed),
            rows=cursor.rows,
        )
        results, inner = _apply_rule(graph, equation, rule, values)
        if inner:
            scope.inner[index] = inner
        scope.values.update(zip(equation.outvars, results, strict=True))
    graph.cursor = cursor
    return scope


def outputs_of(graph: Graph, scope: Scope) -> list[Value]:
    """Returns the values of a jaxpr's outputs."""
    return _read(graph, scope, scope.jaxpr.outvars)


def _read(graph: Graph, scope: Scope, atoms: Sequence[Atom]) -> list[Value]:
    # A literal shares its dimensions with nothing.
    return [scope.value_of(atom) or graph.value(atom.aval) for atom in atoms]


def _apply_rule(
    graph: Graph, equation: JaxprEqn, rule: Rule | None, inputs: Sequence[Value]
) -> Walked:
    name = primitive_name(equation)
    gathered_dim = gathered_dimension(equation)
    if gathered_dim is not None:
        # The sequence is needed as a whole, and gathered if it is split. What uses the result sums
        # its cotangent.
        operand, dims = inputs[0], list(inputs[0].nodes)
        graph.add_batch_gather(operand, dims[gathered_dim])
        dims[gathered_dim] = graph.node(operand.shape[gathered_dim])
        return [graph.value(equation.outvars[0].aval, tuple(dims), grad=operand.grad)], []
    if is_callback(equation):
        return _call_host(graph, equation, rule, inputs), []
    if rule is not None:
        _note_first_use(graph, rule, inputs)
        results = follow_rule(graph, equation, rule, inputs)
        if have_grad(results) and name in _REARRANGING:
            graph.rearranged[results[0]] = inputs[0]
        elif have_grad(results):
            for value in inputs:
                graph.last_use[graph.origins(value)[-1]] = graph.cursor.source
        _note_grouping(graph, rule, inputs, results)
        if name == "sharding_constraint":
            _record_constraint(graph, equation, inputs[0])
        if name in LARGE_OPERATIONS or name in KEPT:
            graph.add_saved(results[0])
        if name in LARGE_OPERATIONS:
            graph.add_bytes(graph.large_result_bytes, results[0])
        if name in LARGE_OPERATIONS or name in REDUCTIONS:
            # XLA fuses other operations with one of these, so their results stay out of memory.
            for value in (*inputs, *results):
                passes = graph.cursor.forwards + value.grad
                graph.add_bytes(graph.memory_traffic, value, passes)
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
            results, _ = _walk_called(graph, solve.solve, at_places(inputs, solve.places))
            matvec, places = solve.functions["matvec"]
            matrix = at_places(inputs, places)
            if have_grad(matrix):
                # The gradient of a matrix is that of its product with the solution.
                _walk_called(graph, matvec, [*matrix, *results])
            return results, []
    graph.unknown[equation.primitive.name] += 1
    return follow_rule(graph, equation, opaque_rule(equation), inputs), []


def _note_first_use(graph: Graph, rule: Rule, inputs: Sequence[Value]) -> None:
    """Records where arrays are first read. Lookups in a table are constrained by themselves."""
    for place, value in enumerate(inputs):
        graph.first_use.setdefault(value.nodes, graph.cursor)
        if rule.is_lookup and place == 0:
            graph.looked_up.add(value)
        else:
            graph.first_whole_use.setdefault(value.nodes, graph.cursor)


def _note_grouping(
    graph: Graph, rule: Rule, inputs: Sequence[Value], results: Sequence[Value]
) -> None:
    """Records that the first dimension alone is divided, as that of layers into groups, or joined
    again."""
    if not inputs or not results:
        return
    before, after = inputs[0], results[0]
    if len(before.nodes) == len(after.nodes):
        is_single = after.shape[:1] == (1,) and before.shape[1:] == after.shape[1:]
        if is_single and rule.is_slice:
            graph.singled.add(before.nodes[0])
        return
    joined, split = before, after
    whole, divided = rule.operands[0], rule.results[0]
    if len(divided) < len(whole):
        joined, split = after, before
        whole, divided = divided, whole
    parts = 1 + len(divided) - len(whole)
    if whole == (tuple(chain(*divided[:parts])), *divided[parts:]):
        graph.groupings.append((joined.nodes[0], split.nodes[:parts]))


def _record_constraint(graph: Graph, equation: JaxprEqn, operand: Value) -> None:
    """Keeps what the program constrains itself, dimension by dimension."""
    params = equation.params
    spec = getattr(params["sharding"], "spec", None)
    if spec is None:
        return
    entries = (*spec, *[None] * (len(operand.nodes) - len(spec)))
    axes_by_dim: list[tuple[str, ...] | None] = []
    for d, (node, entry) in enumerate(zip(operand.nodes, entries, strict=True)):
        if entry is P.UNCONSTRAINED or d in params["unconstrained_dims"]:
            axes_by_dim.append(None)
            continue
        axes_by_dim.append(spec_axes(entry))
        axes = (*graph.constrained.get(node, ()), *spec_axes(entry))
        graph.constrained[node] = tuple(dict.fromkeys(axes))  # each once
    cursor = graph.cursor
    backward = cursor.times * operand.grad
    graph.constraints.append(
        ProgramConstraint(operand, tuple(axes_by_dim), cursor.runs, backward, cursor.source)
    )


def _call_host(
    graph: Graph, equation: JaxprEqn, rule: Rule | None, inputs: Sequence[Value]
) -> list[Value]:
    """Operands are gathered on one device. Its results go to all, which may keep a part alone."""
    along: Nodes = ()
    before = len(graph.moves)
    inputs = _copies(inputs, grad=False)  # no gradient flows through the host
    levels = independent_levels(equation)
    if rule is not None and levels:
        results = follow_rule(graph, equation, rule, inputs)
        along = results[0].nodes[:levels]
    else:
        graph.unknown[equation.primitive.name] += 1
        results = follow_rule(graph, equation, opaque_rule(equation, results=False), inputs)
    del graph.moves[before:]  # rows are gathered for the host, and counted there
    if not results:
        for value in inputs:
            for node in value.nodes:
                graph.add_reshard(value, node, value, None)
    in_loop = _any_is(graph.cursor.source[:-1], Cond, While)
    is_inside = in_loop or len(graph.cursor.rows) > 0
    graph.add_host_call(inputs, results, is_inside=is_inside, along=along)
    return results


def _call(graph: Graph, equation: JaxprEqn, call: Call, inputs: Sequence[Value]) -> Walked:
    # A loop with a derivative of its own, such as attention in blocks, keeps its results and
    # computes what happens inside it again.
    has_loop = any(_any_is(jaxpr.eqns, Scan, While) for jaxpr in inner_jaxprs(equation))
    recomputes = call.kind is CallKind.CUSTOM_VJP and has_loop
    no_results = (False,) * len(equation.outvars)
    regions: list[Region] = []
    if recomputes:
        regions = [Region(no_results)]
    elif call.kind is CallKind.REMAT:
        regions = [Region(no_results, True, call.policy)]  # nothing but what derivatives need
    before = len(graph.works)
    results, scope = _walk_called(graph, call.jaxpr, inputs, *regions)
    if recomputes:
        # The backward pass of attention computes its scores again, which are half of the products.
        for index in range(before, len(graph.works)):
            work = graph.works[index]
            graph.works[index] = replace(
                work, flops=work.flops + work.forward / 2, forwards=work.forwards + 1 / 2
            )
        for value in results:
            graph.add_saved(value)
    return results, [scope]


def _any_is(equations: Iterable[JaxprEqn], *kinds: type) -> bool:
    return any(isinstance(control_flow(equation), kinds) for equation in equations)


def _walk_called(
    graph: Graph, jaxpr: AnyJaxpr, inputs: Sequence[Value], *regions: Region
) -> tuple[list[Value], Scope]:
    """Walks through a jaxpr that an equation calls, perhaps as a rematerialised region."""
    outside = graph.cursor
    inside = [of_region[open_jaxpr(jaxpr)] for of_region in outside.needed]
    graph.cursor = replace(outside, regions=(*inside, *regions))
    scope = walk(graph, jaxpr, inputs)
    graph.cursor = outside
    return outputs_of(graph, scope), scope


def _scan(graph: Graph, equation: JaxprEqn, scan: Scan, inputs: Sequence[Value]) -> Walked:
    body, length = open_jaxpr(scan.body), scan.length
    consts, carry, xs = scan.split(inputs)
    const_vars, _, x_vars = scan.split(body.invars)
    # Each device runs a loop that asks whether any row needs something, as `eqx.error_if` does, on
    # its own rows, and sums gradients after it.
    is_local = not OF_ANY_ROW.isdisjoint(map(primitive_name, iter_equations(body)))
    copied_consts: list[Value] = []
    for value, var in zip(consts, const_vars, strict=True):
        cotangent_sums = None
        if is_local:
            cotangent_sums = _summed_once(graph, value)
        elif can_hoist_gradient_sum(body, var):
            cotangent_sums = graph.cursor.times  # once for all iterations
        copied_consts.append(_closed_over(graph, value, cotangent_sums))
    # A carry whose initial value has no gradient may have one after the first iteration.
    carry = _copies(carry, have_grad(inputs))  # (batch, ...)
    slices: list[Value] = []
    # Iterations that are independent are those of the rows, if the batch is split along them.
    is_map = bool(xs) and sums_over_iterations(scan) is not None
    for value, var in zip(xs, x_vars, strict=True):
        layers, *dims = value.nodes
        graph.block(layers)
        graph.stacks.add(layers)
        if scan.unroll >= scan.length:
            graph.unrolled.add(layers)
        # One layer has the dimensions of the stack, without the first.
        slices.append(graph.value(var.aval, tuple(dims), grad=value.grad))
        if is_map:
            graph.mapped.add(layers)
            graph.link(xs[0].nodes[0], layers)
            if dims:
                graph.add_move(value, dims[0], slices[-1], dims[0])
        else:
            # A scan over rows, and not over layers, needs one row after the other.
            graph.add_move(value, layers, slices[-1], None)
    outside = graph.cursor
    graph.scans[id(equation)] = outside.times, copied_consts
    if is_map:
        for value in consts:
            graph.add_partial_sum(xs[0].nodes[0], value, backward=True)
        graph.cursor = replace(graph.cursor, rows=(*graph.cursor.rows, xs[0].nodes[0]))
    times = graph.cursor.times * (length * graph.shares.get(id(equation), 1))
    graph.cursor = replace(graph.cursor, times=times)
    # The backward pass begins each iteration with what was carried into it.
    for value in carry:
        graph.add_saved(value)
    outputs, scope = _walk_called(graph, scan.body, [*copied_consts, *carry, *slices])
    graph.cursor = outside
    # Each iteration's result is the next one's operand, so that they are sharded alike.
    _link(graph, carry, outputs[: len(carry)])
    results: list[Value] = []
    for index, (value, var) in enumerate(zip(outputs, equation.outvars, strict=True)):
        dims = value.nodes
        if index >= len(carry):
            stacked = xs[0].nodes[0] if is_map else graph.node(length, blocked=True)
            dims = (stacked, *dims)  # (length, ...)
        results.append(graph.value(var.aval, dims, grad=value.grad))
    return results, [scope]


def _summed_once(graph: Graph, value: Value) -> int | float:
    """How often a gradient is summed over devices that run a loop alone: after the outermost."""
    if value.cotangent_sums is not None:
        return value.cotangent_sums
    return graph.cursor.times


def _closed_over(graph: Graph, value: Value, cotangent_sums: int | float | None) -> Value:
    """An array in a loop that closes over it, whose cotangent is summed so often in a step."""
    inside = replace(value, cotangent_sums=cotangent_sums)
    if cotangent_sums is not None and value.grad:
        graph.rearranged[inside] = value
    return inside


def _copies(values: Sequence[Value], grad: bool | None = None) -> list[Value]:
    """Distinct values with the same dimensions: inside a loop their cotangents are summed anew.

    By default, gradients flow into the same values.
    """
    changed: dict[str, object] = {"cotangent_sums": None}
    if grad is not None:
        changed["grad"] = grad
    return [replace(value, **changed) for value in values]


def _link(graph: Graph, values: Sequence[Value], others: Sequence[Value]) -> None:
    for value, other in zip(values, others, strict=True):
        for node, other_node in zip(value.nodes, other.nodes, strict=True):
            graph.link(node, other_node)


def _while(graph: Graph, loop: While, inputs: Sequence[Value]) -> Walked:
    cond_consts, body_consts, carry = loop.split(inputs)
    carry = _copies(carry, have_grad([*body_consts, *carry]))
    cond_consts = _copies(cond_consts, grad=False)  # a condition has no derivative
    body_consts = [_closed_over(graph, value, _summed_once(graph, value)) for value in body_consts]
    outside = graph.cursor
    graph.cursor = replace(outside, times=outside.times * ASSUMED_TRIPS)
    _, cond = _walk_called(graph, loop.cond, [*cond_consts, *carry])
    outputs, body = _walk_called(graph, loop.body, [*body_consts, *carry])
    graph.cursor = outside
    _link(graph, carry, outputs)
    # The carry is the result too, after any number of iterations.
    return carry, [cond, body]


def _cond(graph: Graph, equation: JaxprEqn, cond: Cond, inputs: Sequence[Value]) -> Walked:
    walked = [_walk_called(graph, branch, inputs[1:]) for branch in cond.branches]
    (first, *others), scopes = zip(*walked, strict=True)
    # Which branch runs is not known, so that all are sharded alike.
    for other in others:
        _link(graph, first, other)
    results: list[Value] = []
    for var, *of_branches in zip(equation.outvars, first, *others, strict=True):
        grad = have_grad(of_branches)
        results.append(graph.value(var.aval, of_branches[0].nodes, grad=grad))
    return results, list(scopes)
