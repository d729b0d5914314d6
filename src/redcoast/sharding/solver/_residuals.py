"""What JAX keeps of an operation for its derivative, which a loop stacks over its iterations.

Outside of loops, XLA computes again what it can fuse. What a loop stacks, it does not change: of
`tanh`, these are the result and one minus the result.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import compress
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from ...core._control_flow import Call, CallKind, control_flow
from ...core._jaxpr import as_traced, bind_again, struct_of, variables
from ..operations import Atom, fixed_operands, is_linear
from ..program._graph import Value
from ..program._walk import Scope


@dataclass(frozen=True)
class Residuals:
    """The operands and results that are kept, and the sizes of other arrays.

    A size is that of an array divided by the size of a value of the same shape, and this value.
    """

    atoms: Sequence[Atom]
    others: Sequence[tuple[float, Atom]] = ()

    def sizes(self, scope: Scope, size_of: Callable[[Value], int | float]) -> list[float]:
        """The bytes on each device of what is neither operand nor result."""
        return [ratio * size_of(scope.values[var]) for ratio, var in self.others]


# By the index of an equation, and by the operands that it is differentiated by.
_OfJaxpr = dict[tuple[int, tuple[bool, ...]], Residuals]
_known: WeakKeyDictionary[Jaxpr, _OfJaxpr] = WeakKeyDictionary()


def residuals_in(scope: Scope, index: int) -> Residuals | None:
    """What is kept of an equation for its derivative; None where that is not known."""
    equation, rule = scope.jaxpr.eqns[index], scope.rules.get(index)
    varied = tuple(map(scope.varies, equation.invars))
    if rule is not None and is_linear(rule, varied):
        return Residuals(list(compress(equation.invars, fixed_operands(rule, varied))))
    flow = control_flow(equation)
    if isinstance(flow, Call) and flow.kind is CallKind.CUSTOM_JVP:
        rule = flow
    if rule is None:
        return None
    known = _known.setdefault(scope.jaxpr, {})
    key = index, varied
    if key not in known:
        known[key] = _find_residuals(equation, varied)
    return known[key]


@cache
def branches_return_operands() -> bool:
    """Whether branches return what their derivatives need of their operands.

    They do before JAX 0.12. Later versions read the operands themselves.
    """
    square = lambda x: x * x
    derivative = lambda x: jax.vjp(lambda x: jax.lax.cond(True, square, square, x), x)[1]
    jaxpr = jax.make_jaxpr(derivative)(jax.ShapeDtypeStruct((), jnp.float32)).jaxpr
    return jaxpr.invars[0] not in jaxpr.outvars


def _find_residuals(equation: JaxprEqn, varied: Sequence[bool]) -> Residuals:
    inputs = list(dict.fromkeys(variables(equation.invars)))

    def differentiate(*arrays: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        values = dict(zip(inputs, arrays, strict=True))
        fixed: list[object] = []
        for atom in equation.invars:
            if isinstance(atom, Literal):
                fixed.append(as_traced(atom.val, atom))
            else:
                fixed.append(values[atom])
        places = list(compress(range(len(fixed)), varied))

        def run(*changed: object) -> list[jax.Array]:
            operands = list(fixed)
            for place, operand in zip(places, changed, strict=True):
                operands[place] = operand
            return bind_again(equation, operands)

        results, derivative = jax.vjp(run, *map(fixed.__getitem__, places))
        return results, jax.tree.leaves(derivative)

    jaxpr = jax.make_jaxpr(differentiate)(*map(struct_of, inputs)).jaxpr
    count = len(equation.outvars)
    own = dict(zip(jaxpr.invars, inputs, strict=True))
    own.update(zip(variables(jaxpr.outvars[:count]), variables(equation.outvars), strict=False))
    # What no operand decides is the same in all iterations.
    decided: set[Var] = set()
    for inner in jaxpr.eqns:
        if variables(inner.invars):
            decided.update(inner.outvars)
    atoms: list[Atom] = []
    others: list[tuple[float, Atom]] = []
    for var in dict.fromkeys(variables(jaxpr.outvars[count:])):
        if var in own:
            atoms.append(own[var])
        elif var in decided:
            like = _of_shape(equation, struct_of(var).shape)
            if like is not None:
                ratio = struct_of(var).dtype.itemsize / struct_of(like).dtype.itemsize
                others.append((ratio, like))
    return Residuals(atoms, others)


def _of_shape(equation: JaxprEqn, shape: tuple[int, ...]) -> Atom | None:
    """A result or an operand of this shape; None for small arrays, such as a maximum's count."""
    for var in variables((*equation.outvars, *equation.invars)):
        if struct_of(var).shape == shape:
            return var
    return None
