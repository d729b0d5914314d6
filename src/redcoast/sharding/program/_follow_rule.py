"""Adds the results of an operation to the graph, by the rule of its primitive.

A dimension that is the product of several factors can only be sharded along the slowest of them,
`dimension[0]`, which therefore decides what becomes of the dimension.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain

from jax.extend.core import JaxprEqn

from ...core._multiply_adds import multiply_adds
from ..operations import Dimension, Dimensions, Factor, Rule, all_factors, shape_of
from ._graph import Dims, Graph, Value, have_grad


def follow_rule(
    graph: Graph, equation: JaxprEqn, rule: Rule, inputs: Sequence[Value]
) -> list[Value]:
    """Returns the results of an operation, and records in the graph what sharding it costs.

    A dimension of a result is the operands' node if its factors are carried, and a new node
    otherwise.
    """
    resharded = _resharded(rule)
    shared = _link_operands(graph, rule, resharded, inputs)
    results = _add_results(graph, equation, rule, resharded, inputs, shared)
    if rule.blocked:
        _block(graph, rule, [*inputs, *results])
    if rule.near:
        _exchange(graph, rule, inputs, results)
    # Created arrays, and calls without results, send nothing.
    if not inputs or not results:
        return results
    if rule.whole:
        _gather_whole(graph, rule, resharded, inputs, results)
    if resharded or _regroups(rule):
        _reshard_moved(graph, rule, resharded, inputs, results)
    if rule.reduced:
        _sum_forward(graph, rule, inputs, results)
    # What is written into is not used along all of its dimensions.
    if rule.writes is None:
        _sum_backward(graph, rule, inputs, results[0])
    else:
        _write(graph, rule, inputs, results[0])
    _count_work(graph, equation, rule, inputs, results)
    return results


def _block(graph: Graph, rule: Rule, values: Sequence[Value]) -> None:
    for _, _, node, dimension in _dimensions(values, [*rule.operands, *rule.results]):
        if dimension[0] in rule.blocked:
            graph.block(node, near=dimension[0] in dict(rule.near))


def _exchange(graph: Graph, rule: Rule, inputs: Sequence[Value], results: Sequence[Value]) -> None:
    """Records the dimensions along which a split example exchanges halos."""
    count = dict(rule.near)
    again = have_grad(inputs)
    targets: dict[Factor, list[tuple[Value, int]]] = defaultdict(list)
    for result, _, node, dimension in _dimensions(results, rule.results):
        targets[dimension[0]].append((result, node))
    for value, _, node, dimension in _dimensions(inputs, rule.operands):
        if dimension[0] in count:
            for result, target in targets[dimension[0]]:
                graph.add_halo(value, node, result, target, count[dimension[0]], again)


def _dimensions(
    values: Sequence[Value], arrays: Sequence[Dimensions]
) -> Iterator[tuple[Value, int, int, Dimension]]:
    """Each dimension of some arrays: the array, its place, its node and its factors."""
    for value, dimensions in zip(values, arrays, strict=True):
        for d, (node, dimension) in enumerate(zip(value.dims, dimensions, strict=True)):
            yield value, d, node, dimension


def _resharded(rule: Rule) -> frozenset[Factor]:
    """The factors whose dimension ends in an operand and begins anew in a result.

    A batch is sharded again there. These are what is moved, and what is needed as a whole and
    stands on both sides, as in a concatenation. Sorted elements may come from any place.
    """
    if rule.writes is not None or not rule.moved | rule.whole:
        return frozenset()  # an array that is written into keeps its dimensions
    # What is whole on one side alone ends or begins there, and is not sharded again.
    common = all_factors(chain(*rule.operands)) & all_factors(chain(*rule.results))
    return (rule.moved | (rule.whole & common)) - rule.shuffled


def _regroups(rule: Rule) -> bool:
    """Whether a reshape joins dimensions, such as (8, 6) to (48,), or takes one apart."""
    return max(map(len, chain(*rule.operands, *rule.results)), default=0) > 1


def _link_operands(
    graph: Graph, rule: Rule, resharded: frozenset[Factor], inputs: Sequence[Value]
) -> dict[Dimension, int]:
    """Links the dimensions that several operands have, and returns a node for each dimension."""
    shared: dict[Dimension, int] = {}
    for _, _, node, dimension in _dimensions(inputs, rule.operands):
        first = shared.setdefault(dimension, node)
        # The parts of a concatenation have a dimension each.
        if dimension[0] not in resharded:
            graph.link(first, node)
    return shared


def _add_results(
    graph: Graph,
    equation: JaxprEqn,
    rule: Rule,
    resharded: frozenset[Factor],
    inputs: Sequence[Value],
    shared: dict[Dimension, int],
) -> list[Value]:
    """Adds the results, with the nodes of the operands where dimensions are carried."""
    of_operands = all_factors(shared)
    changed = resharded | rule.whole
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
        grad, reduced = _gradient(equation, rule, inputs, place)
        results.append(graph.value(var.aval, tuple(dims), grad=grad, reduced=reduced))
    return results


def _gradient(
    equation: JaxprEqn, rule: Rule, inputs: Sequence[Value], place: int
) -> tuple[bool, int | float | None]:
    """Whether a gradient flows into a result, and how often that gradient is summed."""
    name = equation.primitive.name
    if name == "stop_gradient":
        return False, None
    if name in ("broadcast_in_dim", "transpose"):
        return inputs[0].grad, inputs[0].reduced
    if rule.is_pairwise:
        return inputs[place].grad, None
    return have_grad(inputs), None


def _gather_whole(
    graph: Graph,
    rule: Rule,
    resharded: frozenset[Factor],
    inputs: Sequence[Value],
    results: Sequence[Value],
) -> None:
    """Records dimensions that are needed as a whole: nothing stays sharded along them."""
    needed = rule.whole - rule.blocked - resharded
    for value, _, node, dimension in _dimensions(inputs, rule.operands):
        if dimension[0] in needed:
            graph.add_reshard(value, node, results[0], None)
            if rule.writes is None:
                graph.add_move(value, node, results[0], None)
    for value, _, node, dimension in _dimensions(results, rule.results):
        if dimension[0] in needed:
            graph.add_reshard(value, None, value, node)


def _reshard_moved(
    graph: Graph,
    rule: Rule,
    resharded: frozenset[Factor],
    inputs: Sequence[Value],
    results: Sequence[Value],
) -> None:
    """Records dimensions that are cut, joined or regrouped.

    Dimensions of operands and results that begin with the same factor are linked softly: a batch
    that is cut or joined is sharded again, because the operations that follow act on each example.
    """
    skipped = (rule.whole - resharded) | rule.blocked | rule.reduced
    before, after = _all_dimensions(rule.operands), _all_dimensions(rule.results)
    unchanged = {dimension for dimension in before & after if dimension[0] not in resharded}
    common = all_factors(before) & all_factors(after)
    beginnings: dict[Factor, list[tuple[Value, int]]] = defaultdict(list)
    for result, _, node, dimension in _dimensions(results, rule.results):
        beginnings[dimension[0]].append((result, node))
    # The cotangent of a result is gathered once for all operands.
    with_cotangent = inputs
    if len(inputs) > 1:
        with_cotangent = [value for value in inputs if value.grad]
    reached: set[int] = set()
    for value, _, node, dimension in _dimensions(inputs, rule.operands):
        factor = dimension[0]
        if dimension in unchanged or factor in skipped or common.isdisjoint(dimension):
            continue
        # One gather of the operand serves all results.
        source: int | None = node
        for result, target in beginnings[factor]:
            gathered = None
            if value in with_cotangent[:1]:
                gathered = target
            graph.add_reshard(value, source, result, gathered)
            if factor in resharded:
                graph.add_move(value, node, result, target)
            if source is None or gathered is None:  # otherwise the cut has linked the two
                graph.soft_links.append((node, target))
            reached.add(target)
            source = None
            if factor not in resharded:
                _link_groups(graph, rule.sizes[factor], node, target)
        if not beginnings[factor]:
            graph.add_reshard(value, node, results[0], None)
            graph.add_move(value, node, results[0], None)
    for result, _, node, dimension in _dimensions(results, rule.results):
        regrouped = dimension not in unchanged and not common.isdisjoint(dimension)
        if regrouped and dimension[0] not in skipped and node not in reached:
            graph.add_reshard(inputs[0], None, result, node)


def _link_groups(graph: Graph, size: int, node: int, other: int) -> None:
    """Links two dimensions that begin with the same factor, which is what is sharded."""
    if size in (graph.sizes[node], graph.sizes[other]):
        graph.link(node, other)
        return
    group = graph.node(size)
    graph.link(node, group)
    graph.link(group, other)


def _all_dimensions(arrays: Sequence[Dimensions]) -> set[Dimension]:
    return set(chain(*arrays))


def _sum_forward(
    graph: Graph, rule: Rule, inputs: Sequence[Value], results: Sequence[Value]
) -> None:
    """Records partial sums: each device sums over its part of a reduced dimension."""
    indexed = _indexed(rule, inputs)
    operands_with = Counter(dimension[0] for dimension in chain(*rule.operands))
    summed: set[Factor] = set()
    for value, d, node, dimension in _dimensions(inputs, rule.operands):
        factor = dimension[0]
        # Both operands of a product have the factor, and there is one sum.
        if factor not in rule.reduced - rule.blocked or factor in summed:
            continue
        summed.add(factor)
        before = indexed
        if operands_with[factor] == 1:
            # An array that is sharded along an earlier dimension is not sharded along this one.
            before = value.dims[:d]
        for result in results:
            graph.add_partial_sum(node, result, before=before)


def _sum_backward(graph: Graph, rule: Rule, inputs: Sequence[Value], result: Value) -> None:
    """Records the dimensions of the result that an operand does not have.

    The operand is used along all of them, so that its cotangent is summed over them. Where its own
    dimensions follow one of these in the result, both cannot be sharded alike.
    """
    indexed = _indexed(rule, inputs)
    # A split example has parts of the gradient of a kernel.
    skipped = rule.whole | (rule.moved | rule.blocked) - dict(rule.near).keys()
    dimensions = rule.results[0]
    for value, of_value in zip(inputs, rule.operands, strict=True):
        own = all_factors(of_value)
        lacking: list[int] = []
        for d, (node, dimension) in enumerate(zip(result.dims, dimensions, strict=True)):
            if dimension in of_value:
                # In a table of all pairs of examples, the first dimension takes the devices.
                graph.add_conflict(value, node, tuple(lacking))
            elif own.isdisjoint(dimension) and dimension[0] not in skipped:
                before = (*result.dims[:d], *indexed)
                graph.add_partial_sum(node, value, backward=True, before=before)
                lacking.append(node)


def _indexed(rule: Rule, inputs: Sequence[Value]) -> Dims:
    """The dimensions of the first operand that are addressed by number.

    Rows that are indexed by themselves, as in `x[jnp.arange(len(x)), labels]`, stay on their
    device.
    """
    indexed: list[int] = []
    for _, _, node, dimension in _dimensions(inputs[:1], rule.operands[:1]):
        if dimension[0] in rule.indexed:
            indexed.append(node)
    return tuple(indexed)


def _write(graph: Graph, rule: Rule, inputs: Sequence[Value], result: Value) -> None:
    """Records dimensions of which a part is written, and updates that overwrite.

    Updates that overwrite cannot be summed, so they are gathered, with their indices. If such a
    write is differentiated, it gathers which update wrote each element, and adds those updates.
    """
    assert rule.writes is not None
    for value, _, node, dimension in _dimensions(inputs[:1], rule.operands[:1]):
        if dimension[0] in rule.moved:
            graph.add_reshard(value, node, result, None)
    indexed = _indexed(rule, inputs)
    indices = _all_dimensions(rule.operands[1 : rule.writes])
    for node, dimension in zip(inputs[rule.writes].dims, rule.operands[rule.writes], strict=True):
        if dimension not in indices or dimension[0] not in rule.whole:
            continue
        for value in inputs[1:]:
            graph.add_conflict(value, node, (node,), along=indexed)
        if result.grad:
            graph.add_partial_sum(node, result, before=indexed)


def _count_work(
    graph: Graph, equation: JaxprEqn, rule: Rule, inputs: Sequence[Value], results: Sequence[Value]
) -> None:
    """Records the arithmetic of a contraction, forward and backward."""
    count = multiply_adds(equation)
    # Nothing is divided along the dimensions of a grouped convolution's derivative.
    is_whole = len(rule.results[0]) > 0 and all_factors(rule.results[0]) <= rule.whole
    if count is None or is_whole:
        return
    dims = list(results[0].dims)
    for _, _, node, dimension in _dimensions(inputs[:1], rule.operands[:1]):
        if not rule.reduced.isdisjoint(dimension):
            dims.append(node)
    if "dot_product_attention" in equation.primitive.name:
        # The backward pass has five products and the forward pass two.
        passes = graph.cursor.forwards + 2.5 * inputs[0].grad
        if "bwd" in equation.primitive.name:
            passes = 1
    else:
        passes = graph.cursor.forwards + inputs[0].grad + inputs[1].grad
    graph.add_work(tuple(dims), 2.0 * count, passes, *inputs)
