"""Follows the rows of a batch through a layer, and refuses a layer that mixes them.

The layer is traced with two numbers of rows, which shows the dimensions that count rows: their
sizes differ.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal

from ...core._control_flow import (
    AnyJaxpr,
    Call,
    Cond,
    Scan,
    While,
    consts_of,
    control_flow,
    open_jaxpr,
)
from ...core._markers import is_most
from ._row_rules import apply_rule
from ._row_states import Mixed, Pair, Rows, State, States, differing, join_rows

# The numbers of these parameters are sizes, which follow from the number of rows. A name may hold
# them too.
_SIZES = frozenset(["shape", "new_sizes", "limit_indices", "slice_sizes", "sizes", "name"])


def follow_rows(few: AnyJaxpr, all_: AnyJaxpr, inputs: Sequence[State]) -> States:
    """Where the rows of a layer's outputs are, given where its inputs have them.

    `few` and `all_` are the layer traced for few and for all rows. Raises `Mixed`.
    """
    is_array = lambda x: isinstance(x, np.ndarray)
    equal = lambda x, y: x is y or (is_array(x) and is_array(y) and np.array_equal(x, y))
    consts = consts_of(few), consts_of(all_)
    if len(consts[0]) != len(consts[1]) or not all(map(equal, *consts)):
        raise Mixed("a constant depends on the number of rows")
    few, all_ = open_jaxpr(few), open_jaxpr(all_)
    if len(few.eqns) != len(all_.eqns):
        raise Mixed("its operations depend on the number of rows")
    env: dict[Any, State] = dict.fromkeys(few.constvars)
    env.update(zip(few.invars, inputs, strict=True))
    read = lambda atom: None if isinstance(atom, Literal) else env[atom]
    for one, other in zip(few.eqns, all_.eqns, strict=True):
        pair = Pair(one, other)
        _check_same(pair)
        found = _follow(pair, [read(atom) for atom in one.invars])
        for var, large, state in zip(one.outvars, other.outvars, found, strict=True):
            if differing(var.aval, large.aval) != ([state.dim] if isinstance(state, Rows) else []):
                raise Mixed(f"`{pair.name}` changes what its rows are")
        env.update(zip(one.outvars, found, strict=True))
    return [read(atom) for atom in few.outvars]


def _check_same(pair: Pair) -> None:
    """Checks that the two equations differ in sizes alone."""
    few, all_ = pair.few, pair.all
    is_literal = lambda equation: [isinstance(atom, Literal) for atom in equation.invars]
    if few.primitive is not all_.primitive or is_literal(few) != is_literal(all_):
        raise Mixed("its operations depend on the number of rows")
    number = lambda atom: np.asarray(atom.val if isinstance(atom, Literal) else 0)
    for one, other in zip(map(number, few.invars), map(number, all_.invars), strict=True):
        if not np.array_equal(one, other, equal_nan=np.issubdtype(one.dtype, np.inexact)):
            raise Mixed(
                f"a number in `{pair.name}` depends on the number of rows, as in a mean over "
                "them. Layers may return sums, which are divided after all layers"
            )
    for key, value in few.params.items():
        plain = isinstance(value, bool | int | float | str | tuple)
        if plain and key not in _SIZES and _numbers(value) != _numbers(all_.params.get(key)):
            raise Mixed(f"the `{key}` of `{pair.name}` depends on the number of rows")


def _numbers(value: Any) -> Any:
    """The numbers and names in a parameter, without jaxprs and functions."""
    if isinstance(value, tuple):
        return tuple(map(_numbers, value))
    return value if isinstance(value, bool | int | float | str) else None


def _follow(pair: Pair, inputs: States) -> States:
    if is_most(pair.few):
        return [None]
    match control_flow(pair.few), control_flow(pair.all):
        case Scan() as few, Scan() as all_:
            return _scan(pair, few, all_, inputs)
        case While() as few, While() as all_:
            return _while(pair, few, all_, inputs)
        case Cond() as few, Cond() as all_:
            return _cond(pair, few, all_, inputs)
        case Call() as few, Call() as all_:
            return follow_rows(few.jaxpr, all_.jaxpr, inputs)
    outs = pair.few.outvars
    sizes = zip(outs, pair.all.outvars, strict=True)
    if not any(inputs) and not any(differing(few.aval, all_.aval) for few, all_ in sizes):
        return [None] * len(outs)
    return apply_rule(pair, inputs)


def _scan(pair: Pair, few: Scan, all_: Scan, inputs: States) -> States:
    consts, carry, xs = few.split(inputs)
    xs = [in_layer(state, "`scan` goes from row to row") for state in xs]
    run = lambda carry: follow_rows(few.body, all_.body, [*consts, *carry, *xs])
    carry, outputs = _settle(pair, run, carry)
    return [*carry, *map(of_layers, outputs[len(carry) :])]


def in_layer(state: State, why: str) -> State:
    """The rows in one iteration of a scan over an array."""
    if not isinstance(state, Rows):
        return state
    if state.dim == 0:
        raise Mixed(why)
    return state.at(state.dim - 1)


def of_layers(state: State) -> State:
    """The rows in the stacked results of a scan."""
    return state.at(state.dim + 1) if isinstance(state, Rows) else state


def _settle(pair: Pair, run: Callable[[States], States], carry: States) -> tuple[States, States]:
    """The rows of a loop's carry after any number of iterations."""
    while True:
        outputs = run(carry)
        after = [join_rows(pair, states) for states in zip(carry, outputs, strict=False)]
        if after == carry:
            return carry, outputs
        carry = after


def _while(pair: Pair, few: While, all_: While, inputs: States) -> States:
    cond_consts, body_consts, carry = few.split(inputs)
    run = lambda carry: follow_rows(few.body, all_.body, [*body_consts, *carry])
    carry, _ = _settle(pair, run, carry)
    (stop,) = follow_rows(few.cond, all_.cond, [*cond_consts, *carry])
    if stop is not None:
        raise Mixed("`while` stops row by row")
    return carry


def _cond(pair: Pair, few: Cond, all_: Cond, inputs: States) -> States:
    if inputs[0] is not None:
        raise Mixed("`cond` chooses a branch by rows")
    branches = zip(few.branches, all_.branches, strict=True)
    results = [follow_rows(part, whole, inputs[1:]) for part, whole in branches]
    return [join_rows(pair, states) for states in zip(*results, strict=True)]
