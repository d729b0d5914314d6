"""Operations that look up and write at indices."""

from collections.abc import Sequence

from jax.extend.core import JaxprEqn

from ._graph import Graph, Value, output


def gather(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    """A lookup: what is not indexed keeps its dimensions, and an indexed dimension that is split
    leaves each device with the rows it has, to be summed."""
    (operand, indices), aval = inputs[:2], output(equation)
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    batching = tuple(getattr(numbers, "operand_batching_dims", ()))
    indexed_batching = tuple(getattr(numbers, "start_indices_batching_dims", ()))
    gone = {*numbers.collapsed_slice_dims, *batching}
    window = [d for d in range(len(operand.dims)) if d not in gone]
    dims, cut = [-1] * len(aval.shape), []
    for d, at in zip(window, sorted(numbers.offset_dims), strict=True):
        whole = sizes[d] == operand.shape[d]
        dims[at] = operand.dims[d] if whole else graph.node(sizes[d])
        if not whole:
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
    # Rows that look up in themselves, as by `x[jnp.arange(len(x)), labels]`, are written where
    # they are.
    indexed = tuple(operand.dims[d] for d in numbers.collapsed_slice_dims)
    for at in looked_up:
        if dims[at] not in shared:
            graph.sum(dims[at], operand, backward=True, before=indexed)
    return [result]


def scatter(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    operand, indices, updates = inputs[:3]
    numbers = equation.params["dimension_numbers"]
    batching = tuple(getattr(numbers, "operand_batching_dims", ()))
    indexed_batching = tuple(getattr(numbers, "scatter_indices_batching_dims", ()))
    gone = {*numbers.inserted_window_dims, *batching}
    window = [d for d in range(len(operand.dims)) if d not in gone]
    aval = output(equation)
    result = graph.value(aval, operand.dims, grad=operand.grad or updates.grad)
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
        if node not in shared:
            graph.sum(updates.dims[at], result, before=indexed)
    return [result]


def dynamic_update_slice(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    operand, update = inputs[:2]
    aval = output(equation)
    result = graph.value(aval, operand.dims, grad=operand.grad or update.grad)
    for a, b, size, part in zip(
        operand.dims, update.dims, operand.shape, update.shape, strict=True
    ):
        if size == part:
            graph.link(a, b)
        else:
            graph.cut(operand, a, result, None)
            graph.cut(update, b, None, None)
    return [result]
