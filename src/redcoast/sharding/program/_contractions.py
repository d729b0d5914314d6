"""Rules for dot products, attention and convolutions."""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from ...core._multiply_adds import multiply_adds
from ._graph import Graph, Value, output


def dot_general(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    left, right = inputs[:2]
    (left_sum, right_sum), (left_batch, right_batch) = equation.params["dimension_numbers"]
    for a, b in zip((*left_sum, *left_batch), (*right_sum, *right_batch), strict=True):
        graph.link(left.dims[a], right.dims[b])
    left_free = _others(left, (*left_sum, *left_batch))
    right_free = _others(right, (*right_sum, *right_batch))
    dims = (*(left.dims[d] for d in left_batch), *left_free, *right_free)
    summed = tuple(left.dims[d] for d in left_sum)
    return [_contracted(graph, equation, left, right, dims, summed, left_free, right_free)]


def _others(value: Value, taken: Sequence[int]) -> tuple[int, ...]:
    return tuple(node for d, node in enumerate(value.dims) if d not in taken)


def _contracted(
    graph: Graph,
    equation: JaxprEqn,
    left: Value,
    right: Value,
    dims: tuple[int, ...],
    summed: tuple[int, ...],
    left_free: tuple[int, ...],
    right_free: tuple[int, ...],
) -> Value:
    """Adds the result: partial sums over `summed` forward, over the free dimensions backward."""
    result = graph.value(output(equation), dims, grad=left.grad or right.grad)
    for node in summed:
        graph.sum(node, result)
    second = len(dims) - len(right_free)
    first = second - len(left_free)
    for value, free, start in ((left, right_free, second), (right, left_free, first)):
        for at, node in enumerate(free, start):
            graph.sum(node, value, backward=True, before=dims[:at])
    for node in right_free:
        graph.meet(right, node, left_free)
    passes = graph.forwards + left.grad + right.grad
    graph.work((*dims, *summed), _flops(equation), passes, left, right)
    return result


def _flops(equation: JaxprEqn) -> float:
    return 2.0 * (multiply_adds(equation) or 0)


def ragged_dot(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    """Multiplies each group of rows by its own matrix; the groups are never sharded."""
    left, right, sizes = inputs[:3]
    numbers = equation.params.get("ragged_dot_dimension_numbers")
    graph.blocked.update(sizes.dims)
    if numbers is None or len(left.dims) != 2 or len(right.dims) != 3:
        return [cut_all(graph, output(equation), inputs)]
    graph.blocked.add(right.dims[0])
    graph.link(left.dims[1], right.dims[1])
    rows, columns = left.dims[0], right.dims[2]
    dims, summed = (rows, columns), (left.dims[1],)
    return [_contracted(graph, equation, left, right, dims, summed, (rows,), (columns,))]


def fused_attention(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    """cuDNN attention and its backward pass: only the batch and the heads may be sharded.

    Queries, keys, values and results are (batch, sequence, heads, head_dim). A key head serves
    several adjacent query heads.
    """
    q = inputs[0]
    results = [graph.value(var.aval, grad=q.grad) for var in equation.outvars]
    for value in (*inputs, *results):
        free = _batch_and_heads(value, q)
        for d, node in enumerate(value.dims):
            if d in free:
                graph.link(q.dims[free[d]], node)
            elif value in inputs:
                graph.cut(value, node, None, None)
            else:
                graph.cut(value, None, value, node)
    # The backward pass has five products and the forward pass two.
    passes = 1 if "bwd" in equation.primitive.name else graph.forwards + 2.5 * q.grad
    graph.work((q.dims[0], q.dims[2]), _flops(equation), passes, *inputs[:3])
    return results


def _batch_and_heads(value: Value, q: Value) -> dict[int, int]:
    """Maps dimensions of a value to those of the queries: the batch to 0, the heads to 2."""
    batch, _, heads, head_dim = q.shape
    if len(value.shape) == 4 and value.shape[0] == batch and value.shape[3] == head_dim:
        return {0: 0, 2: 2}
    # Biases are (batch, heads, queries, keys). Softmax statistics are (batch, heads, queries).
    places = ((0, 0, batch), (1, 2, heads))
    return {d: to for d, to, size in places if value.shape[d : d + 1] == (size,)}


def cut_all(graph: Graph, aval: Any, inputs: Sequence[Value]) -> Value:
    """Adds a result that shares no dimensions with its operands, which must be replicated."""
    result = graph.value(aval, grad=any(value.grad for value in inputs))
    for value in inputs:
        for node in value.dims:
            graph.cut(value, node, None, None)
    for node in result.dims:
        graph.cut(result, None, result, node)
    return result


def convolution(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    (image, kernel), aval = inputs, output(equation)
    spec = equation.params["dimension_numbers"]
    groups = equation.params["feature_group_count"]
    batch, channel = (image.dims[d] for d in spec.lhs_spec[:2])
    out, into = (kernel.dims[d] for d in spec.rhs_spec[:2])
    dims = [-1] * len(aval.shape)
    dims[spec.out_spec[0]], dims[spec.out_spec[1]] = batch, out
    if aval.shape[spec.out_spec[0]] != image.shape[spec.lhs_spec[0]]:
        dims[spec.out_spec[0]] = graph.node(aval.shape[spec.out_spec[0]])
    for d in spec.out_spec[2:]:
        dims[d] = graph.node(aval.shape[d])
    result = graph.value(aval, tuple(dims), grad=image.grad or kernel.grad)
    if equation.params["batch_group_count"] > 1:
        # The gradient of a grouped kernel: its batch dimension is summed over.
        graph.blocked.update((*image.dims, *kernel.dims, *result.dims))
        return [result]
    for value, order in (image, spec.lhs_spec), (kernel, spec.rhs_spec), (result, spec.out_spec):
        graph.blocked.update(value.dims[d] for d in order[2:])  # space is never sharded
    passes = graph.forwards + image.grad + kernel.grad
    graph.work((*result.dims, channel), _flops(equation), passes, image, kernel)
    graph.sum(batch, kernel, backward=True)
    if groups == 1:
        graph.link(channel, into)
        graph.sum(channel, result)
        graph.sum(out, image, backward=True)
    else:
        # Groups are the major part of both channel dimensions. Each group stays on one device.
        group = graph.node(groups)
        graph.link(channel, group)
        graph.link(group, out)
        graph.cut(image, channel, result, out)
        graph.blocked.add(into)
    return [result]
