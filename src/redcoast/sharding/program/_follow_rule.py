"""Adds the results of an operation to the graph, by the rule of its primitive.

A dimension that is the product of several factors can only be sharded along the slowest of them,
which therefore decides what becomes of the dimension. For `[i k], [k j] -> [i j]`:

- The result has the node of the first operand's `i` and that of the second's `j`. The two nodes of
  `k` are linked (`_add_results`).
- A device with a part of `k` has partial sums of the result (`_sum_forward`).
- A device with a part of `j` has partial sums of the first operand's cotangent, and one with a part
  of `i` has those of the second's (`_sum_backward`).
- The arithmetic is divided by who has a part of `i`, `j` or `k` (`_count_work`).

What an operation does not carry ends a sharding or moves rows (`_gather_whole`, `_reshard_moved`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from ...core._jaxpr import multiply_adds
from ..operations import (
    Dimension,
    Dimensions,
    Factor,
    Rule,
    all_factors,
    shape_of,
    stops_gradient,
)
from ._graph import Graph, Nodes, Reshard, Value, have_grad


class _Dim(NamedTuple):
    """One dimension of an array: its place `d`, its node in the graph, and its factors."""

    value: Value
    d: int
    node: int
    dimension: Dimension

    @property
    def slowest(self) -> Factor:
        return self.dimension[0]


def _dims_of(values: Sequence[Value], arrays: Sequence[Dimensions]) -> list[_Dim]:
    dims: list[_Dim] = []
    for value, dimensions in zip(values, arrays, strict=True):
        for d, (node, dimension) in enumerate(zip(value.nodes, dimensions, strict=True)):
            dims.append(_Dim(value, d, node, dimension))
    return dims


@dataclass(frozen=True)
class _AppliedRule:
    """An operation whose results are in the graph.

    `before` are the dimensions of its operands, and `after` those of its results. Along `resharded`
    factors, a dimension ends in an operand and begins anew in a result.
    """

    graph: Graph
    rule: Rule
    inputs: Sequence[Value]
    results: Sequence[Value]
    before: Sequence[_Dim]
    after: Sequence[_Dim]
    resharded: frozenset[Factor]

    @cached_property
    def indexed(self) -> Nodes:
        """The dimensions of the first operand that are addressed by number.

        Where these are rows of the batch too, each device has its own rows of the result, and none
        are summed.
        """
        return tuple(dim.node for dim in self.operand(0) if dim.slowest in self.rule.indexed)

    def operand(self, place: int) -> list[_Dim]:
        """The dimensions of one operand."""
        return _dims_of([self.inputs[place]], [self.rule.operands[place]])


def follow_rule(
    graph: Graph, equation: JaxprEqn, rule: Rule, inputs: Sequence[Value]
) -> list[Value]:
    """Returns the results of an operation, and records in the graph what sharding it costs.

    A dimension of a result is the operands' node if its factors are carried, or if it is of an
    array that is written into. Otherwise it is a new node.
    """
    before = _dims_of(inputs, rule.operands)
    # A dimension ends in an operand and begins anew in a result, where a batch is sharded again, if
    # it is moved, or is needed as a whole on both sides, as in a concatenation. Sorted elements may
    # come from any place. An array that is written into keeps its dimensions.
    resharded = frozenset[Factor]()
    if rule.writes is None:
        common = all_factors(chain(*rule.operands)) & all_factors(chain(*rule.results))
        resharded = (rule.moved | (rule.whole & common)) - rule.shuffled
    results = _add_results(graph, equation, rule, inputs, before, resharded)
    after = _dims_of(results, rule.results)
    applied = _AppliedRule(graph, rule, inputs, results, before, after, resharded)
    near = dict(rule.near)
    for dim in (*before, *after):
        if dim.slowest in rule.blocked:
            graph.block(dim.node, near=dim.slowest in near)
    # A split example exchanges halos along these.
    for target in after:
        if target.slowest not in near:
            continue
        *others, field = [dim for dim in before if dim.slowest == target.slowest]
        graph.add_halo(field.value, field.node, target.value, target.node, near[target.slowest])
        # The derivatives of pooling read windows too. What is exchanged are parts of the field.
        for dim in others:
            graph.link_softly(dim.node, target.node)
    # Created arrays, and calls without results, send nothing.
    if not inputs or not results:
        return results
    _gather_whole(applied)
    _reshard_moved(applied)
    _note_transposed(applied)
    _sum_forward(applied)
    # What is written into is not used along all of its dimensions.
    if rule.writes is None:
        _sum_backward(applied)
    else:
        _write(applied, rule.writes)
    _count_work(applied, equation)
    return results


def _add_results(
    graph: Graph,
    equation: JaxprEqn,
    rule: Rule,
    inputs: Sequence[Value],
    before: Iterable[_Dim],
    resharded: frozenset[Factor],
) -> list[Value]:
    """Adds the results, with the nodes of the operands where dimensions are carried."""
    shared: dict[Dimension, int] = {}  # the first node of each dimension of operands
    for dim in before:
        first = shared.setdefault(dim.dimension, dim.node)
        # The parts of a concatenation have a dimension each.
        if dim.slowest not in resharded:
            graph.link(first, dim.node)
    of_operands, changed = all_factors(shared), resharded | rule.whole
    nodes = {dimension: node for dimension, node in shared.items() if dimension[0] not in changed}
    results: list[Value] = []
    for place, (var, dimensions) in enumerate(zip(equation.outvars, rule.results, strict=True)):
        dims: list[int] = []
        for size, dimension in zip(shape_of(var), dimensions, strict=True):
            if dimension in nodes:
                node = nodes[dimension]
                if graph.sizes[node] != size:  # queries have more heads than keys
                    node = graph.node(size)
                    graph.link(nodes[dimension], node)
                dims.append(node)
                continue
            factor = dimension[0]
            created = size > 1 and factor not in of_operands | rule.moved | rule.whole
            if factor in rule.shuffled:
                # A permutation that the program samples is also created by it.
                created = shared[dimension] in graph.created
            dims.append(graph.node(size, created=created))
            if factor in rule.shuffled:
                nodes[dimension] = dims[-1]  # all results are sorted alike
        # Whether a gradient flows into it, and how often that gradient is summed.
        grad, cotangent_sums = have_grad(inputs), None
        if stops_gradient(equation):
            grad = False
        elif rule.copies:
            grad, cotangent_sums = inputs[0].grad, inputs[0].cotangent_sums
        elif rule.is_product and () in (inputs[0].shape, inputs[1].shape):
            # Of a weight that is scaled.
            cotangent_sums = inputs[0].cotangent_sums or inputs[1].cotangent_sums
        elif rule.is_pairwise:
            grad = inputs[place].grad
        results.append(graph.value(var.aval, tuple(dims), grad=grad, cotangent_sums=cotangent_sums))
    return results


def _gather_whole(applied: _AppliedRule) -> None:
    """Records dimensions that are needed as a whole: nothing stays sharded along them."""
    graph, rule = applied.graph, applied.rule
    needed = rule.whole - rule.blocked - applied.resharded
    gathered = rule.whole - dict(rule.near).keys() - applied.resharded
    for dim in applied.before:
        if dim.slowest in needed:
            graph.add_reshard(dim.value, dim.node, applied.results[0], None)
        # Rows that are blocked, as those of a matrix that is decomposed, are gathered too, once for
        # both of its dimensions.
        is_first = dim.node not in dim.value.nodes[: dim.d]
        if dim.slowest in gathered and is_first and rule.writes is None:
            graph.add_move(dim.value, dim.node, applied.results[0], None)
    for dim in applied.after:
        if dim.slowest in needed:
            graph.add_reshard(dim.value, None, dim.value, dim.node)


def _reshard_moved(applied: _AppliedRule) -> None:
    """Records dimensions that are cut, joined or regrouped, such as (8, 6) to (48,).

    A dimension of an operand goes on in its targets, the dimensions of results that begin with the
    same factor. The two are linked softly, and if that factor keeps its elements, as 8 does here,
    also linked if the devices divide it. Otherwise, the operand is gathered before the operation,
    and the cotangent of the result after its derivative.
    """
    graph, rule, resharded = applied.graph, applied.rule, applied.resharded
    before = set(chain(*rule.operands))
    after = set(chain(*rule.results))
    unchanged = {dimension for dimension in before & after if dimension[0] not in resharded}
    common = all_factors(before) & all_factors(after)
    skipped = (rule.whole - resharded) | rule.blocked | rule.reduced

    def is_changed(dim: _Dim) -> bool:
        is_common = not common.isdisjoint(dim.dimension)
        return is_common and dim.dimension not in unchanged and dim.slowest not in skipped

    # The cotangent of a result is gathered once for all operands: with the first that has one.
    with_cotangent = applied.inputs
    if len(applied.inputs) > 1:
        with_cotangent = [value for value in applied.inputs if value.grad]
    continued: set[int] = set()  # dimensions of results that are targets
    for dim in filter(is_changed, applied.before):
        targets = [target for target in applied.after if target.slowest == dim.slowest]
        # One gather of the operand serves all results.
        source: int | None = dim.node
        for target in targets:
            of_cotangent: int | None = None
            if dim.value in with_cotangent[:1]:
                of_cotangent = target.node
            graph.add_reshard(dim.value, source, target.value, of_cotangent)
            if dim.slowest in resharded:
                graph.add_move(dim.value, dim.node, target.value, target.node)
            if source is None or of_cotangent is None:  # otherwise the reshard has linked the two
                graph.link_softly(dim.node, target.node)
            continued.add(target.node)
            source = None
            if dim.slowest not in resharded:
                # The two begin with the same factor, which is what is sharded.
                first, size = dim.node, rule.sizes[dim.slowest]
                if size not in (graph.sizes[first], graph.sizes[target.node]):
                    first = graph.node(size)
                    graph.link(dim.node, first)
                graph.link(first, target.node)
        if not targets:
            graph.add_reshard(dim.value, dim.node, applied.results[0], None)
            graph.add_move(dim.value, dim.node, applied.results[0], None)
    for dim in filter(is_changed, applied.after):
        if dim.node not in continued:
            graph.add_reshard(applied.inputs[0], None, dim.value, dim.node)


def _note_transposed(applied: _AppliedRule) -> None:
    """Records arrays that are transposed, such as tables of all pairs of rows, and combined with
    others."""
    graph, rule, inputs, result = applied.graph, applied.rule, applied.inputs, applied.results[0]
    after = rule.results[0]
    if len(inputs) == 1 and rule.copies and set(rule.operands[0]) == set(after):
        for (d, first), (e, second) in combinations(enumerate(rule.operands[0]), 2):
            is_square = inputs[0].shape[d] == inputs[0].shape[e]
            if is_square and after.index(first) > after.index(second):
                graph.add_transposed(inputs[0], result)
        return
    if graph.transposed.keys().isdisjoint(inputs) or rule.reduced | rule.moved | rule.whole:
        return
    others: list[Value] = []  # of the same rank as the result
    transposed: list[Reshard] = []
    for value, dimensions in zip(inputs, rule.operands, strict=True):
        if value in graph.transposed:
            transposed.append(graph.transposed[value])
        elif len(dimensions) == len(after):
            others.append(value)
    if others:
        graph.turns += transposed
    else:
        graph.transposed[result] = transposed[0]


def _sum_forward(applied: _AppliedRule) -> None:
    """Records partial sums: each device sums over its part of a reduced dimension.

    An array that is sharded along an earlier dimension is not sharded along this one. Of two
    operands that are, as in a product with a matrix of pairs of rows, the other one is gathered.
    """
    graph, rule = applied.graph, applied.rule
    summed: dict[Factor, list[_Dim]] = {}
    for dim in applied.before:
        if dim.slowest in rule.reduced - rule.blocked:
            summed.setdefault(dim.slowest, []).append(dim)
    for dims in summed.values():
        earlier = [dim.value.nodes[: dim.d] for dim in dims]
        unless = tuple(chain(*earlier))
        if len(dims) > 1:
            unless += applied.indexed
        for dim, own, others in zip(dims, earlier, reversed(earlier), strict=True):
            if len(dims) == 2 and others:
                graph.add_batch_gather(dim.value, dim.node, preceding=others, along=own)
        for result in applied.results:
            graph.add_partial_sum(dims[0].node, result, unless=unless)


def _sum_backward(applied: _AppliedRule) -> None:
    """Records the dimensions of the result that an operand does not have.

    The operand is used along all of them, so that its cotangent is summed over them. Where its own
    dimensions follow one of these in the result, both cannot be sharded alike.
    """
    rule, result = applied.rule, applied.results[0]
    # A split example has parts of the gradient of a kernel.
    skipped = rule.whole | (rule.moved | rule.blocked) - dict(rule.near).keys()
    for value, of_value in zip(applied.inputs, rule.operands, strict=True):
        own = all_factors(of_value)
        lacking: list[int] = []
        for dim in _dims_of([result], rule.results[:1]):
            if dim.dimension in of_value and lacking:
                # In a table of all pairs of examples, the first dimension takes the devices.
                applied.graph.add_batch_gather(value, dim.node, preceding=tuple(lacking))
            elif own.isdisjoint(dim.dimension) and dim.slowest not in skipped:
                unless = (*result.nodes[: dim.d], *applied.indexed)
                applied.graph.add_partial_sum(dim.node, value, backward=True, unless=unless)
                lacking.append(dim.node)


def _write(applied: _AppliedRule, updates: int) -> None:
    """Records dimensions of which a part is written, and updates that overwrite.

    Updates that overwrite cannot be summed, so they are gathered, with their indices. If such a
    write is differentiated, every update has a number: a device gathers the numbers, writes them in
    place of the updates, and looks up which of them are left. Those updates alone are added.
    """
    graph, rule, result = applied.graph, applied.rule, applied.results[0]
    written = applied.inputs[updates]
    for dim in applied.operand(0):
        if dim.slowest in rule.moved:
            graph.add_reshard(dim.value, dim.node, result, None)
    of_indices = set(chain(*rule.operands[1:updates]))
    counted: list[int] = []  # the dimensions that count updates that overwrite
    for dim in applied.operand(updates):
        if dim.dimension in of_indices and dim.slowest in rule.whole:
            counted.append(dim.node)
    equation = graph.cursor.source[-1]
    is_numbered = result.grad and not equation.params.get("unique_indices")
    gathered = written
    if is_numbered:
        numbers = jax.ShapeDtypeStruct(written.shape, jnp.uint32)
        gathered = graph.value(numbers, written.nodes)
    for node in counted:
        for value in (*applied.inputs[1:updates], gathered):
            graph.add_batch_gather(value, node)
        if is_numbered:
            # Updates are added where all devices have the rows that they are added to, and summed
            # then. Where these are rows of the batch, all updates are gathered.
            graph.add_partial_sum(node, result, unless=applied.indexed)
            graph.add_batch_gather(written, node, preceding=applied.indexed)
    if counted and is_numbered:
        for node in applied.indexed:
            graph.add_partial_sum(node, gathered)
            graph.add_partial_sum(node, written, backward=True)
    if rule.sums:
        # The cotangent of updates is looked up in that of the result.
        rows = tuple(dim.node for dim in applied.operand(1))
        for node in applied.indexed:
            graph.add_partial_sum(node, written, backward=True, unless=rows)


def _count_work(applied: _AppliedRule, equation: JaxprEqn) -> None:
    """Records the arithmetic of a contraction, forward and backward."""
    graph, rule, (result, *_) = applied.graph, applied.rule, applied.results
    count = multiply_adds(equation)
    # Nothing is divided along the dimensions of a grouped convolution's derivative.
    is_whole = len(rule.results[0]) > 0 and all_factors(rule.results[0]) <= rule.whole
    if count is None or is_whole:
        return
    dims = list(result.nodes)
    for dim in applied.operand(0):
        if not rule.reduced.isdisjoint(dim.dimension):
            dims.append(dim.node)
    first, second, *_ = applied.inputs
    passes = graph.cursor.forwards + first.grad + second.grad
    if not rule.linear:
        # Attention, which alone is not linear in its operands, has two products in the forward pass
        # and five in the backward pass.
        passes = graph.cursor.forwards + 2.5 * first.grad
    graph.add_work(tuple(dims), 2.0 * count, passes, *applied.inputs)
