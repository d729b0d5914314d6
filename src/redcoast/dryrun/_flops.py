"""Counts the floating point operations of the contractions in a traced program."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.interpreters.partial_eval import dce_jaxpr

from ._trip_counts import called, open_jaxpr, trip_count, unchanged, walk
from .hlo._trip_counts import Value

Flops = Counter[str]
_OPEN = "open loops"  # a key besides the names of dtypes
# Parameters that hold programs which are not run with the equation, such as derivatives.
_NOT_RUN = ("transpose", "jvp", "fwd", "bwd", "cond_jaxpr")


@dataclass(frozen=True)
class Contractions:
    """The floating point operations of contractions, by dtype.

    `open_loops` is the number of loops whose trip count depends on data, counted as one iteration.
    """

    flops: dict[str, int]
    open_loops: int


def count_contractions(jaxpr: ClosedJaxpr | Jaxpr) -> dict[str, int]:
    """Counts the floating point operations of a program's contractions, by dtype of their operands.

    **Arguments:**

    - `jaxpr`: a traced program, such as `jax.make_jaxpr(fn)(x)`.

    **Returns:**

    Two operations for each multiply-add of dot products and convolutions (eight for complex
    numbers), of the entire program on all devices, before partitioning. Unused results are not
    counted. A loop counts its trip count, or one iteration if that depends on data; a conditional
    counts its most expensive branch. For convolutions, zeros that pad the input are counted, and
    zeros that dilate it are not.

    !!! example

        ```python
        import jax
        import jax.numpy as jnp
        from redcoast.dryrun._flops import count_contractions

        x = jnp.ones((8, 8))
        count_contractions(jax.make_jaxpr(lambda x: x @ x)(x))  # {"float32": 1024}
        ```
    """
    return contractions(jaxpr).flops


def contractions(jaxpr: ClosedJaxpr | Jaxpr) -> Contractions:
    """`count_contractions`, and the number of loops whose trip count is unknown."""
    inner = open_jaxpr(jaxpr)
    # Rematerialised programs contain many unused computations.
    live, _ = dce_jaxpr(inner, [True] * len(inner.outvars), instantiate=True)
    if isinstance(jaxpr, ClosedJaxpr):
        live = ClosedJaxpr(live, jaxpr.consts)
    found = _count(live, [None] * len(inner.invars))
    opened = found.pop(_OPEN, 0)
    return Contractions(dict(sorted(found.items())), opened)


def _count(jaxpr: ClosedJaxpr | Jaxpr, inputs: Sequence[Value]) -> Flops:
    total: Flops = Counter()
    walk(jaxpr, inputs, lambda equation, known: total.update(_of(equation, known)))
    return total


def _of(equation: JaxprEqn, known: list[Value]) -> Flops:
    """The operations of an equation, with those of all programs that it runs."""
    name = equation.primitive.name
    if name in _LEAVES:
        return _flops(equation, _LEAVES[name](equation))
    if name in _CALLS:
        return _CALLS[name](equation, known)
    if (body := called(equation)) is not None:
        return _count(body, known)
    total: Flops = Counter()
    for inner in _inside(equation):
        total.update(_count(inner, _unknown(inner)))
    return total


def _inside(equation: JaxprEqn) -> Iterator[ClosedJaxpr | Jaxpr]:
    for key, param in equation.params.items():
        if not key.startswith(_NOT_RUN):
            for one in param if isinstance(param, tuple | list) else (param,):
                if isinstance(one, ClosedJaxpr | Jaxpr):
                    yield one


def _unknown(jaxpr: ClosedJaxpr | Jaxpr) -> list[Value]:
    return [None] * len(open_jaxpr(jaxpr).invars)


def _times(count: int, flops: Flops) -> Flops:
    return Counter({key: n if key == _OPEN else count * n for key, n in flops.items()})


def _flops(equation: JaxprEqn, multiply_adds: int) -> Flops:
    """Operations for these multiply-adds, by the wider of the operands' dtypes."""
    dtypes = [aval.dtype for aval in map(_aval, equation.invars[:2])]
    dtype = max(dtypes, key=lambda one: one.itemsize)
    each = 8 if jnp.issubdtype(dtype, jnp.complexfloating) else 2
    return Counter({str(dtype): each * multiply_adds})


def _aval(atom: Any) -> Any:
    return atom.aval


def _dot_general(equation: JaxprEqn) -> int:
    (summed, _), _ = equation.params["dimension_numbers"]
    left = _aval(equation.invars[0]).shape
    return prod(_aval(equation.outvars[0]).shape) * prod(left[d] for d in summed)


def _ragged_dot(equation: JaxprEqn) -> int:
    """Each row belongs to one group, whichever dimension the groups are along."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (_, summed), (_, batch) = numbers.dot_dimension_numbers
    taken = {*summed, *batch, *numbers.rhs_group_dimensions}
    left, right = (aval.shape for aval in map(_aval, equation.invars[:2]))
    return prod(left) * prod(size for d, size in enumerate(right) if d not in taken)


def _convolution(equation: JaxprEqn) -> int:
    kernel = _aval(equation.invars[1]).shape
    taps = prod(kernel) // kernel[equation.params["dimension_numbers"].rhs_spec[0]]
    size = prod(_aval(equation.outvars[0]).shape) * taps
    return size // prod(equation.params["lhs_dilation"])


def _fused_attention(equation: JaxprEqn) -> int:
    """cuDNN attention: two products forward, five backward (the scores are recomputed)."""
    batch, queries, heads, head_dim = _aval(equation.invars[0]).shape
    keys = _aval(equation.invars[1]).shape[1]
    products = 5 if "bwd" in equation.primitive.name else 2
    return products * batch * heads * queries * keys * head_dim


_LEAVES: dict[str, Callable[[JaxprEqn], int]] = {
    "dot_general": _dot_general,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
    "dot_product_attention_fwd_wrapper": _fused_attention,
    "dot_product_attention_bwd_wrapper": _fused_attention,
}


def _scan(equation: JaxprEqn, known: list[Value]) -> Flops:
    params, body = equation.params, equation.params["jaxpr"]
    first = params["num_consts"]
    split = first + params["num_carry"]
    constants, start, rest = known[:first], known[first:split], len(known) - split
    carried = unchanged(body, constants, start, rest)
    return _times(params["length"], _count(body, [*constants, *carried, *[None] * rest]))


def _while(equation: JaxprEqn, known: list[Value]) -> Flops:
    params = equation.params
    first = params["cond_nconsts"]
    split = first + params["body_nconsts"]
    carried = unchanged(params["body_jaxpr"], known[first:split], known[split:])
    body = _count(params["body_jaxpr"], [*known[first:split], *carried])
    test = _count(params["cond_jaxpr"], [*known[:first], *carried])
    trips = trip_count(equation, known)
    if trips is None:
        return body + test + Counter({_OPEN: 1} if body or test else {})
    return _times(trips, body) + _times(trips + 1, test)


def _cond(equation: JaxprEqn, known: list[Value]) -> Flops:
    branches = [_count(branch, known[1:]) for branch in equation.params["branches"]]
    return max(branches, key=lambda found: sum(n for key, n in found.items() if key != _OPEN))


def _shard_map(equation: JaxprEqn, known: list[Value]) -> Flops:
    """Counts the inner program once for each device along the axes that something is sharded over.

    Along other axes all devices compute the same, which counts once before partitioning.
    """
    params = equation.params
    specs = (*params["in_specs"], *params["out_specs"])
    axes = {axis for spec in specs for entry in spec for axis in _names(entry)}
    devices = prod(params["mesh"].shape[axis] for axis in axes)
    return _times(devices, _count(params["jaxpr"], known))


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry or ()


def _pallas(equation: JaxprEqn, known: list[Value]) -> Flops:
    """A Pallas kernel runs once for each point of its grid."""
    grid = equation.params["grid_mapping"].grid
    points = prod(size for size in grid if isinstance(size, int))
    return _times(points, _count(equation.params["jaxpr"], _unknown(equation.params["jaxpr"])))


def _linear_solve(equation: JaxprEqn, known: list[Value]) -> Flops:
    """Counts the solve itself; the other programs of the equation are for derivatives."""
    solve: Any = equation.params["jaxprs"].solve
    return _count(solve, _unknown(solve))


_CALLS: dict[str, Callable[[JaxprEqn, list[Value]], Flops]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
    "pallas_call": _pallas,
    "custom_linear_solve": _linear_solve,
}
