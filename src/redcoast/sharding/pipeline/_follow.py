"""Follows the rows of a batch through a layer, and refuses a layer that mixes them.

The layer is traced with two numbers of rows, which shows the dimensions that count rows: their
sizes differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jax.extend.core import JaxprEqn, Literal

from ...core._control_flow import Call, control_flow, primitive_name
from ...core._markers import is_most
from ..operations import shape_of
from ..operations._rule import OPERAND_SIZES, RESULT_SIZES
from ..program._facts import Facts, Operation, follow_facts
from ..program._walk import Scope
from ._draws import RandomBits
from ._row_rules import (
    EquationPair,
    MixesRows,
    RowDim,
    RowState,
    RowStates,
    apply_rule,
    differing,
    join_rows,
)

# The numbers of these parameters are sizes, which follow from the number of rows. A name may hold
# them too.
_SIZES = RESULT_SIZES | OPERAND_SIZES | {"sizes", "name"}
# Random bits for rows, by the `id` of their equation; None where all rows have the same.
Bits = dict[int, RandomBits | None]


def follow_rows(
    few: Scope, all_: Scope, microbatch: Scope, rows: int, inputs: Sequence[RowState]
) -> tuple[RowStates, Bits]:
    """Where the rows of a layer's outputs are, given where its inputs have them.

    The layer is traced for few rows, for all `rows`, and for those of one microbatch. Also returns
    what the equations of a microbatch draw. Raises `MixesRows`.
    """
    walk = _RowWalk(rows)
    walk.pair(few, all_, microbatch)

    def of_branch(state: RowState, conditions: Sequence[RowState]) -> RowState:
        if any(condition is not None for condition in conditions):
            raise MixesRows("rows choose a branch, or end a loop")
        return state

    facts: Facts[RowState] = Facts(
        of_number=lambda _: None,  # all rows share a literal
        of_results=walk.rows_of_results,
        join=join_rows,
        control=of_branch,
        follows_ends=True,
    )
    return follow_facts(facts, few, inputs), walk.bits


@dataclass
class _RowWalk:
    """The walk through a layer. `others` has the jaxprs of all rows and of a microbatch, by that of
    few."""

    rows: int
    others: dict[Scope, tuple[Scope, Scope]] = field(default_factory=dict)
    bits: Bits = field(default_factory=dict)

    def pair(self, few: Scope, all_: Scope, microbatch: Scope) -> None:
        """Checks that jaxprs differ in sizes alone, and so do those inside them."""
        is_same = len(few.consts) == len(all_.consts)
        for constant, of_all in zip(few.consts, all_.consts, strict=False):
            # To compare arrays on devices would wait for them.
            if isinstance(constant, np.ndarray) and isinstance(of_all, np.ndarray):
                is_same &= np.array_equal(constant, of_all)
            else:
                is_same &= constant is of_all
        if not is_same:
            raise MixesRows("a constant depends on the number of rows")
        counts = {len(scope.jaxpr.eqns) for scope in (few, all_, microbatch)}
        if len(counts) > 1:
            raise MixesRows("its operations depend on the number of rows")
        self.others[few] = all_, microbatch
        equations = zip(few.jaxpr.eqns, all_.jaxpr.eqns, strict=True)
        for place, (of_few, of_all) in enumerate(equations):
            _check_same(of_few, of_all)
            inside = (scope.inner.get(place, ()) for scope in (few, all_, microbatch))
            for scopes in zip(*inside, strict=True):
                self.pair(*scopes)

    def rows_of_results(self, operation: Operation, inputs: Sequence[RowState]) -> RowStates:
        """Where the results of an operation have rows."""
        all_, microbatch = self.others[operation.scope]
        pair = EquationPair(operation.equation, all_.jaxpr.eqns[operation.place])
        if is_most(pair.few):
            return [None]  # each microbatch may take its own largest element
        for state, atom in zip(inputs, pair.few.invars, strict=True):
            if isinstance(state, RowDim) and -state.dim > len(shape_of(atom)):
                raise MixesRows("`scan` goes from row to row")
        dims = list(map(differing, pair.few.outvars, pair.all.outvars))
        if not any(inputs) and not any(dims):
            results: RowStates = [None] * len(dims)
        else:
            results = apply_rule(pair, inputs)
        for state, var, row_dims in zip(results, pair.few.outvars, dims, strict=True):
            expected = [state.place_in(var)] if isinstance(state, RowDim) else []
            if row_dims != expected:
                raise MixesRows(f"`{pair.name}` changes what its rows are")
        if pair.name == "random_bits":
            bits = self._bits_of_rows(operation, pair)
            equation = microbatch.jaxpr.eqns[operation.place]
            # A function that the layer calls twice has the same equations both times.
            if self.bits.setdefault(id(equation), bits) != bits:
                raise MixesRows(
                    "it draws random numbers of the same shape for rows and for something else"
                )
        return results

    def _bits_of_rows(self, operation: Operation, pair: EquationPair) -> RandomBits | None:
        """What an equation draws for rows; None if nothing, or if each row has a key."""
        dims = differing(pair.few.outvars[0], pair.all.outvars[0])
        if not dims or differing(pair.few.invars[0], pair.all.invars[0]):
            return None
        bits = RandomBits(dims[0], tuple(pair.all.params["shape"]))
        if bits.shape[bits.dim] != self.rows:
            raise MixesRows(
                "it draws random numbers along a dimension that joins rows with another"
            )
        outer = operation.outer
        while outer is not None:
            flow = control_flow(outer.equation)
            if isinstance(flow, Call) and flow.has_derivative:
                raise MixesRows(
                    "it draws random numbers for rows in a function with a custom derivative"
                )
            outer = outer.outer
        return bits


def _check_same(few: JaxprEqn, all_: JaxprEqn) -> None:
    """Checks that the two equations differ in sizes alone."""
    name = primitive_name(few)
    if few.primitive is not all_.primitive or len(few.invars) != len(all_.invars):
        raise MixesRows("its operations depend on the number of rows")
    for operand, operand_of_all in zip(few.invars, all_.invars, strict=True):
        if isinstance(operand, Literal) and isinstance(operand_of_all, Literal):
            number = np.asarray(operand.val)
            has_nan = np.issubdtype(number.dtype, np.inexact)
            if not np.array_equal(number, np.asarray(operand_of_all.val), equal_nan=has_nan):
                raise MixesRows(
                    f"a number in `{name}` depends on the number of rows, as in a mean over "
                    "them. Layers may return sums, which are divided after all layers"
                )
        elif isinstance(operand, Literal) or isinstance(operand_of_all, Literal):
            raise MixesRows("its operations depend on the number of rows")
    for key, value in few.params.items():
        if key in _SIZES or not isinstance(value, bool | int | float | str | tuple):
            continue
        if _plain_values(value) != _plain_values(all_.params.get(key)):
            raise MixesRows(f"the `{key}` of `{name}` depends on the number of rows")


def _plain_values(value: object) -> object:
    """The numbers and names in a parameter, without jaxprs and functions."""
    if isinstance(value, tuple):
        return tuple(map(_plain_values, value))
    if isinstance(value, bool | int | float | str):
        return value
    return None
