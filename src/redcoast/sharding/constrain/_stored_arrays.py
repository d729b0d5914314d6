"""The arrays of the model while a jaxpr is evaluated, which are as they are stored until used.

Where an equation uses an array of the model, it is constrained to the sharding that the program
computes with: an FSDP-sharded one is gathered there. Loops and calls get arrays as they are stored,
and gather them inside. Three kinds of results are stored in turn, so that less is gathered at once
or fewer bytes: layers of a stack, an array that is cast to a narrower dtype, and an operand that a
call returns as it is.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Literal, Var
from jax.sharding import PartitionSpec as P

from ...core._control_flow import primitive_name
from ...core._jaxpr import bind_again
from ..operations import Atom, shape_of
from ..operations._elementwise_rules import ELEMENTWISE
from ..operations._rule_table import VIEWS
from ..program._program import LARGE_CONSTANT
from ..program._trace import Arrays
from ..program._walk import Scope
from ._bound_equation import values_of
from ._shardings import Shardings

_CHANGING = ELEMENTWISE | VIEWS | {"transpose"}


@dataclass
class StoredArrays:
    """The arrays of the model in a jaxpr that is evaluated.

    - `env`: the values of all variables.
    - `stored`: the variables that are as they are stored.
    - `specs`: those by which arrays are FSDP-sharded, if known.
    - `gathered`: the variables that were stored, and have a constraint now.
    - `for_lookups`: arrays with another constraint, for lookups alone.
    """

    scope: Scope
    shardings: Shardings
    env: dict[Var, Any]
    stored: set[Var]
    specs: dict[Atom, P | None]
    gathered: set[Atom] = field(default_factory=set)
    for_lookups: dict[Atom, jax.Array] = field(default_factory=dict)

    def are_stored(self, atoms: Sequence[Atom]) -> list[bool]:
        """Which variables are as they are stored."""
        return [not isinstance(atom, Literal) and atom in self.stored for atom in atoms]

    def specs_of(self, atoms: Sequence[Atom]) -> list[P | None]:
        """The specs by which those that are stored are FSDP-sharded."""
        specs: list[P | None] = []
        for atom, is_stored in zip(atoms, self.are_stored(atoms), strict=True):
            spec = None
            if is_stored:
                spec = self.specs.get(atom)
            specs.append(spec)
        return specs

    def gather(self, atom: Atom, x: object) -> object:
        """An operand `x` of an equation that uses it, with a constraint if it was stored."""
        if isinstance(atom, Literal):
            return x
        if atom in self.stored:
            # Later uses share the constraint: XLA gathers the array once for all of them.
            self.env[atom] = self._constrained(atom)
            self.stored.discard(atom)
            self.gathered.add(atom)
        return self.env[atom]

    def gather_all(self, equation: JaxprEqn, operands: Arrays) -> Arrays:
        """The operands of an operation, which uses all of them."""
        if equation.primitive.name == "gather":
            table, *indices = equation.invars
            looked_up = self._gather_for_lookups(table, operands[0])
            return [looked_up, *map(self.gather, indices, operands[1:])]
        operands = list(map(self.gather, equation.invars, operands))
        if self._changes_gathered(equation):
            # Lookups in what is cast, scaled or reshaped have a constraint of their own too.
            self.gathered.update(equation.outvars)
        return operands

    def _changes_gathered(self, equation: JaxprEqn) -> bool:
        """Whether an equation casts, scales or rearranges arrays that were gathered."""
        arrays = [atom for atom in equation.invars if shape_of(atom)]
        if primitive_name(equation) not in _CHANGING or not arrays:
            return False
        return all(not isinstance(atom, Literal) and atom in self.gathered for atom in arrays)

    def _gather_for_lookups(self, table: Atom, x: object) -> object:
        """An array with a constraint of its own for lookups.

        XLA joins the cotangents of the lookups and of the products of a tied embedding to one
        scatter, for which it sums those of the products over devices first. With the constraint
        between them, it adds both on each device, and sums over devices once.
        """
        if isinstance(table, Literal) or not (table in self.stored or table in self.gathered):
            return x
        if table not in self.for_lookups:
            self.for_lookups[table] = self._constrained(table)
        return self.for_lookups[table]

    def _constrained(self, atom: Var) -> jax.Array:
        value, spec = self.scope.values[atom], self.specs.get(atom)
        return self.shardings.constrain(self.env[atom], value, spec)

    def takes_layers(self, equation: JaxprEqn) -> bool:
        """Whether an equation casts or scales a stack of layers, or takes some of them."""
        is_stored = self.are_stored(equation.invars)
        for atom, is_array in zip(equation.invars, is_stored, strict=True):
            if not is_array and shape_of(atom):  # neither the stack nor a number
                return False
        return sum(is_stored) == 1 and _keeps_layers(equation, self.scope, self.shardings)

    def add_layers(self, equation: JaxprEqn) -> None:
        """Records that the result of an equation is stored, as layers of its operand."""
        (stack,) = itertools.compress(equation.invars, self.are_stored(equation.invars))
        (layers,) = equation.outvars
        self.stored.add(layers)
        spec = self.specs.get(stack)
        self.specs[layers] = spec_of_layers(spec, len(shape_of(stack)), len(shape_of(layers)))

    def is_cast(self, equation: JaxprEqn) -> bool:
        """Whether an equation casts an FSDP-sharded array to a narrower dtype."""
        specs = self.specs_of(equation.invars)
        return specs != [None] * len(specs) and self._narrows(equation)

    def cast(self, equation: JaxprEqn, operands: Arrays) -> jax.Array:
        """The array that is cast, which is stored: it is gathered and reduce-scattered."""
        spec = self.specs[equation.invars[0]]
        assert spec is not None
        self.stored.update(equation.outvars)
        self.specs[equation.outvars[0]] = spec
        return self.shardings.with_spec(bind_again(equation, operands)[0], spec)

    def _narrows(self, equation: JaxprEqn) -> bool:
        """Whether an equation casts an array to a dtype of at most as many bytes."""
        if primitive_name(equation) != "convert_element_type":
            return False
        (before,) = values_of(self.scope, equation.invars)
        (after,) = values_of(self.scope, equation.outvars)
        return after.bytes <= before.bytes

    def add_returned(self, equation: JaxprEqn, called: Scope) -> None:
        """Records the results of a call that are operands which are stored."""
        is_stored = self.are_stored(equation.invars)
        operands = set(itertools.compress(called.jaxpr.invars, is_stored))
        for var, atom in zip(equation.outvars, called.jaxpr.outvars, strict=True):
            if not isinstance(atom, Literal) and atom in operands:
                self.stored.add(var)


def stored_variables(scope: Scope, shardings: Shardings, stored: Sequence[bool]) -> set[Var]:
    """The inputs and large constants of a jaxpr that are arrays as they are stored."""
    # `stored` may be shorter than the inputs: the others are not.
    variables = set(itertools.compress(scope.jaxpr.invars, stored))
    for var in scope.jaxpr.constvars:
        value = scope.values[var]
        if value.bytes >= LARGE_CONSTANT and any(shardings.spec(value)):
            variables.add(var)
    return variables


def _keeps_layers(equation: JaxprEqn, scope: Scope, shardings: Shardings) -> bool:
    """Whether the result of an equation is a stack of layers that its operand is, or some of it."""
    results = values_of(scope, equation.outvars)
    operands = [value for value in map(scope.value_of, equation.invars) if value and value.shape]
    if len(operands) != 1 or len(results) != 1:
        return False
    (operand,), (result,) = operands, results
    params, layer = equation.params, operand.shape[1:]
    match primitive_name(equation):
        case "squeeze":
            return operand.shape[0] == 1 and params["dimensions"] == (0,)
        case "slice":
            divides = result.shape[1:] == layer
        case "reshape":
            divides = result.shape[len(result.shape) - len(layer) :] == layer
        case name:
            divides = name in ELEMENTWISE and result.shape == operand.shape
    return divides and operand.nodes[0] in shardings.stacks


def spec_of_layers(spec: P | None, rank: int, new_rank: int) -> P | None:
    """The spec of a layer, or of another stack, that is taken from a stack of layers."""
    if spec is None or any(spec[:1]):
        return None
    # A spec may be shorter than the rank: dimensions that it lacks are not sharded.
    layer = [*spec[1:], *[None] * (rank - max(1, len(spec)))]
    return P(*[None] * (new_rank - len(layer)), *layer)
