"""What a traced program says about splitting: which dimensions go together, and what it costs."""

from collections import Counter
from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn

from ._remat import Region


@dataclass(frozen=True, eq=False)
class Value:
    """An array of the program: for each dimension a node; nodes that are linked are split alike.

    `grad` is whether a gradient flows into it, so that its cotangent costs something. `reduced` is
    how often the cotangent is summed over devices in a step, where that is not at every use.
    """

    dims: tuple[int, ...]
    shape: tuple[int, ...]
    itemsize: int
    grad: bool
    reduced: int | float | None = None

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class Sum:
    """Partial sums: splitting `node` makes an all-reduce of an array over `dims`.

    Backward, it is for so many `uses` of one value, whose cotangents are added. `before` are the
    dimensions that come before `node` in what is summed: where one of them is split over the same
    axis, as with a batch against itself, `node` is not, and there are no partial sums.
    """

    node: int
    dims: tuple[int, ...]
    bytes: int
    times: int | float
    backward: bool
    uses: int = 1
    of: Value | None = None
    before: tuple[int, ...] = ()


@dataclass(frozen=True)
class Cut:
    """An array whose dimension `source` becomes `target` in a way that does not keep a split.

    If `source` is split, the array is gathered forward, and if `target` is, its cotangent backward.
    """

    source: int | None
    target: int | None
    source_bytes: int
    target_bytes: int
    dims: tuple[int, ...]
    times: int | float
    grad: bool


@dataclass(frozen=True)
class Meeting:
    """An operand whose dimension `node` comes after those `before` in the result.

    Where both are split over the same axis, as with a batch against itself, the operand is gathered
    so many `times`.
    """

    node: int
    before: tuple[int, ...]
    dims: tuple[int, ...]
    bytes: int
    times: int | float


@dataclass(frozen=True)
class Work:
    """Arithmetic, in floating point operations, that is divided if one of `dims` is split.

    Forward alone it is `forward` of them. `of` are the dimensions of each operand.
    """

    dims: tuple[int, ...]
    flops: int | float
    forward: int | float
    of: tuple[tuple[int, ...], ...]


@dataclass
class Graph:
    """What a walk through a program collects."""

    sizes: list[int] = field(default_factory=list)
    blocked: set[int] = field(default_factory=set)
    stacks: set[int] = field(default_factory=set)  # blocked ones that count the layers of a scan
    only_rows: set[int] = field(default_factory=set)  # blocked ones that the batch may be
    made: set[int] = field(default_factory=set)  # those that no input has: noise, zeros, copies
    held: set[int] = field(default_factory=set)  # those of parameters and of constants
    # The axes that the program itself constrains a dimension to; none if it is to be replicated.
    asked: dict[int, tuple[str, ...]] = field(default_factory=dict)
    links: list[tuple[int, int]] = field(default_factory=list)
    soft_links: list[tuple[int, int]] = field(default_factory=list)
    sums: dict[Any, Sum] = field(default_factory=dict)
    cuts: list[Cut] = field(default_factory=list)
    meetings: list[Meeting] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    together: dict[tuple[int, ...], int] = field(default_factory=dict)
    traffic: dict[tuple[int, ...], float] = field(default_factory=dict)
    saved: dict[tuple[int, ...], float] = field(default_factory=dict)
    computed: dict[tuple[int, ...], float] = field(default_factory=dict)
    unknown: Counter[str] = field(default_factory=Counter)
    times: int | float = 1.0
    # Of the equation at hand: how often it runs forward, with rematerialisation; whether its
    # results are kept for the backward pass; and, for each region around it, the programs that it
    # calls.
    forwards: int | float = 1.0
    kept: bool = True
    inner: list[dict[Jaxpr, Region]] = field(default_factory=list)
    # Of the program that is walked through: what of it is used at all, what leads to the loss, and
    # the rematerialised regions around it.
    regions: tuple[Region, ...] = ()

    def node(self, size: int, *, blocked: bool = False, made: bool = False) -> int:
        self.sizes.append(size)
        if blocked:
            self.blocked.add(len(self.sizes) - 1)
        if made:
            self.made.add(len(self.sizes) - 1)
        return len(self.sizes) - 1

    def constant(self, aval: Any) -> Value:
        """An array that is part of the program."""
        found = self.value(aval)
        self.held.update(found.dims)
        return found

    def value(
        self,
        aval: Any,
        dims: tuple[int, ...] | None = None,
        *,
        grad: bool = False,
        reduced: int | float | None = None,
    ) -> Value:
        """A value of an abstract shape; without `dims`, each of its dimensions is a new node."""
        shape = tuple(getattr(aval, "shape", ()))
        dims = tuple(self.node(size) for size in shape) if dims is None else dims
        found = Value(dims, shape, itemsize(aval), grad and is_differentiable(aval), reduced)
        if len(dims) > 1:
            # The most bytes of the values over these nodes: their conflicts are the same.
            self.together[dims] = max(self.together.get(dims, 0), found.bytes)
        return found

    def link(self, a: int, b: int) -> None:
        if a != b:
            self.links.append((a, b))

    def sum(
        self, node: int, value: Value, *, backward: bool = False, before: tuple[int, ...] = ()
    ) -> None:
        """Splitting `node` makes partial sums of `value`, or backward, of its cotangent."""
        if (backward and not value.grad) or not self.times:
            return
        times = self.times if backward else self.times * self.forwards
        key = (value, node, before) if backward else len(self.sums)
        uses = self.sums[key].uses + 1 if key in self.sums else 1
        if backward and value.reduced is not None:
            times, uses = value.reduced, 1
        self.sums[key] = Sum(node, value.dims, value.bytes, times, backward, uses, value, before)

    def meet(self, value: Value, node: int, before: tuple[int, ...]) -> None:
        """The dimension `node` of an operand comes after those `before` in the result."""
        if before:
            times = self.times * self.forwards
            self.meetings.append(Meeting(node, before, value.dims, value.bytes, times))

    def cut(
        self, value: Value, source: int | None, result: Value | None, target: int | None
    ) -> None:
        """Dimension `source` of `value` does not stay split as dimension `target` of `result`.

        A batch that is cut or joined is split again behind it, for what follows is done for each
        example: a soft link.
        """
        dims = value.dims if result is None else result.dims
        out = 0 if result is None else result.bytes
        self.cuts.append(Cut(source, target, value.bytes, out, dims, self.times, value.grad))
        if source is not None and target is not None:
            self.soft_links.append((source, target))

    def save(self, value: Value) -> None:
        """The value is kept for the backward pass, unless it is computed again there."""
        if value.grad and self.kept:
            before = self.saved.get(value.dims, 0.0)
            self.saved[value.dims] = before + value.bytes * self.times

    def compute(self, value: Value) -> None:
        """The value is the result of a product, a lookup or a scatter."""
        self.computed[value.dims] = self.computed.get(value.dims, 0.0) + value.bytes * self.times

    def move(self, value: Value) -> None:
        """The value is written to memory or read from it, and its cotangent on the way back."""
        moved = value.bytes * self.times * (self.forwards + value.grad)
        self.traffic[value.dims] = self.traffic.get(value.dims, 0.0) + moved

    def work(
        self, dims: tuple[int, ...], flops: int | float, passes: int | float, *operands: Value
    ) -> None:
        """So many operations in each of so many passes, forward and backward."""
        forward = flops * self.times
        of = tuple(value.dims for value in operands)
        self.works.append(Work(dims, forward * passes, forward, of))


def itemsize(aval: Any) -> int:
    dtype = getattr(aval, "dtype", None)
    return getattr(dtype, "itemsize", 0) if dtype is not None else 0


def is_differentiable(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def output(equation: JaxprEqn, place: int = 0) -> Any:
    """The abstract value of one of an equation's results."""
    return equation.outvars[place].aval
