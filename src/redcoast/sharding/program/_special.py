"""Rules for transforms, decompositions, random bits and sharding constraints."""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn
from jax.sharding import PartitionSpec as P

from ..operations._made_rules import OF_VECTORS
from ..tree._overrides import spec_axes
from ._contractions import cut_all
from ._graph import Graph, Value, output


def fresh(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    grad = any(value.grad for value in inputs)
    return [_made(graph, var.aval, (), grad) for var in equation.outvars]


def keyed(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    # Raw keys are arrays of numbers whose last dimension is removed or added.
    return [_made(graph, output(equation), inputs[0].dims, grad=False)]


def _made(graph: Graph, aval: Any, leading: tuple[int, ...], grad: bool) -> Value:
    shape = tuple(getattr(aval, "shape", ()))
    kept = leading[: len(shape)]
    new = (graph.node(size, made=True) for size in shape[len(kept) :])
    return graph.value(aval, (*kept, *new), grad=grad)


def constrained(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    """Keeps what the program constrains itself, dimension by dimension."""
    (operand,), params = inputs, equation.params
    spec = getattr(params["sharding"], "spec", None)
    if spec is not None:
        entries = (*spec, *(None for _ in operand.dims[len(spec) :]))
        for d, (node, entry) in enumerate(zip(operand.dims, entries, strict=True)):
            if entry is not P.UNCONSTRAINED and d not in params["unconstrained_dims"]:
                before = graph.asked.get(node, ())
                graph.asked[node] = (*before, *(a for a in spec_axes(entry) if a not in before))
    return [graph.value(output(equation), operand.dims, grad=operand.grad)]


def gathered(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value], d: int) -> list[Value]:
    """The sequence is needed as a whole, and gathered if it is split. What uses the result sums its
    cotangent."""
    (operand,) = inputs
    node = operand.dims[d]
    graph.meet(operand, node, (node,))
    dims = (*operand.dims[:d], graph.node(operand.shape[d]), *operand.dims[d + 1 :])
    return [graph.value(output(equation), dims, grad=operand.grad)]


def fourier(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    """Transformed dimensions are never sharded. Each device transforms its part along the others,
    which the constrained program asks for (`_interpreter.py`): some versions of XLA gather it."""
    operand, count = inputs[0], len(equation.params["fft_lengths"])
    kept = len(operand.dims) - count
    aval = output(equation)
    new = tuple(graph.node(size, blocked=True) for size in aval.shape[kept:])
    graph.blocked.update(operand.dims[kept:])
    return [graph.value(aval, (*operand.dims[:kept], *new), grad=operand.grad)]


def decomposition(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    """Leading dimensions count matrices; the matrices themselves are never sharded."""
    first = inputs[0]
    count = len(first.dims) - (1 if equation.primitive.name in OF_VECTORS else 2)
    for value in inputs:
        graph.blocked.update(value.dims[count:])
        for a, b in zip(first.dims[:count], value.dims[:count], strict=False):
            graph.link(a, b)
    grad = any(value.grad for value in inputs)
    results = []
    for aval in (var.aval for var in equation.outvars):
        shape = tuple(getattr(aval, "shape", ()))
        kept = first.dims[:count] if shape[:count] == first.shape[:count] else ()
        new = tuple(graph.node(size, blocked=True) for size in shape[len(kept) :])
        results.append(graph.value(aval, (*kept, *new), grad=grad))
    return results


def opaque(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    """An unknown operation: its operands and results are replicated."""
    graph.unknown[equation.primitive.name] += 1
    if not equation.outvars:
        return []
    results = [cut_all(graph, output(equation), inputs)]
    grad = any(value.grad for value in inputs)
    for var in equation.outvars[1:]:
        results.append(graph.value(var.aval, grad=grad))
        for node in results[-1].dims:
            graph.cut(results[-1], None, results[-1], node)
    return results
