"""Lookups at constant indices, and products with constant matrices, of which an element depends on
few others: an interpolation, as by `jax.image.resize`, or the neighbours of each element."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from ...core._control_flow import primitive_name
from ...core._jaxpr import bind_again, evaluate_equations, variables
from ..operations import Atom, shape_of

# Larger constants are not computed for a plan.
_MOST_ELEMENTS = 2**24

Extents = tuple[np.ndarray, np.ndarray]  # the first and the last elements, (results,)


@dataclass(frozen=True)
class Interpolation:
    """Each element of the result along a dimension depends on elements along one of an operand.

    The operand at `place` has `size` elements along `dim`, of which `extents` returns the first and
    the last one that each element of the result depends on. `targets` are the dimensions of the
    result, by that of the operand. A product with a matrix sums over its dimension `summed`.
    """

    place: int
    dim: int
    size: int
    targets: Sequence[int]
    extents: Callable[[], Extents | None]
    summed: int = 0

    def halo(self, count: int) -> tuple[int, int] | None:
        """How many elements each of `count` parts needs of the parts before and after it.

        None if that is not less than all.
        """
        extents = self.extents()
        if extents is None:
            return None
        first, last = extents
        own, own_results = -(-self.size // count), -(-len(first) // count)
        before = after = 0
        for part in range(count):
            results = slice(part * own_results, (part + 1) * own_results)
            if first[results].size:
                before = max(before, part * own - int(first[results].min()))
                after = max(after, int(last[results].max()) - (part + 1) * own + 1)
        if before + after >= (count - 1) * own:
            return None
        return before, after


class Constants:
    """The variables of a jaxpr that depend on none of its inputs."""

    def __init__(self, jaxpr: Jaxpr, consts: Sequence[object]):
        self._values: dict[Var, Any] = {}
        for var, x in zip(jaxpr.constvars, consts, strict=True):
            if not isinstance(x, Tracer):
                self._values[var] = x
        self._equations: list[JaxprEqn] = []
        self._vars = set(self._values)
        for equation in jaxpr.eqns:
            if not equation.effects and self._vars.issuperset(variables(equation.invars)):
                self._equations.append(equation)
                self._vars.update(equation.outvars)
        self._interpolations: dict[int, Interpolation | None] = {}  # by the `id` of an equation

    def __contains__(self, atom: Atom) -> bool:
        return isinstance(atom, Literal) or atom in self._vars

    def interpolation(self, equation: JaxprEqn) -> Interpolation | None:
        """What an equation interpolates; None for others."""
        key = id(equation)
        if key not in self._interpolations:
            self._interpolations[key] = None
            match primitive_name(equation):
                case "gather":
                    self._interpolations[key] = self._lookup(equation)
                case "dot_general":
                    self._interpolations[key] = self._product(equation)
        return self._interpolations[key]

    def _lookup(self, equation: JaxprEqn) -> Interpolation | None:
        dim = looked_up(equation)
        operand, indices = equation.invars
        if dim is None or indices not in self:
            return None
        rank, size = len(shape_of(operand)), shape_of(operand)[dim]
        added = len(shape_of(indices)) - 2  # dimensions of the result
        targets = [d + added * (d > dim) for d in range(rank)]

        @cache
        def extents() -> Extents | None:
            places = self._value(indices)  # (results, ..., 1)
            if places is None or places.min() < 0 or places.max() >= size:
                return None
            places = places.reshape(len(places), -1)
            return places.min(1), places.max(1)

        return Interpolation(0, dim, size, targets, extents)

    def _product(self, equation: JaxprEqn) -> Interpolation | None:
        contracting, batch = equation.params["dimension_numbers"]
        matrices = [side for side in (0, 1) if equation.invars[side] in self]
        if len(matrices) != 1 or len(contracting[0]) != 1 or batch[0]:
            return None
        (side,) = matrices
        matrix, operand = equation.invars[side], equation.invars[1 - side]
        (summed,), (dim,) = contracting[side], contracting[1 - side]
        if len(shape_of(matrix)) != 2 or 0 in shape_of(matrix):
            return None
        rank, size = len(shape_of(operand)), shape_of(operand)[dim]
        # The result has the kept dimension of the matrix before or after the operand's.
        targets = [d - (d > dim) + (side == 0) for d in range(rank)]
        targets[dim] = 0 if side == 0 else rank - 1

        @cache
        def extents() -> Extents | None:
            weights = self._value(matrix)
            if weights is None:
                return None
            is_used = np.moveaxis(weights, summed, -1) != 0  # (results, elements)
            first, last = is_used.argmax(1), size - 1 - is_used[:, ::-1].argmax(1)
            # What depends on no element may be anywhere.
            anywhere = np.arange(len(first)) * size // len(first)
            is_zero = ~is_used.any(1)
            return np.where(is_zero, anywhere, first), np.where(is_zero, anywhere, last)

        return Interpolation(1 - side, dim, size, targets, extents, summed)

    def _value(self, atom: Atom) -> np.ndarray | None:
        """The value of a constant, unless it takes much memory to compute it."""
        if isinstance(atom, Literal):
            return np.asarray(atom.val)
        needed: set[Var] = {atom}
        equations: list[JaxprEqn] = []
        for equation in reversed(self._equations):
            if not needed.isdisjoint(equation.outvars):
                equations.insert(0, equation)
                needed.update(variables(equation.invars))
        elements = sum(prod(shape_of(var)) for var in needed)
        if elements > _MOST_ELEMENTS:
            return None

        def handle(index: int, equation: JaxprEqn, operands: list[Any]) -> list[Any]:
            return bind_again(equation, operands)

        def compute() -> Any:
            env = {var: self._values[var] for var in needed & self._values.keys()}
            return evaluate_equations(equations, [atom], env, handle)[0]

        with jax.ensure_compile_time_eval():
            return np.asarray(jax.jit(compute)())


def looked_up(equation: JaxprEqn) -> int | None:
    """The only dimension that a `gather` looks up along, as `jnp.take` does; None for others."""
    numbers, sizes = equation.params["dimension_numbers"], list(equation.params["slice_sizes"])
    operand, indices, result = map(shape_of, (*equation.invars, *equation.outvars))
    if len(numbers.start_index_map) != 1 or numbers.operand_batching_dims:
        return None
    (dim,) = numbers.start_index_map
    if tuple(numbers.collapsed_slice_dims) != (dim,) or len(indices) < 2:
        return None
    whole = [*operand]
    whole[dim] = 1
    along = range(dim, dim + len(indices) - 1)
    others = [d for d in range(len(result)) if d not in along]
    if sizes != whole or list(numbers.offset_dims) != others:
        return None
    return int(dim)
