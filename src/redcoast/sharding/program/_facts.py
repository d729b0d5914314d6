"""Data-flow analyses: facts about the arrays of a program, from its inputs to its outputs.

A fact is anything that is known of a result from its operands, such as whether an array depends on
the model. This is the walk through loops, branches and calls for all of them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from ...core._control_flow import Cond, Scan, While, control_flow
from ...core._jaxpr import variables
from ...core._program_lines import line_of
from ..operations import Atom, Factor, Rule
from ._graph import Source, Value
from ._walk import Scope

Fact = TypeVar("Fact")


@dataclass(frozen=True)
class Operation:
    """An equation, the program that it is in, and the call, loop or branch around that program."""

    scope: Scope
    place: int  # of the equation in the program
    outer: "Operation | None" = None

    @property
    def equation(self) -> JaxprEqn:
        return self.scope.jaxpr.eqns[self.place]

    @property
    def source(self) -> Source:
        if self.outer is None:
            return (self.equation,)
        return (*self.outer.source, self.equation)

    @property
    def name(self) -> str:
        return self.equation.primitive.name

    @property
    def rule(self) -> Rule | None:
        return self.scope.rules[self.place]

    @property
    def result(self) -> Value:
        return self.scope.values[self.equation.outvars[0]]

    @property
    def operands(self) -> list[Value | None]:
        """The values of the operands; None for literals."""
        return list(map(self.scope.value_of, self.equation.invars))

    def along(self, has: Callable[[int], bool], factors: frozenset[Factor]) -> bool:
        """Whether one of the factors is a dimension of an operand whose node is one that `has`."""
        if self.rule is None:
            return False
        for value, dimensions in zip(self.operands, self.rule.operands, strict=True):
            if value is None:
                continue
            for node, dimension in zip(value.nodes, dimensions, strict=True):
                if dimension[0] in factors and has(node):
                    return True
        return False

    def producer(self, atom: Atom) -> JaxprEqn | None:
        """The equation of the same program that an operand is a result of."""
        for equation in reversed(self.scope.jaxpr.eqns[: self.place]):
            if atom in equation.outvars:
                return equation
        return None

    def line(self) -> str:
        """The line of the user's code, such as `train.py:12`.

        A compiled function of a library has none, and the line of its call is returned.
        """
        line = line_of(self.equation)
        if not line and self.outer is not None:
            return self.outer.line()
        return line


@dataclass(frozen=True)
class Facts(Generic[Fact]):
    """How facts follow from each other.

    - `of_number`: the fact of a literal or a constant, from its value.
    - `of_results`: the facts of the results of an operation, from those of its operands.
    - `join`: the fact of an array that comes from one of several branches.
    - `widen`: the fact of a loop's carry, from its facts before and after an iteration; by default
        that of an array that is one or the other.
    - `control`: the fact of a result, from itself and the facts of what a branch is chosen by, or a
        loop ends by.
    - `follows_ends`: whether what a loop ends by is its condition, which is followed, and not only
        what that closes over.
    """

    of_number: Callable[[object], Fact]
    of_results: Callable[[Operation, Sequence[Fact]], Sequence[Fact]]
    join: Callable[[Sequence[Fact]], Fact]
    widen: Callable[[Fact, Fact], Fact] | None = None
    control: Callable[[Fact, Sequence[Fact]], Fact] = lambda fact, _: fact
    follows_ends: bool = False

    def carried(self, before: Fact, after: Fact) -> Fact:
        """The fact of a loop's carry."""
        if self.widen is None:
            return self.join([before, after])
        return self.widen(before, after)


def alike(
    of_results: Callable[[Operation, Sequence[Fact]], Fact],
) -> Callable[[Operation, Sequence[Fact]], Sequence[Fact]]:
    """A function for `Facts.of_results` by which all results of an operation have the same fact."""
    return lambda operation, facts: [of_results(operation, facts)] * len(operation.equation.outvars)


def follow_facts(
    facts: Facts[Fact],
    scope: Scope,
    inputs: Sequence[Fact],
    *,
    needed: Sequence[Atom] | None = None,
    outer: Operation | None = None,
) -> list[Fact]:
    """Returns the facts of a program's results; what they do not depend on is left out.

    `needed` are the variables whose facts are asked for, by default the results.
    """
    jaxpr = scope.jaxpr
    # What the jaxpr closes over is known by its value.
    fact_of: dict[Var, Fact] = dict(zip(jaxpr.invars, inputs, strict=True))
    for var, constant in zip(jaxpr.constvars, scope.consts, strict=False):
        fact_of[var] = facts.of_number(constant)

    def read(atom: Atom) -> Fact:
        if isinstance(atom, Literal):
            return facts.of_number(atom.val)
        if atom not in fact_of:  # what is not needed is not followed
            return facts.of_number(None)
        return fact_of[atom]

    if needed is None:
        needed = jaxpr.outvars
    for place in _used(jaxpr, needed):
        equation = jaxpr.eqns[place]
        operation = Operation(scope, place, outer)
        operands = list(map(read, equation.invars))
        if place in scope.inner:
            results = _follow_inner(facts, operation, scope.inner[place], operands)
        else:
            results = facts.of_results(operation, operands)
        fact_of.update(zip(equation.outvars, results, strict=True))
    return list(map(read, jaxpr.outvars))


def _used(jaxpr: Jaxpr, needed: Sequence[Atom]) -> list[int]:
    """The places of the equations that the needed results depend on."""
    read, used = set(variables(needed)), []
    # Backwards, since later equations read what an equation results in.
    for place, equation in reversed(list(enumerate(jaxpr.eqns))):
        if not read.isdisjoint(equation.outvars):
            used.append(place)
            read.update(variables(equation.invars))
    return used[::-1]


def _follow_inner(
    facts: Facts[Fact], operation: Operation, inner: Sequence[Scope], operands: Sequence[Fact]
) -> list[Fact]:
    """The facts of the results of a loop, a branch or a call."""

    def run(scope: Scope, inputs: Sequence[Fact]) -> list[Fact]:
        return follow_facts(facts, scope, inputs, outer=operation)

    def loop(
        body: Scope, consts: Sequence[Fact], carry: Sequence[Fact], xs: Sequence[Fact]
    ) -> tuple[list[Fact], list[Fact]]:
        """The facts of the carry after any number of iterations, and of the results of one more."""
        # A carried value may depend on the results of earlier iterations. Facts that are joined
        # only grow, so that this ends.
        while True:
            results = run(body, [*consts, *carry, *xs])
            carried = list(map(facts.carried, carry, results))
            if carried == list(carry):
                return carried, results
            carry = carried

    def control(results: Iterable[Fact], conditions: Sequence[Fact]) -> list[Fact]:
        return [facts.control(fact, conditions) for fact in results]

    match control_flow(operation.equation):
        case Cond():
            # Whichever runs: the facts of all branches are joined.
            branches = [run(scope, operands[1:]) for scope in inner]
            return control(map(facts.join, zip(*branches, strict=True)), operands[:1])
        case Scan() as scan:
            _, results = loop(inner[0], *scan.split(operands))
            return results
        case While() as while_loop:
            condition, consts, carry = while_loop.split(operands)
            carried, results = loop(inner[1], consts, carry, [])
            if facts.follows_ends:
                condition = run(inner[0], [*condition, *carried])
            return control(results, condition)
    return run(inner[0], operands)
