"""Follows the rows of a batch through a layer, and refuses a layer that mixes them.

The layer is traced with two numbers of rows, which shows the dimensions that count rows: their
sizes differ.
"""

from collections.abc import Callable, Sequence

import numpy as np
from jax.extend.core import Literal, Var

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
from ..operations import Atom
from ..operations._rule import OPERAND_SIZES, RESULT_SIZES
from ._row_rules import apply_rule
from ._row_states import EquationPair, MixesRows, RowDim, State, States, differing, join_rows

# The numbers of these parameters are sizes, which follow from the number of rows. A name may hold
# them too.
_SIZES = RESULT_SIZES | OPERAND_SIZES | {"sizes", "name"}


def follow_rows(few: AnyJaxpr, all_: AnyJaxpr, inputs: Sequence[State]) -> States:
    """Where the rows of a layer's outputs are, given where its inputs have them.

    `few` and `all_` are the layer traced for few and for all rows. Raises `MixesRows`.
    """
    few_consts, consts = consts_of(few), consts_of(all_)
    if len(few_consts) != len(consts) or not all(map(_is_same_constant, few_consts, consts)):
        raise MixesRows("a constant depends on the number of rows")
    few, all_ = open_jaxpr(few), open_jaxpr(all_)
    if len(few.eqns) != len(all_.eqns):
        raise MixesRows("its operations depend on the number of rows")
    states: dict[Var, State] = dict.fromkeys(few.constvars)
    states.update(zip(few.invars, inputs, strict=True))
    for of_few, of_all in zip(few.eqns, all_.eqns, strict=True):
        pair = EquationPair(of_few, of_all)
        _check_same(pair)
        results = _follow(pair, _read(states, of_few.invars))
        for var, var_of_all, state in zip(of_few.outvars, of_all.outvars, results, strict=True):
            row_dims = [state.dim] if isinstance(state, RowDim) else []
            if differing(var, var_of_all) != row_dims:
                raise MixesRows(f"`{pair.name}` changes what its rows are")
            states[var] = state
    return _read(states, few.outvars)


def _read(states: dict[Var, State], atoms: Sequence[Atom]) -> States:
    # All rows share a literal.
    return [None if isinstance(atom, Literal) else states[atom] for atom in atoms]


def _is_same_constant(few: object, all_: object) -> bool:
    # To compare arrays on devices would wait for them.
    if isinstance(few, np.ndarray) and isinstance(all_, np.ndarray):
        return np.array_equal(few, all_)
    return few is all_


def _check_same(pair: EquationPair) -> None:
    """Checks that the two equations differ in sizes alone."""
    few, all_ = pair.few, pair.all
    if few.primitive is not all_.primitive or len(few.invars) != len(all_.invars):
        raise MixesRows("its operations depend on the number of rows")
    for operand, operand_of_all in zip(few.invars, all_.invars, strict=True):
        if isinstance(operand, Literal) and isinstance(operand_of_all, Literal):
            if not _is_same_number(operand, operand_of_all):
                raise MixesRows(
                    f"a number in `{pair.name}` depends on the number of rows, as in a mean over "
                    "them. Layers may return sums, which are divided after all layers"
                )
        elif isinstance(operand, Literal) or isinstance(operand_of_all, Literal):
            raise MixesRows("its operations depend on the number of rows")
    for key, value in few.params.items():
        if key in _SIZES or not isinstance(value, bool | int | float | str | tuple):
            continue
        if _plain_values(value) != _plain_values(all_.params.get(key)):
            raise MixesRows(f"the `{key}` of `{pair.name}` depends on the number of rows")


def _is_same_number(few: Literal, all_: Literal) -> bool:
    number = np.asarray(few.val)
    has_nan = np.issubdtype(number.dtype, np.inexact)
    return np.array_equal(number, np.asarray(all_.val), equal_nan=has_nan)


def _plain_values(value: object) -> object:
    """The numbers and names in a parameter, without jaxprs and functions."""
    if isinstance(value, tuple):
        return tuple(map(_plain_values, value))
    if isinstance(value, bool | int | float | str):
        return value
    return None


def _follow(pair: EquationPair, inputs: States) -> States:
    if is_most(pair.few):
        return [
            None
        ]  # no result depends on it, so each microbatch may take its own largest element
    match control_flow(pair.few), control_flow(pair.all):
        case Scan() as few, Scan() as all_:
            return _scan(pair, few, all_, inputs)
        case While() as few, While() as all_:
            return _while(pair, few, all_, inputs)
        case Cond() as few, Cond() as all_:
            return _cond(pair, few, all_, inputs)
        case Call() as few, Call() as all_:
            return follow_rows(few.jaxpr, all_.jaxpr, inputs)
    outvars = pair.few.outvars
    makes_rows = any(map(differing, outvars, pair.all.outvars))
    if not any(inputs) and not makes_rows:
        return [None] * len(outvars)
    return apply_rule(pair, inputs)


def _scan(pair: EquationPair, few: Scan, all_: Scan, inputs: States) -> States:
    consts, carry, xs = few.split(inputs)
    slices = [in_layer(state, "`scan` goes from row to row") for state in xs]

    def run(carry: States) -> States:
        return follow_rows(few.body, all_.body, [*consts, *carry, *slices])

    carry, outputs = _fixed_point(pair, run, carry)
    return [*carry, *map(of_layers, outputs[len(carry) :])]


def in_layer(state: State, why: str) -> State:
    """The rows in one iteration of a scan over an array."""
    if isinstance(state, RowDim):
        if state.dim == 0:
            raise MixesRows(why)
        return state.at(state.dim - 1)
    return state


def of_layers(state: State) -> State:
    """The rows in the stacked results of a scan."""
    if isinstance(state, RowDim):
        return state.at(state.dim + 1)
    return state


def _fixed_point(
    pair: EquationPair, run: Callable[[States], States], carry: States
) -> tuple[States, States]:
    """The rows of a loop's carry after any number of iterations, and of the results of `run`."""
    while True:
        outputs = run(carry)
        iterations = zip(carry, outputs, strict=False)  # the results begin with the carry
        joined = [join_rows(pair, states) for states in iterations]
        if joined == carry:
            return carry, outputs
        carry = joined


def _while(pair: EquationPair, few: While, all_: While, inputs: States) -> States:
    cond_consts, body_consts, carry = few.split(inputs)

    def run(carry: States) -> States:
        return follow_rows(few.body, all_.body, [*body_consts, *carry])

    carry, _ = _fixed_point(pair, run, carry)
    (goes_on,) = follow_rows(few.cond, all_.cond, [*cond_consts, *carry])
    if goes_on is not None:
        raise MixesRows("`while` stops row by row")
    return carry


def _cond(pair: EquationPair, few: Cond, all_: Cond, inputs: States) -> States:
    index, *operands = inputs
    if index is not None:
        raise MixesRows("`cond` chooses a branch by rows")
    branches = zip(few.branches, all_.branches, strict=True)
    results = [follow_rows(branch, branch_of_all, operands) for branch, branch_of_all in branches]
    return [join_rows(pair, states) for states in zip(*results, strict=True)]
