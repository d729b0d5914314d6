"""A traced function with its graph: the arrays of the model, the batch, and constants."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from ...core._control_flow import open_jaxpr
from ...core._jaxpr import is_inexact
from ._batch import BatchNodes, find_batch
from ._classes import Classes
from ._graph import Cursor, Graph, Value
from ._local_scans import find_local_scans
from ._remat import Region
from ._shared_programs import once
from ._trace import Traced
from ._walk import Scope, walk

T = TypeVar("T")
# Smaller constants, such as masks and position tables, stay replicated and are not reported.
LARGE_CONSTANT = 1_000_000  # bytes


@dataclass(frozen=True)
class Constant:
    """One array, with a value for each jaxpr that it is a constant of."""

    values: tuple[Value, ...]
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values[0].shape

    @property
    def bytes(self) -> int:
        return self.values[0].bytes

    @property
    def name(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def find_constants(scope: Scope) -> tuple[Constant, ...]:
    """Finds the arrays that a program closes over, each once, in the order of the program."""
    constants: dict[int, Constant] = {}  # by the `id` of the array
    for x, value in _consts(scope):
        dtype = getattr(x, "dtype", None)
        if not isinstance(dtype, np.dtype):  # a key
            continue
        # A function that is called twice closes over the same array twice.
        values = (value,)
        if id(x) in constants:
            values = (*constants[id(x)].values, value)
        constants[id(x)] = Constant(values, dtype)
    return tuple(constants.values())


def _consts(scope: Scope) -> Iterator[tuple[object, Value]]:
    """The constants of a jaxpr and of those inside it, with their values."""
    for x, var in zip(scope.consts, scope.jaxpr.constvars, strict=False):
        yield x, scope.values[var]
    for scopes in scope.inner.values():
        for inner in scopes:
            yield from _consts(inner)


@dataclass(frozen=True)
class Program:
    """The graph and values of a traced function.

    `parameters` are the values of the tree, `batch_arrays` those of the batch, and `examples` the
    batch's arrays of rows.
    """

    traced: Traced
    graph: Graph
    scope: Scope
    parameters: tuple[Value, ...]
    batch_arrays: tuple[Value, ...]
    examples: tuple[Value, ...]
    batch: BatchNodes
    constants: tuple[Constant, ...] = ()  # arrays that the function closes over

    @property
    def batch_size(self) -> int:
        """The number of rows, or the largest dimension along which examples are split; 0 without
        a batch. Arrays with one row, which all examples share, do not count."""
        return max(map(self.graph.sizes.__getitem__, self.batch.of_inputs), default=0)

    def for_each_input(self, model: T, batch: T, other: T) -> list[T]:
        """What holds for each input, as an array of the model, of the batch, or of what follows."""
        arrays, of_batch = self.traced.arrays, self.traced.batch
        others = len(self.scope.jaxpr.invars) - arrays - of_batch
        return [model] * arrays + [batch] * of_batch + [other] * others

    @cached_property
    def owned(self) -> frozenset[int]:
        """The dimensions of parameters and of large constants, along which no example is split."""
        owned: set[int] = set()
        for value in self.parameters:
            owned.update(value.nodes)
        for _, value in self.large_constants:
            owned.update(value.nodes)
        return frozenset(owned)

    @property
    def large_constants(self) -> list[tuple[Constant, Value]]:
        """Large arrays that the function closes over; they can be tensor-parallel."""
        large: list[tuple[Constant, Value]] = []
        for constant in self.constants:
            if constant.bytes >= LARGE_CONSTANT and is_inexact(constant):
                for value in constant.values:
                    large.append((constant, value))
        return large

    @cached_property
    def constraint_axes(self) -> dict[int, tuple[str, ...]]:
        """The axes of the program's own constraints, for each node that is linked to one."""
        constrained = self.graph.constrained
        if not any(constrained.values()):
            return {}
        # A size of 1 is linked to anything that it is broadcast to.
        classes = Classes(self.graph, 1, least=2)
        by_class: dict[int, tuple[str, ...]] = {}
        for node, axes in constrained.items():
            if axes:
                by_class[classes[node]] = axes
        linked: dict[int, tuple[str, ...]] = {}
        for node in range(len(self.graph.sizes)):
            if classes[node] in by_class:
                linked[node] = by_class[classes[node]]
        return linked


def follow_program(
    traced: Traced, trainable: Sequence[bool], shares: Sequence[tuple[int, float]] = ()
) -> Program:
    """Follows every dimension through a traced function. Only trainable arrays have gradients.

    Of some scans, by the `id` of their equation, one device runs a share of the iterations.
    """
    return once(_follow, traced, tuple(trainable), tuple(shares))


def _follow(
    traced: Traced, trainable: Sequence[bool], shares: Sequence[tuple[int, float]]
) -> Program:
    graph = Graph(shares=dict(shares), cursor=Cursor(_regions(traced, trainable)))
    inputs: list[Value] = []
    for var in open_jaxpr(traced.jaxpr).invars:
        is_trained = len(inputs) < traced.arrays and trainable[len(inputs)]
        inputs.append(graph.value(var.aval, grad=is_trained and traced.trains))
    scope = walk(graph, traced.jaxpr, inputs)
    parameters, rest = inputs[: traced.arrays], inputs[traced.arrays :]
    # Stacks of layers that are divided into groups before a scan over the groups.
    firsts = {value.nodes[0] for value in parameters if value.nodes}
    for node, (groups, *of_group) in graph.groupings:
        single = graph.stacks | graph.singled
        if node in firsts and groups in graph.stacks and single.issuperset(of_group):
            for layers in (node, *of_group):
                graph.block(layers)
                graph.stacks.add(layers)
            if groups in graph.unrolled:
                graph.unrolled.add(node)
    arrays, others = rest[: traced.batch], rest[traced.batch :]
    batch = find_batch(graph, parameters, arrays, others)
    classes = Classes(graph, 1, soft=True, least=2)
    rows = classes.of((*batch.of_inputs, *batch.of_created))

    def is_rows(node: int) -> bool:
        # A single row is not divided over devices.
        return graph.sizes[node] > 1 and classes[node] in rows

    graph.sum_after(find_local_scans(scope, is_rows), is_rows)
    examples: list[Value] = []
    for place, value in enumerate(arrays):
        if value.nodes and place not in batch.not_rows:
            examples.append(value)
    return Program(
        traced,
        graph,
        scope,
        tuple(parameters),
        tuple(arrays),
        tuple(examples),
        batch,
        find_constants(scope),
    )


def _regions(traced: Traced, trainable: Sequence[bool]) -> tuple[Region, Region]:
    """What a step uses of a program, and what its gradient is of."""
    count = len(traced.jaxpr.out_avals)
    differentiated = [True] * count
    if traced.trains:
        # The first result is the loss, and no gradient flows from the others.
        differentiated[1:] = [False] * (count - 1)
    used = [True] * count
    if traced.trains and traced.model_outputs == traced.arrays:
        # The trained arrays of a returned model are not used.
        used[count - traced.model_outputs :] = [not is_trained for is_trained in trainable]
    return Region(tuple(used)), Region(tuple(differentiated), differentiated=True)
