"""Where a loss brings the examples of a batch together, so that it is no mean over them.

A mean over examples can be taken in parts: of microbatches, or of the batches of an evaluation. A
loss in which one example's part depends on others cannot: a contrastive loss, batch normalisation,
or a function of a mean that is not linear. Means weighted by what the batch holds can.
"""

import os
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from ..program._graph import Value
from ..program._walk import REDUCTIONS, Scope
from ..solver._strategy import Program, batch_dims

_SUMS = frozenset(["reduce_sum", "psum", "psum_invariant", "dot_general"])
_REDUCED = REDUCTIONS | _SUMS | {"pmax", "pmin"}
_ALONG = {
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), "axis"),
    "sort": "dimension",
}
# Of a sum over examples, these are not the sum of anything over examples.
_NOT_LINEAR = frozenset(
    """
    abs acos acosh asin asinh atan atan2 atanh cbrt clamp cos cosh digamma erf erfc erf_inv exp exp2
    expm1 integer_pow lgamma log log1p logistic max min pow reduce_max reduce_min reduce_prod rsqrt
    sign sin sinh sqrt square tan tanh
    """.split()  # noqa: SIM905
)
_SHIFTS = frozenset(["add", "add_any", "sub"])
_FORGOTTEN = frozenset(["is_finite", "reduce_and", "reduce_or", "random_bits", "iota"])
_PACKAGE = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True)
class _Past:
    """What a value comes from.

    `model` is whether from the model's arrays, and `counts` whether from counting, as the indices
    of examples. `summed` is the operation that brought examples together which depend on the model,
    and `weighed` one for those that do not. `weights` is 1 if that is to a scalar, as a sum of
    weights is, else 2.
    """

    model: bool = False
    counts: bool = False
    summed: JaxprEqn | None = None
    weighed: JaxprEqn | None = None
    weights: int = 0


def _together(pasts: Sequence[_Past]) -> _Past:
    return _Past(
        any(past.model for past in pasts),
        any(past.counts for past in pasts),
        next((past.summed for past in pasts if past.summed is not None), None),
        next((past.weighed for past in pasts if past.weighed is not None), None),
        max((past.weights for past in pasts), default=0),
    )


@dataclass
class _Search:
    has: Callable[[int], bool]  # whether a dimension is that of the examples
    found: list[dict[str, str]] = field(default_factory=list)

    def add(self, equation: JaxprEqn, why: str) -> None:
        name, where = equation.primitive.name, _line(equation)
        self.found.append({"operation": name, "where": where, "why": why})


def find_coupling(program: Program) -> list[dict[str, str]]:
    """The first operation that brings examples together: `operation`, `where`, and `why`."""
    jaxpr, traced = program.traced.jaxpr.jaxpr, program.traced
    given = program.batch.given
    if not given or program.graph.sizes[given[0]] < 2:
        return []
    search = _Search(batch_dims(program, 1).has)
    needed = [i == 0 or not traced.trains for i in range(len(jaxpr.outvars))]
    pasts = [_Past(model=i < traced.arrays) for i in range(len(jaxpr.invars))]
    _follow(search, jaxpr, program.scope, pasts, needed)
    return search.found[:1]


def _follow(
    search: _Search, jaxpr: Jaxpr, scope: Scope, given: Sequence[_Past], needed: Sequence[bool]
) -> list[_Past]:
    """What the results of a program come from; it ends at the first operation found."""
    env: dict[Any, _Past] = dict(zip(jaxpr.invars, given, strict=True))
    read = lambda atom: _Past() if isinstance(atom, Literal) else env.get(atom, _Past())
    used = _used(jaxpr, needed)
    for place, equation in enumerate(jaxpr.eqns):
        if place in used and not search.found:
            pasts = [read(atom) for atom in equation.invars]
            inner = scope.inner.get(place, [])
            if inner:
                results = _inside(search, equation, inner, pasts)
                for found in search.found[:1]:
                    # A compiled function of a library's has no line of the user's in it.
                    found["where"] = found["where"] or _line(equation)
            else:
                results = [_past(search, scope, equation, pasts)] * len(equation.outvars)
            env.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _used(jaxpr: Jaxpr, needed: Sequence[bool]) -> set[int]:
    """The places of the equations that the needed results depend on."""
    outputs = zip(jaxpr.outvars, needed, strict=True)
    wanted = {atom for atom, need in outputs if need and not isinstance(atom, Literal)}
    used: set[int] = set()
    for place in range(len(jaxpr.eqns) - 1, -1, -1):
        equation = jaxpr.eqns[place]
        if not wanted.isdisjoint(equation.outvars):
            used.add(place)
            wanted.update(atom for atom in equation.invars if not isinstance(atom, Literal))
    return used


def _inside(
    search: _Search, equation: JaxprEqn, inner: list[Scope], pasts: list[_Past]
) -> list[_Past]:
    """The results of an equation with programs in it: loops, branches and calls."""
    name, params = equation.primitive.name, equation.params
    run = lambda scope, given: _follow(
        search, scope.jaxpr, scope, given, [True] * len(scope.jaxpr.outvars)
    )
    if name == "cond":
        branches = [run(scope, pasts[1:]) for scope in inner]
        return [_together([pasts[0], *results]) for results in zip(*branches, strict=True)]
    if name == "scan":
        begin, count, body = params["num_consts"], params["num_carry"], inner[0]
        before, after = [], []
    elif name == "while":
        begin, body = params["cond_nconsts"] + params["body_nconsts"], inner[1]
        before, count = pasts[: params["cond_nconsts"]], len(pasts) - begin
        pasts, begin, after = pasts[params["cond_nconsts"] :], params["body_nconsts"], before
    else:
        return run(inner[0], pasts)
    results = run(body, pasts)
    # What is carried may come from what an iteration made of it.
    carried = [_together(pair) for pair in zip(pasts[begin : begin + count], results, strict=False)]
    results = run(body, [*pasts[:begin], *carried, *pasts[begin + count :]])
    return [_together([past, *after]) for past in results]


def _past(search: _Search, scope: Scope, equation: JaxprEqn, pasts: Sequence[_Past]) -> _Past:
    """What an operation's results come from; if it brings examples together, it is found."""
    name = equation.primitive.name
    if name in _FORGOTTEN or not equation.outvars:
        return _Past(counts=name == "iota")
    known = [
        (past, scope.values[atom])
        for past, atom in zip(pasts, equation.invars, strict=True)
        if not isinstance(atom, Literal)
    ]
    past, result = _together(pasts), scope.values[equation.outvars[0]]
    past = replace(past, counts=past.counts and name != "sort")
    why = (
        _pairs(search, past, known, result)
        or _order(search, equation, past, known)
        or _lookup(search, equation, known)
        or _bent(equation, pasts)
    )
    if why:
        search.add(equation, why)
    elif _goes_back(search, equation, known, result):
        # The sum says more than what is done with it, which may be to repeat it.
        found = past.summed or past.weighed or equation
        search.add(found, "is over all examples, and each of them gets something of it")
    if _rows(search, result) and len(known) > 1:
        past = replace(past, weights=0, weighed=None)
    return _reduced(search, equation, past, known, result)


def _rows(search: _Search, value: Value) -> int:
    return sum(map(search.has, value.dims))


def _pairs(
    search: _Search, past: _Past, known: Sequence[tuple[_Past, Value]], result: Value
) -> str:
    most = max((_rows(search, value) for _, value in known), default=0)
    if past.model and _rows(search, result) > max(1, most):
        return "compares every example with every other"
    return ""


def _order(
    search: _Search, equation: JaxprEqn, past: _Past, known: Sequence[tuple[_Past, Value]]
) -> str:
    axis = equation.params.get(_ALONG.get(equation.primitive.name, ""))
    if axis is None or not past.model or not _is_floating(equation.invars[0]):
        return ""
    return "goes along the examples" if search.has(known[0][1].dims[axis]) else ""


def _lookup(search: _Search, equation: JaxprEqn, known: Sequence[tuple[_Past, Value]]) -> str:
    """Examples at the place of others, as those of a random order are."""
    if equation.primitive.name != "gather" or len(known) < 2:
        return ""
    (_, operand), (index, _) = known[:2]
    looked_up = equation.params["dimension_numbers"].collapsed_slice_dims
    if index.model or index.counts or not any(search.has(operand.dims[d]) for d in looked_up):
        return ""
    return "looks up examples from all over the batch"


def _goes_back(
    search: _Search, equation: JaxprEqn, known: Sequence[tuple[_Past, Value]], result: Value
) -> bool:
    """Whether what all examples gave goes into each of them."""
    if not _rows(search, result):
        return False
    whole = [past for past, value in known if not _rows(search, value)]
    # What a sum of weights divides is a weighted mean; what it is taken from is not.
    weights = sorted(past.weights for past, _ in known)
    shifts = equation.primitive.name in _SHIFTS and weights == [0, 1]
    return shifts or any(past.summed is not None or past.weights == 2 for past in whole)


def _bent(equation: JaxprEqn, pasts: Sequence[_Past]) -> str:
    """A function of a sum over examples that is not linear."""
    name = equation.primitive.name
    summed = [past.summed is not None for past in pasts]
    if not any(summed) or not _is_floating(equation.outvars[0]):
        return ""
    alone = name in _NOT_LINEAR and equation.params.get("y") != 1
    product = name in ("mul", "dot_general") and sum(summed) > 1
    ratio = name == "div" and summed[1]
    chosen = name == "select_n" and summed[0]
    bends = alone or product or ratio or chosen
    return "is a function, and not a linear one, of what is summed over examples" if bends else ""


def _reduced(
    search: _Search,
    equation: JaxprEqn,
    past: _Past,
    known: Sequence[tuple[_Past, Value]],
    result: Value,
) -> _Past:
    """With examples summed up, if they are."""
    name = equation.primitive.name
    gone = _summed(search, equation, known, result)
    if not gone or search.found:
        return past
    if not past.model:
        several = any(size > 1 for size in result.shape)
        return replace(past, weighed=equation, weights=1 + several)
    if name not in (*_SUMS, "scatter-add", "scatter_add") and _is_floating(equation.outvars[0]):
        search.add(equation, "takes one of the examples")
    return replace(past, summed=equation)


def _summed(
    search: _Search, equation: JaxprEqn, known: Sequence[tuple[_Past, Value]], result: Value
) -> bool:
    name = equation.primitive.name
    if name in ("scatter-add", "scatter_add") and len(known) == 3:
        (_, _), (index, _), (_, updates) = known
        written = [
            node
            for d, node in enumerate(updates.dims)
            if d not in equation.params["dimension_numbers"].update_window_dims
        ]
        return not index.counts and any(map(search.has, written))
    if name == "dot_general" and len(known) == 2:
        (left, _), _ = equation.params["dimension_numbers"]
        return any(search.has(known[0][1].dims[d]) for d in left)
    return name in _REDUCED and bool(known) and _rows(search, known[0][1]) > _rows(search, result)


def _is_floating(atom: Any) -> bool:
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _line(equation: JaxprEqn) -> str:
    """The line of the user's own code that an operation stands in, as `train.py:12`."""
    frames = getattr(getattr(equation.source_info, "traceback", None), "frames", ())
    libraries = {sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib", "stdlib")}
    foreign = (_PACKAGE + os.sep, "<", *libraries)
    for frame in frames:
        if not frame.file_name.startswith(foreign):
            return f"{os.path.basename(frame.file_name)}:{frame.line_num}"
    return ""
