"""Rewrites lookups and writes that index rows by `jnp.arange` as batched ones.

`x[jnp.arange(len(x)), labels]` looks up one element in each row, as `jax.vmap` of a lookup does.
XLA does not infer that each device needs its own rows only: it gathers what is written into rows,
and sums what is read from them. With batching dimensions, it communicates nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from operator import index
from typing import SupportsIndex

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jaxtyping import PyTree

from ...core._control_flow import (
    AnyJaxpr,
    close_jaxpr,
    consts_of,
    open_jaxpr,
    replace_parameters,
)
from ...core._jaxpr import struct_of
from ..operations import Atom, shape_of


def batch_own_rows(program: AnyJaxpr) -> AnyJaxpr:
    """A program in which such lookups and writes are batched; without any, the program itself."""
    return _rewrite(program, {})


def _rewrite(program: AnyJaxpr, results: dict[int, AnyJaxpr]) -> AnyJaxpr:
    """`results` has those of other jaxprs by their `id`, as several equations may run the same."""
    if id(program) in results:
        return results[id(program)]
    jaxpr = open_jaxpr(program)
    known = _Known()
    for var, x in zip(jaxpr.constvars, consts_of(program), strict=False):
        known.add_constant(var, x)
    equations: list[JaxprEqn] = []
    is_changed = False
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "gather" or name.startswith("scatter"):
            rewritten = _batched(equation, known)
        elif name == "pallas_call":
            rewritten = [equation]  # a kernel has no batches
        else:
            rewritten = [_rewrite_inside(equation, results)]
            known.add_result(equation)
        is_changed |= rewritten[-1] is not equation
        equations += rewritten
    result = program
    if is_changed:
        result = jaxpr.replace(eqns=equations)
        if not isinstance(program, Jaxpr):
            result = close_jaxpr(result, consts_of(program))
    results[id(program)] = result
    return result


def _rewrite_inside(equation: JaxprEqn, results: dict[int, AnyJaxpr]) -> JaxprEqn:
    """An equation with the jaxprs that it runs rewritten."""
    is_changed = False

    def replace(param: PyTree) -> PyTree:
        nonlocal is_changed
        if type(param) is tuple:
            return tuple(map(replace, param))
        if not isinstance(param, AnyJaxpr):
            return param
        result = _rewrite(param, results)
        is_changed |= result is not param
        return result

    replaced = replace_parameters(equation, replace)
    if is_changed:
        return replaced
    return equation


@dataclass(frozen=True)
class _Known:
    """What is known of the arrays of a jaxpr.

    `counted` has the dimension along which the elements of an array are their own places. Arrays in
    `never` are false everywhere, and `joins` has the equations of concatenations.
    """

    counted: dict[Var, int] = field(default_factory=dict)
    never: set[Var] = field(default_factory=set)
    joins: dict[Var, JaxprEqn] = field(default_factory=dict)

    def add_constant(self, var: Var, x: object) -> None:
        if not isinstance(x, np.ndarray) or x.size < 2:
            return
        if x.dtype == bool and not x.any():
            self.never.add(var)
        if x.dtype.kind not in "iu":
            return
        for d, places in enumerate(np.indices(x.shape, sparse=True)):
            if np.array_equal(x, np.broadcast_to(places, x.shape)):
                self.counted[var] = d

    def add_result(self, equation: JaxprEqn) -> None:
        """Adds what follows from an equation of those that `jnp.arange` and indexing consist of."""
        name, params = equation.primitive.name, equation.params
        if name == "iota":
            self._add(equation.outvars[0], index(params["dimension"]))
        elif name == "concatenate":
            self.joins[equation.outvars[0]] = equation
        elif params.get("dimensions") is not None:
            return  # a reshape that also transposes
        elif name in ("broadcast_in_dim", "convert_element_type", "reshape"):
            targets = params.get("broadcast_dimensions")
            self._add_counted(equation.invars[0], equation.outvars[0], targets)
        elif name == "lt":
            # Numbers below zero would count from the end.
            numbers, bound = equation.invars
            if self.dim(numbers) is not None and isinstance(bound, Literal) and bound.val == 0:
                self.never.add(equation.outvars[0])
        elif name == "select_n":
            which, first, *_ = equation.invars
            if not isinstance(which, Literal) and which in self.never:
                self._add_counted(first, equation.outvars[0])

    def dim(self, atom: Atom) -> int | None:
        """The dimension along which an array counts; None for others."""
        if isinstance(atom, Literal):
            return None
        return self.counted.get(atom)

    def _add_counted(
        self, atom: Atom, result: Var, targets: Sequence[SupportsIndex] | None = None
    ) -> None:
        """Adds a result with the elements of an array, whose dimensions are its `targets`."""
        d, before, after = self.dim(atom), shape_of(atom), shape_of(result)
        if d is None:
            return
        size = before[d]
        if targets is not None:
            d = index(targets[d])
        elif before != after and size == prod(before) and size in after:
            d = after.index(size)  # dimensions of one element are added or removed
        elif before != after:
            return
        if after[d] == size:
            self._add(result, d)

    def _add(self, result: Var, d: int) -> None:
        struct = struct_of(result)
        is_integer = jnp.issubdtype(struct.dtype, jnp.integer)
        # In other dtypes, large numbers wrap around or are rounded.
        if is_integer and struct.shape[d] - 1 <= jnp.iinfo(struct.dtype).max:
            self.counted[result] = d


def _batched(equation: JaxprEqn, known: _Known) -> list[JaxprEqn]:
    """A lookup or a write as a batch along the rows that are addressed by their own numbers.

    The last dimension of its indices has a coordinate for each dimension that is indexed.
    """
    operand, indices, *updates = equation.invars
    if isinstance(indices, Literal) or indices not in known.joins:
        return [equation]
    join, numbers = known.joins[indices], equation.params["dimension_numbers"]
    # In this order for lookups and for writes.
    windows, removed, indexed, batched, batched_of_indices = numbers
    coordinates = len(shape_of(indices)) - 1  # their dimension
    is_of_coordinates = index(join.params["dimension"]) == coordinates
    if not is_of_coordinates or any(shape_of(part)[-1] != 1 for part in join.invars):
        return [equation]
    if len(join.invars) != len(indexed):
        return [equation]
    # The dimensions of the operand and of the indices that count the same rows.
    rows = dict(zip(batched, batched_of_indices, strict=True))
    others: dict[int, Atom] = {}
    for d, part in zip(map(index, indexed), join.invars, strict=True):
        along = known.dim(part)
        is_free = along not in (coordinates, *rows.values()) and d in removed
        if along is not None and is_free and shape_of(part)[along] == shape_of(operand)[d]:
            rows[d] = along
        else:
            others[d] = part
    if len(rows) == len(batched) or not others:
        return [equation]
    joined: list[JaxprEqn] = []
    if len(others) == 1:
        (indices,) = others.values()
    else:
        shape = (*shape_of(indices)[:-1], len(others))
        indices = Var(indices.aval.update(shape=shape))
        joined = [join.replace(invars=list(others.values()), outvars=[indices])]
    params = equation.params | {
        "dimension_numbers": type(numbers)(
            windows,
            tuple(d for d in removed if d not in rows),
            tuple(others),
            tuple(sorted(rows)),
            tuple(map(rows.__getitem__, sorted(rows))),
        ),
        "indices_are_sorted": False,
    }
    return [*joined, equation.replace(invars=[operand, indices, *updates], params=params)]
