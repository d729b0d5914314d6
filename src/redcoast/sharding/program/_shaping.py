"""Rules for operations that rearrange, cut and join arrays."""

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from ._graph import Graph, Value, output


def transpose(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    (operand,) = inputs
    dims = tuple(operand.dims[d] for d in equation.params["permutation"])
    return [graph.value(output(equation), dims, grad=operand.grad, reduced=operand.reduced)]


def squeeze(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    gone = equation.params["dimensions"]
    dims = tuple(node for d, node in enumerate(inputs[0].dims) if d not in gone)
    return [graph.value(output(equation), dims, grad=inputs[0].grad)]


def expand_dims(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    aval, rest = output(equation), iter(inputs[0].dims)
    new = equation.params["dimensions"]
    dims = tuple(graph.node(1) if d in new else next(rest) for d in range(len(aval.shape)))
    return [graph.value(aval, dims, grad=inputs[0].grad)]


def broadcast_in_dim(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    (operand, *_), aval = inputs, output(equation)
    kept = equation.params["broadcast_dimensions"]
    source = dict(zip(kept, range(len(operand.dims)), strict=True))
    dims = []
    for d, size in enumerate(aval.shape):
        if d in source and operand.shape[source[d]] == size:
            dims.append(operand.dims[source[d]])
        else:
            dims.append(graph.node(size, made=True))
            # A broadcast in the forward pass is a sum in the backward pass.
            graph.sum(dims[-1], operand, backward=True, before=tuple(dims[:-1]))
    return [graph.value(aval, tuple(dims), grad=operand.grad, reduced=operand.reduced)]


def reshape(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    """Dimensions that are merged or split stay sharded along the major one."""
    operand, aval = inputs[0], output(equation)
    order = equation.params.get("dimensions")
    if order is not None:
        dims, shape = (tuple(x[d] for d in order) for x in (operand.dims, operand.shape))
        operand = Value(dims, shape, operand.itemsize, operand.grad)
    runs = list(_runs(operand.shape, tuple(aval.shape)))
    kept = {b[0]: operand.dims[a[0]] for a, b in runs if len(a) == len(b) == 1}
    new = {d: graph.node(aval.shape[d]) for _, after in runs for d in after if d not in kept}
    dims = [(kept | new).get(d) for d in range(len(aval.shape))]
    # Dimensions of size one are in no run.
    dims = tuple(graph.node(1) if node is None else node for node in dims)
    result = graph.value(aval, dims, grad=operand.grad)
    for before, after in runs:
        if before and after and not len(before) == len(after) == 1:
            graph.link(operand.dims[before[0]], result.dims[after[0]])
            for a in before:
                same = result.dims[after[0]] if a == before[0] else None
                graph.cut(operand, operand.dims[a], result, same)
            for b in after[1:]:
                graph.cut(operand, None, result, result.dims[b])
    return [result]


def _runs(before: tuple[int, ...], after: tuple[int, ...]) -> Iterator[tuple[list[int], list[int]]]:
    """Pairs the shortest runs of dimensions with equal products, ignoring dimensions of one."""
    a = [d for d, size in enumerate(before) if size != 1]
    b = [d for d, size in enumerate(after) if size != 1]
    while a or b:
        left, right = [a.pop(0)] if a else [], [b.pop(0)] if b else []
        x, y = (before[left[0]] if left else 1), (after[right[0]] if right else 1)
        while x != y and (a or b):
            if (x < y and a) or not b:
                left.append(a.pop(0))
                x *= before[left[-1]]
            else:
                right.append(b.pop(0))
                y *= after[right[-1]]
        yield left, right


def _kept(
    graph: Graph, equation: JaxprEqn, operand: Value, kept: Sequence[bool], *, blocked: bool = False
) -> Value:
    """Adds a result with the operand's dimensions where `kept` and new dimensions elsewhere."""
    aval = output(equation)
    dims = tuple(
        node if keep else graph.node(size, blocked=blocked)
        for node, keep, size in zip(operand.dims, kept, aval.shape, strict=True)
    )
    result = graph.value(aval, dims, grad=operand.grad)
    for node, keep, new in zip(operand.dims, kept, dims, strict=True):
        if not keep:
            if blocked:
                graph.blocked.add(node)
            graph.cut(operand, node, result, new)
    return result


def sliced(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    """`slice` and `dynamic_slice`: a dimension of which a part is taken is cut."""
    kept = [a == b for a, b in zip(inputs[0].shape, output(equation).shape, strict=True)]
    return [_kept(graph, equation, inputs[0], kept)]


def reverse(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    kept = [d not in equation.params["dimensions"] for d in range(len(inputs[0].dims))]
    return [_kept(graph, equation, inputs[0], kept)]


def cumulative(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    kept = [d != equation.params["axis"] for d in range(len(inputs[0].dims))]
    return [_kept(graph, equation, inputs[0], kept)]


def pad(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    kept = [config == (0, 0, 0) for config in equation.params["padding_config"]]
    return [_kept(graph, equation, inputs[0], kept)]


def window(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    """Dimensions that a window moves over are never sharded."""
    operands, after = inputs[: len(equation.outvars)], output(equation).shape
    sizes = equation.params["window_dimensions"]
    kept = [w == 1 and a == b for w, a, b in zip(sizes, operands[0].shape, after, strict=True)]
    for value in operands[1:]:
        graph.link_all(operands[0].dims, value.dims)
    return [_kept(graph, equation, value, kept, blocked=True) for value in operands]


def window_scatter(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    """`select_and_scatter_add` and similar: the derivatives of pooling."""
    aval, sizes = output(equation), equation.params["window_dimensions"]
    dims = tuple(graph.node(size) for size in aval.shape)
    for value in inputs:
        if len(value.dims) != len(dims):
            continue
        for a, b, size in zip(value.dims, dims, sizes, strict=True):
            if size == 1 and graph.sizes[a] == graph.sizes[b]:
                graph.link(a, b)
            else:
                graph.blocked.update((a, b))
    return [graph.value(aval, dims, grad=any(value.grad for value in inputs))]


def bitcast(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    """If the item sizes differ, the last dimension is added or removed."""
    operand, aval = inputs[0], output(equation)
    known = operand.dims[: len(aval.shape)]
    new = (graph.node(size) for size in aval.shape[len(known) :])
    return [graph.value(aval, (*known, *new), grad=operand.grad)]


def concatenate(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    aval, axis = output(equation), equation.params["dimension"]
    first = inputs[0].dims
    dims = (*first[:axis], graph.node(aval.shape[axis]), *first[axis + 1 :])
    result = graph.value(aval, dims, grad=any(value.grad for value in inputs))
    # The cotangent is gathered once for all operands.
    once = next((value for value in inputs if value.grad), None)
    for value in inputs:
        graph.cut(value, value.dims[axis], result, dims[axis] if value is once else None)
        graph.soft_links.append((value.dims[axis], dims[axis]))
        for d, node in enumerate(value.dims):
            if d != axis:
                graph.link(node, dims[d])
    return [result]


def stack(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    aval, axis = output(equation), equation.params["axis"]
    first = inputs[0].dims
    for value in inputs[1:]:
        graph.link_all(first, value.dims)
    dims = (*first[:axis], graph.node(aval.shape[axis]), *first[axis:])
    return [graph.value(aval, dims, grad=any(value.grad for value in inputs))]


def unstack(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    operand, axis = inputs[0], equation.params["axis"]
    dims = (*operand.dims[:axis], *operand.dims[axis + 1 :])
    results = [graph.value(var.aval, dims, grad=operand.grad) for var in equation.outvars]
    graph.cut(operand, operand.dims[axis], results[0], None)
    return results


def tile(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    result = _kept(graph, equation, inputs[0], [n == 1 for n in equation.params["reps"]])
    once = zip(result.dims, inputs[0].shape, result.shape, strict=True)
    graph.made.update(node for node, before, after in once if before == 1 != after)
    return [result]


def split_dims(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    operand, axis = inputs[0], equation.params["axis"]
    results = []
    for var in equation.outvars:
        aval: Any = var.aval
        new = graph.node(aval.shape[axis])
        dims = (*operand.dims[:axis], new, *operand.dims[axis + 1 :])
        results.append(graph.value(aval, dims, grad=operand.grad))
        # One gather of the operand serves all parts.
        source = operand.dims[axis] if var is equation.outvars[0] else None
        graph.cut(operand, source, results[-1], new)
        graph.soft_links.append((operand.dims[axis], new))
    return results


def sort(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    axis = equation.params["dimension"]
    return _ordered(graph, equation, inputs, axis % max(1, len(inputs[0].dims)))


def top_k(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    axis = equation.params.get("axis", equation.params.get("reduction_dimension", -1))
    return _ordered(graph, equation, inputs[:1], axis % len(inputs[0].dims))


def _ordered(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value], axis: int) -> list[Value]:
    first = inputs[0]
    for value in inputs[1:]:
        graph.link_all(first.dims, value.dims)
    size = output(equation).shape[axis]
    # A permutation that the program samples is also made by it.
    new = graph.node(size, made=first.dims[axis] in graph.made)
    dims = (*first.dims[:axis], new, *first.dims[axis + 1 :])
    grad = any(value.grad for value in inputs)
    results = [graph.value(var.aval, dims, grad=grad) for var in equation.outvars]
    # Two cuts avoid a soft link: sorted rows may have been on any device.
    for value, result in zip(inputs, results, strict=False):
        graph.cut(value, value.dims[axis], result, None)
        graph.cut(value, None, result, new)
    return results


def reduction(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    """Sums, maxima and similar: partial results are combined if a reduced dimension is sharded."""
    axes = equation.params.get("axes", equation.params.get("dimensions", ()))
    count = len(equation.outvars)
    for value in inputs[1:count]:
        graph.link_all(inputs[0].dims, value.dims)
    dims = tuple(node for d, node in enumerate(inputs[0].dims) if d not in axes)
    grad = any(value.grad for value in inputs)
    results = [graph.value(var.aval, dims, grad=grad) for var in equation.outvars]
    for result in results:
        for d in axes:
            graph.sum(inputs[0].dims[d], result, before=inputs[0].dims[:d])
    return results


def named_reduction(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    """`psum` and similar: under `vmap` the axis that they name is a dimension."""
    axes = [axis for axis in equation.params.get("axes", ()) if isinstance(axis, int)]
    results = []
    for value, var in zip(inputs, equation.outvars, strict=True):
        dims = tuple(node for d, node in enumerate(value.dims) if d not in axes)
        results.append(graph.value(var.aval, dims, grad=value.grad))
        for d in axes:
            graph.sum(value.dims[d], results[-1])
    return results
