"""Where a loss relates the examples of a batch, so that it is not a mean over them.

A mean over examples can be taken in parts: of microbatches, or of the batches of an evaluation. If
the term of one example depends on others, it cannot. Examples are a contrastive loss, batch
normalisation, and a nonlinear function of a mean. Means weighted by arrays of the batch can.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from ...core._control_flow import Cond, Scan, While, control_flow
from ...core._frames import own_line
from ...core._jaxpr import is_inexact, variables
from ..operations._rule_table import REDUCTIONS
from ..program._graph import Value
from ..program._walk import Scope
from ..solver._strategy import Program, batch_dims
from ._data import Coupling

_SCATTERS = frozenset(["scatter-add", "scatter_add"])
_SUMS = _SCATTERS | {"reduce_sum", "psum", "psum_invariant", "dot_general"}
_REDUCED = (REDUCTIONS | _SUMS | {"pmax", "pmin"}) - _SCATTERS
_RAGGED = frozenset(["ragged_dot", "ragged_dot_general"])
_ALONG = {
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), "axis"),
    "sort": "dimension",
}
# Of a sum over examples, these are not a sum over examples.
_NOT_LINEAR = frozenset(
    """
    abs acos acosh asin asinh atan atan2 atanh cbrt clamp cos cosh digamma erf erfc erf_inv exp exp2
    expm1 integer_pow lgamma log log1p logistic max min pow reduce_max reduce_min reduce_prod rsqrt
    sign sin sinh sqrt square tan tanh
    """.split()  # noqa: SIM905
)
_SHIFTS = frozenset(["add", "add_any", "sub"])
_IGNORED = frozenset(["is_finite", "reduce_and", "reduce_or", "random_bits", "iota"])


@dataclass(frozen=True)
class _Origin:
    """What a value depends on.

    `model` is whether it depends on the model's arrays, and `counts` whether on a count, such as
    the indices of examples. `summed` is an operation that reduced over examples a value that
    depends on the model, and `weighed` one that reduced a value that does not. `weights` is 1 if
    the result of `weighed` is a scalar, such as a sum of weights, and otherwise 2.
    """

    model: bool = False
    counts: bool = False
    summed: JaxprEqn | None = None
    weighed: JaxprEqn | None = None
    weights: int = 0


Origins = Sequence[_Origin]


def _merged(origins: Origins) -> _Origin:
    first = lambda name: next(filter(None, (getattr(one, name) for one in origins)), None)
    return _Origin(
        any(one.model for one in origins),
        any(one.counts for one in origins),
        first("summed"),
        first("weighed"),
        max((one.weights for one in origins), default=0),
    )


@dataclass
class _Search:
    has: Callable[[int], bool]  # whether a dimension is the batch dimension
    size: int  # the number of examples
    found: Coupling | None = None

    def rows(self, value: Value) -> int:
        """How many dimensions of a value are the batch dimension."""
        return sum(map(self.has, value.dims))

    def record(self, equation: JaxprEqn, why: str) -> None:
        self.found = Coupling(equation.primitive.name, _line(equation), why)


class _Operation(NamedTuple):
    """An equation, with the origins of its operands, and those and the values of non-literals."""

    equation: JaxprEqn
    origins: Origins
    known: Sequence[tuple[_Origin, Value]]
    origin: _Origin  # of the results, unless it reduces
    result: Value

    @property
    def name(self) -> str:
        return self.equation.primitive.name

    @property
    def is_inexact(self) -> bool:
        return is_inexact(self.equation.outvars[0].aval)


def find_coupling(program: Program) -> Coupling | None:
    """The first operation that relates examples to each other, if there is one."""
    traced, given = program.traced, program.batch.given
    if not given or (size := program.graph.sizes[given[0]]) < 2:
        return None
    search, jaxpr = _Search(batch_dims(program, 1).has, size), program.scope.jaxpr
    needed = jaxpr.outvars[:1] if traced.trains else jaxpr.outvars
    origins = [_Origin(model=i < traced.arrays) for i in range(len(jaxpr.invars))]
    _follow(search, program.scope, origins, needed)
    return search.found


def _follow(
    search: _Search, scope: Scope, given: Origins, needed: Sequence[Any] | None = None
) -> Origins:
    """The origins of the results of a program; it stops at the first operation found."""
    jaxpr = scope.jaxpr
    env: dict[Any, _Origin] = dict(zip(jaxpr.invars, given, strict=True))
    read = lambda atom: _Origin() if isinstance(atom, Literal) else env.get(atom, _Origin())
    for place in _used(jaxpr, jaxpr.outvars if needed is None else needed):
        if search.found:
            break
        equation = jaxpr.eqns[place]
        origins = [read(atom) for atom in equation.invars]
        if place in scope.inner:
            results = _nested(search, equation, scope.inner[place], origins)
            if search.found and not search.found.where:
                # A compiled function of a library has no line of the user's code in it.
                search.found = replace(search.found, where=_line(equation))
        else:
            results = [_origin(search, scope, equation, origins)] * len(equation.outvars)
        env.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _used(jaxpr: Jaxpr, needed: Sequence[Any]) -> list[int]:
    """The places of the equations that the needed results depend on."""
    wanted, used = set(variables(needed)), []
    for place, equation in reversed(list(enumerate(jaxpr.eqns))):
        if not wanted.isdisjoint(equation.outvars):
            used.append(place)
            wanted.update(variables(equation.invars))
    return used[::-1]


def _nested(search: _Search, equation: JaxprEqn, inner: list[Scope], origins: Origins) -> Origins:
    """The origins of the results of loops, branches and calls."""
    match control_flow(equation):
        case Cond():
            branches = [_follow(search, scope, origins[1:]) for scope in inner]
            return [_merged([origins[0], *results]) for results in zip(*branches, strict=True)]
        case Scan() as scan:
            return _loop(search, inner[0], *scan.split(origins))
        case While() as loop:
            condition, consts, carry = loop.split(origins)
            return [_merged([x, *condition]) for x in _loop(search, inner[1], consts, carry, [])]
    return _follow(search, inner[0], origins)


def _loop(search: _Search, body: Scope, consts: Origins, carry: Origins, xs: Origins) -> Origins:
    results = _follow(search, body, [*consts, *carry, *xs])
    # A carried value may depend on the results of an earlier iteration.
    carried = [_merged(pair) for pair in zip(carry, results, strict=False)]
    return _follow(search, body, [*consts, *carried, *xs])


def _origin(search: _Search, scope: Scope, equation: JaxprEqn, origins: Origins) -> _Origin:
    """The origin of an operation's results; it is recorded if it relates examples."""
    name = equation.primitive.name
    if name in _IGNORED or not equation.outvars:
        return _Origin(counts=name == "iota")
    if name in _RAGGED:
        # The sizes of groups, which are sums over the rows of all examples, only say where the rows
        # of each group are.
        groups = [replace(origin, summed=None, weighed=None, weights=0) for origin in origins[2:]]
        origins = [*origins[:2], *groups]
    operands = zip(origins, equation.invars, strict=True)
    known = [(o, scope.values[atom]) for o, atom in operands if not isinstance(atom, Literal)]
    origin = _merged(origins)
    origin = replace(origin, counts=origin.counts and name != "sort")
    one = _Operation(equation, origins, known, origin, scope.values[equation.outvars[0]])
    _check(search, one)
    if search.rows(one.result) and len(known) > 1:
        origin = replace(origin, weights=0, weighed=None)
    if search.found or not _reduces(search, one):
        return origin
    if origin.model:
        return replace(origin, summed=equation)
    several = any(size > 1 for size in one.result.shape)
    return replace(origin, weighed=equation, weights=1 + several)


def _check(search: _Search, one: _Operation) -> None:
    """Records an operation that relates examples."""
    if why := next((why for why, holds in _RELATIONS.items() if holds(search, one)), ""):
        search.record(one.equation, why)
    elif _used_for_each(search, one):
        # The sum is more informative than its use, which may be a broadcast.
        found = one.origin.summed or one.origin.weighed or one.equation
        search.record(found, "reduces over all examples, and its result is used for each of them")
    elif one.origin.model and one.is_inexact and one.name not in _SUMS and _reduces(search, one):
        search.record(one.equation, "selects one of the examples")


def _compares_all(search: _Search, one: _Operation) -> bool:
    most = max((search.rows(value) for _, value in one.known), default=0)
    return one.origin.model and search.rows(one.result) > max(1, most)


def _along_batch(search: _Search, one: _Operation) -> bool:
    axis = one.equation.params.get(_ALONG.get(one.name, ""))
    if axis is None or not one.origin.model or not is_inexact(one.equation.invars[0].aval):
        return False
    return search.has(one.known[0][1].dims[axis])


def _lookup(search: _Search, one: _Operation) -> bool:
    """Whether examples are permuted, for example by a random order."""
    if one.name != "gather" or len(one.known) < 2:
        return False
    (_, operand), (index, _) = one.known[:2]
    looked_up = one.equation.params["dimension_numbers"].collapsed_slice_dims
    fixed = index.model or index.counts
    return not fixed and any(search.has(operand.dims[d]) for d in looked_up)


def _reorders(search: _Search, one: _Operation) -> bool:
    """Whether an operation reverses, selects or splits the examples, or transforms along them.

    A part of an array with more rows, such as the real examples among real and generated ones, is
    not.
    """
    if not one.known or isinstance(one.equation.invars[0], Literal):
        return False
    params, operand = one.equation.params, one.known[0][1]
    along: Sequence[int] = ()
    if one.name == "rev":
        along = params["dimensions"]
    elif one.name in ("slice", "dynamic_slice"):
        pairs = zip(operand.shape, one.result.shape, strict=True)
        along = [d for d, (before, after) in enumerate(pairs) if before != after]
    elif one.name in ("split", "top_k"):
        along = [params["axis"]]
    elif one.name == "fft":
        along = range(len(operand.shape))[-len(params["fft_lengths"]) :]
    return any(search.has(operand.dims[d]) and operand.shape[d] == search.size for d in along)


def _nonlinear(search: _Search, one: _Operation) -> bool:
    """Whether an operation is a nonlinear function of a sum over examples."""
    summed = [origin.summed is not None for origin in one.origins]
    if not any(summed) or not one.is_inexact:
        return False
    alone = one.name in _NOT_LINEAR and one.equation.params.get("y") != 1
    product = one.name in ("mul", "dot_general") and sum(summed) > 1
    ratio = one.name == "div" and summed[1]
    return alone or product or ratio or (one.name == "select_n" and summed[0])


_RELATIONS = {
    "compares every example with every other": _compares_all,
    "operates along the batch dimension": _along_batch,
    "looks up other examples of the batch": _lookup,
    "relates examples by their places in the batch": _reorders,
    "is a nonlinear function of a sum over examples": _nonlinear,
}


def _used_for_each(search: _Search, one: _Operation) -> bool:
    """Whether a reduction over all examples is used for each of them."""
    if not search.rows(one.result):
        return False
    full = [origin for origin, value in one.known if not search.rows(value)]
    # Division by a sum of weights is a weighted mean; its subtraction is not.
    shifts = one.name in _SHIFTS and sorted(origin.weights for origin, _ in one.known) == [0, 1]
    return shifts or any(origin.summed is not None or origin.weights == 2 for origin in full)


def _reduces(search: _Search, one: _Operation) -> bool:
    """Whether an operation reduces over examples."""
    known, params = one.known, one.equation.params
    if one.name in _SCATTERS and len(known) == 3:
        (_, _), (index, _), (_, updates) = known
        window = params["dimension_numbers"].update_window_dims
        written = [node for d, node in enumerate(updates.dims) if d not in window]
        return not index.counts and any(map(search.has, written))
    if one.name == "dot_general" and len(known) == 2:
        (left, _), _ = params["dimension_numbers"]
        return any(search.has(known[0][1].dims[d]) for d in left)
    reduced = one.name in _REDUCED and bool(known)
    return reduced and search.rows(known[0][1]) > search.rows(one.result)


def _line(equation: JaxprEqn) -> str:
    """The line of the user's code that an operation is in, such as `train.py:12`."""
    return own_line(getattr(equation.source_info, "traceback", None))
