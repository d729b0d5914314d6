"""Rules for operations whose results have the dimensions of their operands."""

from collections.abc import Sequence

from jax.extend.core import JaxprEqn

from ._graph import Graph, Value

# The derivatives of these need their results. XLA recomputes other elementwise results.
_KEPT = frozenset(
    """
    cos div erf exp exp2 expm1 integer_pow log log1p log2 logistic max pow rsqrt sin sqrt square
    tanh
    """.split()  # noqa: SIM905
)


def elementwise(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    grad = any(value.grad for value in inputs) and equation.primitive.name != "stop_gradient"
    results = [_like(graph, var.aval, inputs, grad) for var in equation.outvars]
    if equation.primitive.name in _KEPT:
        graph.save(results[0])
    return results


def pairwise(graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    pairs = zip(equation.outvars, inputs, strict=True)
    return [graph.value(var.aval, value.dims, grad=value.grad) for var, value in pairs]


def _like(graph: Graph, aval: object, inputs: Sequence[Value], grad: bool) -> Value:
    """Adds a result with the operands' dimensions; dimensions of size one are broadcast."""
    shape = tuple(getattr(aval, "shape", ()))
    dims: dict[int, int] = {}
    for value in inputs:
        for d, (node, size) in enumerate(zip(value.dims, value.shape, strict=True)):
            if len(value.shape) == len(shape) and size == shape[d]:
                graph.link(dims.setdefault(d, node), node)
    nodes = tuple(dims[d] if d in dims else graph.node(size) for d, size in enumerate(shape))
    for value in inputs:
        for d, (node, size, given) in enumerate(zip(nodes, shape, value.shape, strict=False)):
            if size != given:
                # A broadcast in the forward pass is a sum in the backward pass.
                graph.sum(node, value, backward=True, before=nodes[:d])
            else:
                repeated = zip(nodes[:d], shape, value.shape, strict=False)
                graph.meet(value, node, tuple(n for n, size, given in repeated if size != given))
    return graph.value(aval, nodes, grad=grad)
