"""Follows every dimension through a traced program."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from . import _contractions as contractions
from . import _indexing as indexing
from . import _shaping as shaping
from . import _special as special
from ._elementwise import ELEMENTWISE, PAIRWISE, elementwise, pairwise
from ._graph import Graph, Value
from ._loop_weights import can_be_lifted
from ._remat import CHECKPOINTS, Region, find_needed

Rule = Callable[[Graph, JaxprEqn, Sequence[Value]], list[Value]]

# To pin the results of these is enough: the compiler carries shardings through what is between.
PINNED = frozenset(
    """
    conv_general_dilated dot_general gather ragged_dot ragged_dot_general scatter
    scatter-add scatter_add
    """.split()  # noqa: SIM905
)
REDUCTIONS = frozenset(
    """
    argmax argmin reduce reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum
    reduce_xor
    """.split()  # noqa: SIM905
)
# How often a loop without a known end is taken to run.
ASSUMED_TRIPS = 10

_RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys(PAIRWISE, pairwise),
    **dict.fromkeys(special.FRESH, special.fresh),
    **dict.fromkeys(special.KEYED, special.keyed),
    **dict.fromkeys(special.DECOMPOSITIONS, special.decomposition),
    **dict.fromkeys(("slice", "dynamic_slice"), shaping.sliced),
    **dict.fromkeys(
        ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), shaping.cumulative
    ),
    **dict.fromkeys(REDUCTIONS, shaping.reduction),
    **dict.fromkeys(
        ("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"),
        shaping.window,
    ),
    **dict.fromkeys(
        ("select_and_scatter_add", "select_and_gather_add", "select_and_scatter"),
        shaping.window_scatter,
    ),
    **dict.fromkeys(
        (
            "scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max", "scatter-sub",
            "scatter_add", "scatter_mul", "scatter_min", "scatter_max", "scatter_sub",
        ),
        indexing.scatter,
    ),
    "bitcast_convert_type": shaping.bitcast,
    "broadcast_in_dim": shaping.broadcast_in_dim,
    "concatenate": shaping.concatenate,
    "conv_general_dilated": contractions.convolution,
    "dot_general": contractions.dot_general,
    **dict.fromkeys(
        ("dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"),
        contractions.fused_attention,
    ),
    "dynamic_update_slice": indexing.dynamic_update_slice,
    "expand_dims": shaping.expand_dims,
    "fft": special.fourier,
    "gather": indexing.gather,
    "pad": shaping.pad,
    "ragged_dot_general": contractions.ragged_dot,
    "ragged_dot": contractions.ragged_dot,
    "reshape": shaping.reshape,
    "rev": shaping.reverse,
    "sharding_constraint": special.constrained,
    "sort": shaping.sort,
    "split": shaping.split,
    "squeeze": shaping.squeeze,
    "top_k": shaping.top_k,
    "approx_top_k": shaping.top_k,
    "stack": shaping.stack,
    "tile": shaping.tile,
    "transpose": shaping.transpose,
    "unstack": shaping.unstack,
    **dict.fromkeys(("psum", "pmax", "pmin", "psum_invariant"), shaping.named_reduction),
}  # fmt: skip


@dataclass(eq=False)
class Scope:
    """The values of one run through a jaxpr, and of those inside its equations by their place."""

    jaxpr: Jaxpr
    values: dict[Any, Value] = field(default_factory=dict)
    inner: dict[int, list["Scope"]] = field(default_factory=dict)

    def __getitem__(self, atom: Any) -> Value:
        return self.values[atom]


def walk(graph: Graph, jaxpr: Jaxpr, constants: Sequence[Value], inputs: Sequence[Value]) -> Scope:
    """Follows the dimensions of `inputs` through a jaxpr; what it finds goes into the graph."""
    scope = Scope(jaxpr)
    scope.values.update(zip(jaxpr.constvars, constants, strict=True))
    scope.values.update(zip(jaxpr.invars, inputs, strict=True))
    regions, grads = graph.regions, [value.grad for value in inputs]
    used, leading, *again = [find_needed(jaxpr, region, grads) for region in regions]
    for place, equation in enumerate(jaxpr.eqns):
        values = [_read(graph, scope, atom) for atom in equation.invars]
        if place not in leading.places:
            values = [_copy(value, grad=False) for value in values]
        graph.forwards = 1.0 + sum(place in each.places for each in again)
        graph.kept = all(region.keeps(equation) for region in regions[2:])
        graph.inner = [each.inner[place] for each in (used, leading, *again)]
        with _more(graph, 1.0 if place in used.places else 0.0):
            results, inner = _follow(graph, equation, values)
        if inner:
            scope.inner[place] = inner
        scope.values.update(zip(equation.outvars, results, strict=True))
    return scope


def outputs_of(graph: Graph, scope: Scope) -> list[Value]:
    return [_read(graph, scope, atom) for atom in scope.jaxpr.outvars]


def _read(graph: Graph, scope: Scope, atom: Any) -> Value:
    return graph.value(atom.aval) if isinstance(atom, Literal) else scope.values[atom]


def _follow(
    graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]
) -> tuple[list[Value], list[Scope]]:
    name = equation.primitive.name
    if name in _RULES:
        results = _RULES[name](graph, equation, inputs)
        if name in PINNED:
            graph.save(results[0])
            graph.compute(results[0])
        if name in PINNED or name in REDUCTIONS:
            # Everything else is fused with one of these, and stays out of memory.
            for value in (*inputs, *results):
                graph.move(value)
        return results, []
    if name in _LOOPS:
        return _LOOPS[name](graph, equation, inputs)
    body = called(equation)
    if body is None:
        return special.opaque(graph, equation, inputs), []
    region = Region((False,) * len(equation.outvars), True, equation.params.get("policy"))
    scope = _enter(graph, body, inputs, *[region] * (name in CHECKPOINTS))
    return outputs_of(graph, scope), [scope]


# What these do is not in a jaxpr of theirs, or is for each device by itself.
_OPAQUE = frozenset(
    """
    shard_map pallas_call ffi_call custom_call pure_callback io_callback
    """.split()  # noqa: SIM905
)


def called(equation: JaxprEqn) -> ClosedJaxpr | Jaxpr | None:
    """The jaxpr that an equation calls with its own operands, if that is what it does."""
    if equation.primitive.name in _OPAQUE:
        return None
    found = [
        param
        for key in ("jaxpr", "call_jaxpr", "fun_jaxpr")
        if isinstance(param := equation.params.get(key), (ClosedJaxpr, Jaxpr))
    ]
    if len(found) != 1:
        return None
    inner = open_jaxpr(found[0])
    fits = len(inner.invars) == len(equation.invars) and len(inner.outvars) == len(equation.outvars)
    return found[0] if fits else None


def open_jaxpr(jaxpr: ClosedJaxpr | Jaxpr) -> Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def _enter(
    graph: Graph, jaxpr: ClosedJaxpr | Jaxpr, inputs: Sequence[Value], *regions: Region
) -> Scope:
    """Walks through a program that an equation calls, perhaps in a rematerialised region."""
    inner = open_jaxpr(jaxpr)
    constants = [graph.constant(var.aval) for var in inner.constvars]
    outside = graph.regions, graph.inner, graph.forwards, graph.kept
    graph.regions = (*(seen[inner] for seen in graph.inner), *regions)
    scope = walk(graph, inner, constants, inputs)
    graph.regions, graph.inner, graph.forwards, graph.kept = outside
    return scope


@contextmanager
def _more(graph: Graph, times: int | float) -> Iterator[None]:
    before = graph.times
    graph.times = before * times
    yield
    graph.times = before


def _scan(
    graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]
) -> tuple[list[Value], list[Scope]]:
    params = equation.params
    consts, carries = params["num_consts"], params["num_carry"]
    grad = any(value.grad for value in inputs)
    body = params["jaxpr"].jaxpr
    inside = [
        _copy(value, value.grad, graph.times if can_be_lifted(body, var) else None)
        for value, var in zip(inputs[:consts], body.invars[:consts], strict=True)
    ]
    # A carry that starts without a gradient may have one after the first iteration.
    inside += [_copy(value, grad) for value in inputs[consts : consts + carries]]
    for value, var in zip(inputs[consts + carries :], body.invars[consts + carries :], strict=True):
        graph.blocked.add(value.dims[0])
        graph.stacks.add(value.dims[0])
        inside.append(graph.value(var.aval, value.dims[1:], grad=value.grad))
    with _more(graph, params["length"]):
        for value in inside[consts : consts + carries]:
            graph.save(value)
        scope = _enter(graph, params["jaxpr"], inside)
    outputs = outputs_of(graph, scope)
    _link(graph, inside[consts : consts + carries], outputs[:carries])
    results = []
    for value, var in zip(outputs, equation.outvars, strict=True):
        stacked = len(results) >= carries
        leading = (graph.node(params["length"], blocked=True),) if stacked else ()
        results.append(graph.value(var.aval, (*leading, *value.dims), grad=value.grad))
    return results, [scope]


def _copy(value: Value, grad: bool, reduced: int | float | None = None) -> Value:
    # A value of its own: inside a loop its cotangent is reduced at every iteration, or once behind
    # the loop if it is lifted.
    return Value(value.dims, value.shape, value.itemsize, grad, reduced)


def _link(graph: Graph, these: Sequence[Value], those: Sequence[Value]) -> None:
    for one, other in zip(these, those, strict=True):
        for a, b in zip(one.dims, other.dims, strict=True):
            graph.link(a, b)


def _while(
    graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]
) -> tuple[list[Value], list[Scope]]:
    params = equation.params
    first, second = params["cond_nconsts"], params["body_nconsts"]
    carry = inputs[first + second :]
    grad = any(value.grad for value in inputs[first:])
    state = [_copy(value, grad) for value in carry]
    constants = [_copy(value, value.grad) for value in inputs[: first + second]]
    with _more(graph, ASSUMED_TRIPS):
        test = _enter(graph, params["cond_jaxpr"], [*constants[:first], *state])
        body = _enter(graph, params["body_jaxpr"], [*constants[first:], *state])
    _link(graph, state, outputs_of(graph, body))
    return state, [test, body]


def _cond(
    graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]
) -> tuple[list[Value], list[Scope]]:
    scopes = [_enter(graph, branch, inputs[1:]) for branch in equation.params["branches"]]
    outputs = [outputs_of(graph, scope) for scope in scopes]
    for other in outputs[1:]:
        _link(graph, outputs[0], other)
    results = [
        graph.value(var.aval, values[0].dims, grad=any(value.grad for value in values))
        for var, values in zip(equation.outvars, zip(*outputs, strict=True), strict=True)
    ]
    return results, scopes


def _linear_solve(
    graph: Graph, equation: JaxprEqn, inputs: Sequence[Value]
) -> tuple[list[Value], list[Scope]]:
    """The solver is followed but not run again: what else belongs to it gives derivatives."""
    lengths = equation.params["const_lengths"]
    start = lengths.matvec + lengths.vecmat
    right = start + lengths.solve + lengths.transpose_solve
    given = [*inputs[start : start + lengths.solve], *inputs[right:]]
    return outputs_of(graph, _enter(graph, equation.params["jaxprs"].solve, given)), []


_LOOPS = {"scan": _scan, "while": _while, "cond": _cond, "custom_linear_solve": _linear_solve}
