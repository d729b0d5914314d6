"""The jaxprs that run while memory is estimated, with the buffers of their values."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from jax.extend.core import JaxprEqn, Literal

from ...core._control_flow import Call, CallKind, Cond, Scan, While, control_flow
from ..operations import Atom, Rule
from ..program._graph import Source, Value
from ..program._walk import Scope
from ._buffers import Peak, Roots, WrittenBytes, argument, union
from ._memory_access import uses_memory

# The buffers of a cotangent; None where it is zero.
Cotangent = Roots | None


@dataclass(frozen=True)
class IterationPeaks:
    """The peaks in an iteration of a loop, and what each iteration keeps for its derivative.

    `needed` are the constants that the derivative reads. A branch is an iteration.
    """

    forward: Peak
    backward: Peak
    saved: tuple[WrittenBytes, ...] = ()
    needed: tuple[bool, ...] = ()


@dataclass
class PeakFrame:
    """A jaxpr that runs, with the buffers of its values.

    `source` are the equations around it. By the index of an equation, `inner` has the frames of the
    jaxprs that it runs, `loops` what a loop keeps and when it began, `copies` what it copies of its
    operands, and `begins` when it first ran. `gathered` are operands of products, gathered from
    parts of the sequence, `stacked` what a loop keeps of a value for each iteration, and
    `recomputed` what a value is computed from again that it does not keep.
    """

    scope: Scope
    source: Source
    roots: dict[Atom, Roots] = field(default_factory=dict)
    inner: dict[int, "list[PeakFrame]"] = field(default_factory=dict)
    loops: dict[int, tuple[IterationPeaks, int]] = field(default_factory=dict)
    copies: dict[int, Roots] = field(default_factory=dict)
    begins: dict[int, int] = field(default_factory=dict)
    gathered: dict[Atom, Roots] = field(default_factory=dict)
    stacked: dict[Atom, Roots] = field(default_factory=dict)
    recomputed: dict[Atom, Roots] = field(default_factory=dict)

    @cached_property
    def padded(self) -> frozenset[Atom]:
        """The results of `pad`."""
        padded: set[Atom] = set()
        for equation in self.scope.jaxpr.eqns:
            if equation.primitive.name == "pad":
                padded.update(equation.outvars)
        return frozenset(padded)

    def of(self, atom: Atom) -> Roots:
        """The buffers of a variable; a literal has none."""
        if isinstance(atom, Literal):
            return ()
        return self.roots.get(atom, ())

    def of_all(self, atoms: Iterable[Atom]) -> Roots:
        return union(map(self.of, atoms))

    def add_arguments(self, atoms: Iterable[Atom], size_of: Callable[[Value], int | float]) -> None:
        for var in atoms:
            self.roots[var] = argument(size_of(self.scope.values[var]))

    def cotangents_of(self, results: Sequence[Cotangent]) -> dict[Atom, Roots]:
        """The cotangents of the results, by variable."""
        by_variable: dict[Atom, Roots] = {}
        for atom, roots in zip(self.scope.jaxpr.outvars, results, strict=True):
            if roots is not None and not isinstance(atom, Literal):
                by_variable[atom] = union((by_variable.get(atom, ()), roots))
        return by_variable


@dataclass(frozen=True)
class PeakStep:
    """An equation of a jaxpr that runs, or whose derivative does."""

    frame: PeakFrame
    index: int

    @cached_property
    def equation(self) -> JaxprEqn:
        return self.frame.scope.jaxpr.eqns[self.index]

    @cached_property
    def source(self) -> Source:
        return (*self.frame.source, self.equation)

    @property
    def inner(self) -> list[Scope]:
        return self.frame.scope.inner[self.index]

    @property
    def rule(self) -> Rule | None:
        return self.frame.scope.rules.get(self.index)

    @property
    def uses_memory(self) -> bool:
        return uses_memory(self.frame.scope, self.index)

    def value(self, atom: Atom) -> Value:
        return self.frame.scope.values[atom]

    @property
    def flow(self) -> Call | Cond | Scan | While | None:
        """How the equation runs the jaxprs that were followed in it, if any were."""
        inner = self.frame.scope.inner.get(self.index)
        if not inner:
            return None
        match control_flow(self.equation):
            case Call(jaxpr=jaxpr, kind=CallKind.CUSTOM_VJP) as call:
                flows = map(control_flow, inner[0].jaxpr.eqns)
                if any(isinstance(flow, Scan | While) for flow in flows):
                    # The derivative is unknown, and runs a loop too.
                    return While(jaxpr, jaxpr, 0, 0)
                return call
            case Call() | Cond() | Scan() | While() as flow:
                return flow
        return None
