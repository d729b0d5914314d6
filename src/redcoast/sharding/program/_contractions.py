"""Operations that multiply and sum: dot products and convolutions."""

from collections.abc import Sequence
from math import prod
from typing import Any

from jax.extend.core import JaxprEqn

from ._graph import Graph, Value, output


def dot_general(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    (left, right, *_), aval = inputs, output(equation)
    (left_sum, right_sum), (left_batch, right_batch) = equation.params["dimension_numbers"]
    for a, b in zip((*left_sum, *left_batch), (*right_sum, *right_batch), strict=True):
        graph.link(left.dims[a], right.dims[b])
    left_free = _others(left, (*left_sum, *left_batch))
    right_free = _others(right, (*right_sum, *right_batch))
    dims = (*(left.dims[d] for d in left_batch), *left_free, *right_free)
    summed = tuple(left.dims[d] for d in left_sum)
    return [_contracted(graph, aval, left, right, dims, summed, left_free, right_free)]


def _others(value: Value, taken: Sequence[int]) -> tuple[int, ...]:
    return tuple(node for d, node in enumerate(value.dims) if d not in taken)


def _contracted(
    graph: Graph,
    aval: Any,
    left: Value,
    right: Value,
    dims: tuple[int, ...],
    summed: tuple[int, ...],
    left_free: tuple[int, ...],
    right_free: tuple[int, ...],
) -> Value:
    """The result, with partial sums forward over `summed` and backward over the free dimensions."""
    result = graph.value(aval, dims, grad=left.grad or right.grad)
    for node in summed:
        graph.sum(node, result)
    second = len(dims) - len(right_free)
    first = second - len(left_free)
    for value, free, start in ((left, right_free, second), (right, left_free, first)):
        for at, node in enumerate(free, start):
            graph.sum(node, value, backward=True, before=dims[:at])
    for node in right_free:
        graph.meet(right, node, left_free)
    flops = 2.0 * prod(result.shape) * prod(graph.sizes[node] for node in summed)
    passes = graph.forwards + left.grad + right.grad
    graph.work((*dims, *summed), flops, passes, left, right)
    return result


def ragged_dot(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    """Rows in groups, each with a matrix of its own; the groups are never split."""
    left, right, sizes = inputs[:3]
    aval = output(equation)
    numbers = equation.params.get("ragged_dot_dimension_numbers")
    graph.blocked.update(sizes.dims)
    if numbers is None or len(left.dims) != 2 or len(right.dims) != 3:
        return [cut_all(graph, aval, inputs)]
    graph.blocked.add(right.dims[0])
    graph.link(left.dims[1], right.dims[1])
    rows, columns = left.dims[0], right.dims[2]
    dims, summed = (rows, columns), (left.dims[1],)
    return [_contracted(graph, aval, left, right, dims, summed, (rows,), (columns,))]


def fused_attention(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    """cuDNN's attention, and its backward pass: examples and heads are free, and the rest whole.

    Queries, keys and what comes of them are (batch, sequence, heads, head_dim); a key head serves
    several query heads, which are next to each other.
    """
    q, k = inputs[:2]
    (batch, queries, heads, head_dim), keys = q.shape, k.shape[1]
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
    products = 2 if len(results) < 3 else 5  # forward; backward, with the scores once more
    flops = 2.0 * batch * heads * queries * keys * head_dim * products
    passes = 1 if products == 5 else graph.forwards + 2.5 * q.grad
    graph.work((q.dims[0], q.dims[2]), flops, passes, *inputs[:3])
    return results


def _batch_and_heads(value: Value, q: Value) -> dict[int, int]:
    """Which dimensions of a value are the batch and the heads of the queries."""
    batch, _, heads, head_dim = q.shape
    if len(value.shape) == 4 and value.shape[0] == batch and value.shape[3] == head_dim:
        return {0: 0, 2: 2}
    # Biases are (batch, heads, queries, keys); sums for the backward pass lack the last of these.
    places = ((0, 0, batch), (1, 2, heads))
    return {d: to for d, to, size in places if value.shape[d : d + 1] == (size,)}


def cut_all(graph: Graph, aval: Any, inputs: Sequence[Value]) -> Value:
    """A result that has nothing to do with its operands' dimensions, which must be whole."""
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
    dims = _new_dims(graph, aval, image, kernel, spec)
    result = graph.value(aval, dims, grad=image.grad or kernel.grad)
    batch, channel = (image.dims[d] for d in spec.lhs_spec[:2])
    out, into = (kernel.dims[d] for d in spec.rhs_spec[:2])
    if equation.params["batch_group_count"] > 1:
        # Groups over the batch: a weight's gradient, whose batch is the sum over examples.
        graph.blocked.update((*image.dims, *kernel.dims, *result.dims))
        return [result]
    _no_space_split(graph, (image, spec.lhs_spec), (kernel, spec.rhs_spec), (result, spec.out_spec))
    flops = 2.0 * prod(result.shape) * prod(kernel.shape) / kernel.shape[spec.rhs_spec[0]]
    passes = graph.forwards + image.grad + kernel.grad
    graph.work((*result.dims, channel), flops, passes, image, kernel)
    graph.sum(batch, kernel, backward=True)
    if groups == 1:
        graph.link(channel, into)
        graph.sum(channel, result)
        graph.sum(out, image, backward=True)
    else:
        # The groups are the slowest part of the channels on both sides, and stay whole each.
        whole = graph.node(groups)
        graph.link(channel, whole)
        graph.link(whole, out)
        graph.cut(image, channel, result, out)
        graph.blocked.add(into)
    return [result]


def _new_dims(graph: Graph, aval: Any, image: Value, kernel: Value, spec: Any) -> tuple[int, ...]:
    out = spec.out_spec
    dims = [-1] * len(out)
    dims[out[0]], dims[out[1]] = image.dims[spec.lhs_spec[0]], kernel.dims[spec.rhs_spec[0]]
    if aval.shape[out[0]] != image.shape[spec.lhs_spec[0]]:
        dims[out[0]] = graph.node(aval.shape[out[0]])
    for d in out[2:]:
        dims[d] = graph.node(aval.shape[d], blocked=True)
    return tuple(dims)


def _no_space_split(graph: Graph, *arrays: tuple[Value, Sequence[int]]) -> None:
    for value, spec in arrays:
        graph.blocked.update(value.dims[d] for d in spec[2:])
