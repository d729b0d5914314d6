"""Rules for operations that read or write at indices."""

from collections.abc import Sequence

from jax.extend.core import JaxprEqn

from ._graph import Graph, Value, output


def gather(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    """Dimensions that are not indexed are kept.

    If an indexed dimension is sharded, each device reads the rows that it has, and the results
    are summed.
    """
    (operand, indices), aval = inputs[:2], output(equation)
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    batching = numbers.operand_batching_dims
    indexed_batching = numbers.start_indices_batching_dims
    indexed_dims = {*numbers.collapsed_slice_dims, *batching}
    window = [d for d in range(len(operand.dims)) if d not in indexed_dims]
    dims, cut = [-1] * len(aval.shape), []
    for d, at in zip(window, sorted(numbers.offset_dims), strict=True):
        if sizes[d] == operand.shape[d]:
            dims[at] = operand.dims[d]
        else:
            dims[at] = graph.node(sizes[d])
            cut.append((operand.dims[d], dims[at]))
    rest = iter(indices.dims[:-1])
    looked_up = [at for at in range(len(dims)) if dims[at] < 0]
    for at in looked_up:
        dims[at] = next(rest)
    result = graph.value(aval, tuple(dims), grad=operand.grad)
    for d, i in zip(batching, indexed_batching, strict=True):
        graph.link(operand.dims[d], indices.dims[i])
    for d in numbers.collapsed_slice_dims:
        graph.sum(operand.dims[d], result)
    for source, target in cut:
        graph.cut(operand, source, result, target)
    shared = {indices.dims[i] for i in indexed_batching}
    # Rows that are indexed by themselves, as in `x[jnp.arange(len(x)), labels]`, stay on their
    # device, so their cotangents are not summed.
    indexed = tuple(operand.dims[d] for d in numbers.collapsed_slice_dims)
    for at in looked_up:
        if dims[at] not in shared:
            graph.sum(dims[at], operand, backward=True, before=indexed)
    return [result]


def scatter(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    """Partial sums of the result, if the dimensions that count the updates are sharded.

    Updates that overwrite cannot be summed, so they are gathered, with their indices. If such a
    write is differentiated, it gathers which update wrote each element, and adds those updates.
    """
    operand, indices, updates = inputs[:3]
    numbers = equation.params["dimension_numbers"]
    batching = numbers.operand_batching_dims
    indexed_batching = numbers.scatter_indices_batching_dims
    indexed_dims = {*numbers.inserted_window_dims, *batching}
    window = [d for d in range(len(operand.dims)) if d not in indexed_dims]
    result = graph.value(output(equation), operand.dims, grad=operand.grad or updates.grad)
    for d, at in zip(window, sorted(numbers.update_window_dims), strict=True):
        if updates.shape[at] == operand.shape[d]:
            graph.link(operand.dims[d], updates.dims[at])
        else:
            graph.cut(operand, operand.dims[d], result, None)
            graph.cut(updates, updates.dims[at], result, operand.dims[d])
    written = [at for at in range(len(updates.dims)) if at not in numbers.update_window_dims]
    for at, node in zip(written, indices.dims[:-1], strict=True):
        graph.link(updates.dims[at], node)
    for d, i in zip(batching, indexed_batching, strict=True):
        graph.link(operand.dims[d], indices.dims[i])
    shared = {indices.dims[i] for i in indexed_batching}
    indexed = tuple(operand.dims[d] for d in numbers.inserted_window_dims)
    for at, node in zip(written, indices.dims[:-1], strict=True):
        if node in shared:
            continue
        overwrites = equation.primitive.name == "scatter"
        for value in (updates, indices) if overwrites else ():
            graph.meet(value, node, (node,), along=indexed)
            graph.cut(value, node, None, None)
        if result.grad or not overwrites:
            graph.sum(updates.dims[at], result, before=indexed)
    return [result]


def dynamic_update_slice(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    operand, update = inputs[:2]
    result = graph.value(output(equation), operand.dims, grad=operand.grad or update.grad)
    for a, b, size, part in zip(
        operand.dims, update.dims, operand.shape, update.shape, strict=True
    ):
        if size == part:
            graph.link(a, b)
        else:
            graph.cut(operand, a, result, None)
            graph.cut(update, b, None, None)
    return [result]
