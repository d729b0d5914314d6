"""What a program itself says about the sharding of its arrays."""

from collections.abc import Sequence

from jax.extend.core import JaxprEqn
from jax.sharding import PartitionSpec as P

from ..tree._overrides import spec_axes
from ._graph import Asked, Graph, Value


def record_constraint(graph: Graph, equation: JaxprEqn, operand: Value) -> None:
    """Keeps what the program constrains itself, dimension by dimension."""
    params = equation.params
    spec = getattr(params["sharding"], "spec", None)
    if spec is None:
        return
    entries = (*spec, *[None] * (len(operand.dims) - len(spec)))
    asked: list[tuple[str, ...] | None] = []
    for d, (node, entry) in enumerate(zip(operand.dims, entries, strict=True)):
        if entry is P.UNCONSTRAINED or d in params["unconstrained_dims"]:
            asked.append(None)
            continue
        asked.append(spec_axes(entry))
        axes = (*graph.constrained.get(node, ()), *spec_axes(entry))
        graph.constrained[node] = tuple(dict.fromkeys(axes))  # each once
    cursor = graph.cursor
    times = cursor.times * (cursor.forwards + operand.grad)
    graph.asked.append(Asked(operand, tuple(asked), times, cursor.source))


def gathered(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value], d: int) -> list[Value]:
    """The sequence is needed as a whole, and gathered if it is split. What uses the result sums its
    cotangent."""
    (operand,) = inputs
    node = operand.dims[d]
    graph.add_conflict(operand, node, (node,))
    dims = (*operand.dims[:d], graph.node(operand.shape[d]), *operand.dims[d + 1 :])
    return [graph.value(equation.outvars[0].aval, dims, grad=operand.grad)]
