"""Finds the scans over layers that a program can run as a pipeline."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import jax
from jax.extend.core import JaxprEqn
from jaxtyping import PyTree

from ...core._control_flow import Call, CallKind, Scan, control_flow
from ...core._jaxpr import is_inexact
from ...core._pytree import abstract_arrays, join, split
from ...distributed._mesh import PIPE
from .._mesh_axes import parts
from ..operations import Atom, atom_bytes, shape_of
from ..program._classes import Classes
from ..program._graph import Value
from ..program._program import Program, follow_program
from ..program._trace import Traced
from ..program._walk import Scope
from ._draws import RandomBits
from ._follow import Bits, follow_rows
from ._row_rules import ROW_SUM, MixesRows, RowDim, RowState, RowSum, differing

# The dimension of an array that counts rows, if any.
LayerRows = int | Literal[RowSum.SUM] | None

# With so many microbatches for each stage but the first, a batch has less than a tenth of its time
# in the bubble.
_MICROBATCHES_PER_STAGE = 9


@dataclass(frozen=True)
class LayerScan:
    """A scan over layers, with its body and the scope that it is in."""

    equation: JaxprEqn
    loop: Scan
    body: Scope
    outside: Scope

    @property
    def scanned(self) -> list[Value]:
        """The values of the arrays that the scan goes over."""
        _, _, xs = self.loop.split(self.equation.invars)
        return [self.outside.values[x] for x in xs if x in self.outside.values]


class NoPipeline(ValueError):
    """Raised when a program cannot be run as a pipeline; `args[0]` is a sentence that says why."""


@dataclass(frozen=True)
class PipelinedScan:
    """A scan over layers that is run as a pipeline.

    `loop` is the scan of all rows. `body` is the layer, traced for the rows of one microbatch on
    one device. `inputs` and `outputs` are the dimensions of rows of the scan's operands and
    results, or None, or `ROW_SUM`. `random_bits` are the random bits for rows.
    """

    equation: JaxprEqn
    loop: Scan
    body: Scope
    inputs: tuple[LayerRows, ...]
    outputs: tuple[LayerRows, ...]
    random_bits: Mapping[int, RandomBits]


@dataclass(frozen=True)
class Pipeline:
    """How the layers of a program run as a pipeline.

    `scans` are those over layers, by the `id` of their equation. `microbatch` is the program for
    the rows of one microbatch on one device. The batch has `rows`, in `shards` parts on different
    devices.
    """

    program: Program
    scans: dict[int, PipelinedScan]
    microbatch: Program
    stages: int
    microbatches: int
    shards: int
    rows: int

    @property
    def ticks(self) -> int:
        return self.microbatches + self.stages - 1

    @property
    def bubble(self) -> float:
        """The part of the time in which a stage waits for its first or after its last rows."""
        return 1 - self.microbatches / self.ticks

    @property
    def layers(self) -> tuple[int, ...]:
        """The number of layers that a stage has of each scan."""
        return tuple(scan.loop.length // self.stages for scan in self.scans.values())

    @cached_property
    def layered(self) -> frozenset[int]:
        """The places of the arrays of the model whose first dimension counts layers of a scan."""
        classes = Classes(self.program.graph, 1)
        of_layers: set[int] = set()
        for scan in layer_scans(self.program):
            of_layers |= _leading_classes(classes, scan.scanned)
        layered: set[int] = set()
        for place, value in enumerate(self.program.parameters):
            if value.nodes and classes[value.nodes[0]] in of_layers:
                layered.add(place)
        return frozenset(layered)

    @cached_property
    def stage_program(self) -> Program:
        """The program with the layers of one stage, which also run in the bubble."""
        share = self.ticks / self.microbatches / self.stages
        shares = tuple((scan, share) for scan in self.scans)
        trainable = [value.grad for value in self.program.parameters]
        return follow_program(self.program.traced, trainable, shares)

    @cached_property
    def carried_bytes(self) -> tuple[int, int]:
        """Bytes of the batch that go from stage to stage, and those that have a gradient."""
        carried = returned = 0
        for scan in self.scans.values():
            _, carry, _ = scan.loop.split(scan.equation.invars)
            _, dims, _ = scan.loop.split(scan.inputs)
            for x, dim in zip(carry, dims, strict=True):
                size = atom_bytes(x) * isinstance(dim, int)
                carried += size
                returned += size * is_inexact(x.aval)  # not of integers, such as positions
        return carried, returned


def count_microbatches(rows: int, shards: int, stages: int, microbatches: int | None) -> int:
    """The number of microbatches of a batch whose rows are split into `shards`."""
    if rows % shards or rows == 0:
        raise NoPipeline(
            f"The batch has {rows} rows, which do not divide over {shards} parts of the mesh."
        )
    of_shard = rows // shards
    if microbatches is not None:
        if of_shard % microbatches:
            raise NoPipeline(
                f"`microbatches={microbatches}` does not divide the {of_shard} rows that each of "
                f"the {shards} parts of the mesh has of a batch of {rows}."
            )
        return microbatches
    # The bubble is (stages - 1) / (microbatches + stages - 1) of the time.
    enough = max(1, _MICROBATCHES_PER_STAGE * (stages - 1))
    for count in range(enough, of_shard):
        if of_shard % count == 0:
            return count
    return of_shard


def pipeline_of(
    program: Program,
    trace: Callable[[Sequence[PyTree]], Traced],
    args: Sequence[PyTree],
    sizes: Mapping[str, int],
    batch_axes: tuple[str, ...],
    microbatches: int | None,
) -> Pipeline:
    """The pipeline of a program of `args`. `trace` traces it again, with other rows of the batch.
    Raises `NoPipeline`."""
    stages, shards = sizes[PIPE], parts(batch_axes, sizes)

    trainable = [value.grad for value in program.parameters]

    def trace_rows(count: int) -> Program:
        few = _with_rows(args, program, count)
        try:
            traced = trace(few)
        except Exception as error:
            raise NoPipeline(
                f"The function cannot be traced with a batch of {count} rows "
                f"({type(error).__name__})."
            ) from error
        return follow_program(traced, trainable)

    scans = _scans_in_stages(program, stages)
    rows = program.batch_size
    count = count_microbatches(rows, shards, stages, microbatches)
    own_rows = rows // (shards * count)  # of one microbatch on one device
    # Rows are told from other dimensions by a trace with fewer of them, which are two or more.
    if rows < 4:
        raise NoPipeline(f"The batch has {rows} rows; a pipeline needs four or more.")
    # Rows are followed by comparing a trace with fewer rows. A trace with one row has other
    # operations, because JAX broadcasts nothing along it.
    few_rows = max(own_rows, 2)
    if few_rows >= rows:
        few_rows = 2
    few = trace_rows(few_rows)
    microbatch = few
    if few_rows != own_rows:
        microbatch = trace_rows(own_rows)
    pipelined: dict[int, PipelinedScan] = {}
    pairs = zip(scans, _same_scans(scans, few), _same_scans(scans, microbatch), strict=True)
    for scan, of_few, of_microbatch in pairs:
        try:
            inputs, outputs, bits = _find_rows(scan, of_few, of_microbatch.body, rows)
        except MixesRows as error:
            # Not chained: the sentence has all that a user can do something about.
            raise NoPipeline(
                f"Its layers cannot work on a part of the batch at a time, because {error}."
            ) from None
        pipelined[id(scan.equation)] = PipelinedScan(
            scan.equation, scan.loop, of_microbatch.body, inputs, outputs, bits
        )
    return Pipeline(program, pipelined, microbatch, stages, count, shards, rows)


def _scans_in_stages(program: Program, stages: int) -> list[LayerScan]:
    """The scans over layers of a program, which have to divide over the stages."""
    scans = list(layer_scans(program))
    if not scans:
        raise NoPipeline(
            "Its layers are not a scan: no `jax.lax.scan` goes over arrays of the model. Stack "
            "equal layers, as `eqx.filter_vmap` does, and scan over them."
        )
    if not program.batch.of_inputs:
        raise NoPipeline("It has no batch: the first argument has no array with a dimension.")
    for scan in scans:
        layers = scan.loop.length
        if layers % stages:
            divisors = [str(n) for n in range(2, layers + 1) if layers % n == 0]
            raise NoPipeline(
                f"Its {layers} layers do not divide over pipe={stages}; {' or '.join(divisors)} "
                "stages would fit."
            )
        # The pipeline runs from the first layer to the last.
        if scan.loop.reverse:
            raise NoPipeline("Its scan over layers is reversed (`reverse=True`).")
    return scans


def _with_rows(args: Sequence[PyTree], program: Program, rows: int) -> Sequence[PyTree]:
    """The arguments of a program with another number of rows in the batch, as shapes."""
    batch, *others = args
    arrays, static = split(batch)
    size = program.batch_size
    shapes = abstract_arrays(arrays)
    for place, x in enumerate(shapes):
        if x.shape and x.shape[0] == size and place not in program.batch.not_rows:
            shape = (rows, *x.shape[1:])
            shapes[place] = jax.ShapeDtypeStruct(shape, x.dtype, weak_type=x.weak_type)
    return (join(shapes, static), *others)


def _same_scans(scans: Sequence[LayerScan], program: Program) -> list[LayerScan]:
    """The same scans in the program of another number of rows."""
    others = list(layer_scans(program))
    if list(map(_layout, scans)) != list(map(_layout, others)):
        raise NoPipeline("Its scans over layers depend on the number of rows of the batch.")
    return others


def _layout(scan: LayerScan) -> tuple[int, int, int]:
    return scan.loop.length, scan.loop.consts, scan.loop.carry


def layer_scans(program: Program) -> Iterator[LayerScan]:
    """Yields the scans over arrays of the model that are not in other loops."""
    classes = Classes(program.graph, 1)
    leading = _leading_classes(classes, program.parameters)

    def search(scope: Scope) -> Iterator[LayerScan]:
        for index, inner in scope.inner.items():
            equation = scope.jaxpr.eqns[index]
            match control_flow(equation):
                case Scan() as loop:  # a scan inside of it is part of a layer
                    scan = LayerScan(equation, loop, inner[0], scope)
                    if not leading.isdisjoint(_leading_classes(classes, scan.scanned)):
                        yield scan
                case Call(kind=kind) if kind is not CallKind.OWN_RULES:
                    yield from search(inner[0])

    return search(program.scope)


def _leading_classes(classes: Classes, values: Sequence[Value]) -> frozenset[int]:
    """The classes of the first dimensions of some arrays."""
    return classes.of(value.nodes[0] for value in values if value.nodes)


def _find_rows(
    scan: LayerScan, of_few: LayerScan, microbatch: Scope, rows: int
) -> tuple[tuple[LayerRows, ...], tuple[LayerRows, ...], Mapping[int, RandomBits]]:
    """The dimensions of rows of a scan's operands and results, and its random bits for rows."""
    operands, results = scan.equation.invars, scan.equation.outvars
    states: list[RowState] = [None] * len(operands)
    for i, operand in enumerate(operands):
        dims = differing(of_few.equation.invars[i], operand)
        if len(dims) > 1:
            raise MixesRows("an array has rows in several dimensions")
        if dims:
            states[i] = RowDim(dims[0] - len(shape_of(operand)))
    consts, carry, xs = scan.loop.split(states)
    if not any(carry):
        raise NoPipeline(
            "The carry of its scan over layers has no batch dimension, so there is nothing to "
            "pass from stage to stage."
        )

    def run(carry: Sequence[RowState]) -> tuple[list[RowState], Bits]:
        return follow_rows(of_few.body, scan.body, microbatch, rows, [*consts, *carry, *xs])

    try:
        states, bits = run(carry)
    except MixesRows:
        # An array without rows may be one that each row adds to, as a loss of routing is.
        sums = list(carry)
        for i, operand in enumerate(scan.loop.split(operands)[1]):
            if sums[i] is None and is_inexact(operand.aval):
                sums[i] = ROW_SUM
        if ROW_SUM not in sums:
            raise
        carry = sums
        states, bits = run(carry)
    inputs = tuple(map(_layer_rows, [*consts, *carry, *xs], operands))
    outputs = tuple(map(_layer_rows, states, results))
    _, carry_rows, x_rows = scan.loop.split(inputs)
    if outputs[: len(carry)] != carry_rows:
        raise MixesRows("rows change their dimension from layer to layer")
    if 0 in x_rows:
        raise MixesRows("the scan goes over rows")
    of_rows = {place: draws for place, draws in bits.items() if draws is not None}
    return inputs, outputs, of_rows


def _layer_rows(state: RowState, atom: Atom) -> LayerRows:
    if not isinstance(state, RowDim):
        return state
    if state.outer not in (None, 1) or state.inner != 1:
        raise MixesRows("a dimension of rows is merged with another one outside the layers")
    return state.place_in(atom)
