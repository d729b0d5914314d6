"""Finds the scans over layers that a program can run as a pipeline."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
from jax.extend.core import JaxprEqn
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import PyTree

from ...core._control_flow import Call, CallKind, Scan, control_flow
from ...core._jaxpr import is_inexact
from ...core._pytree import abstract_arrays, join, split
from ...distributed._mesh import PIPE
from ..program._trace import trace_over
from ..program._walk import Scope
from ..solver._classes import Classes
from ..solver._strategy import Program, Staged, follow_program, parts
from ._draws import Draw, find_draws
from ._follow import follow_rows, in_layer, of_layers
from ._row_states import SUM, Mixed, Rows, RowSum, State, differing

# The dimension of an array that counts rows, if any.
Place = int | Literal[RowSum.SUM] | None

# Pipelined so often, a batch has less than a tenth of its time in the bubble.
_PER_STAGE = 9


@dataclass(frozen=True)
class LayerScan:
    """A scan over layers, with its body and the scope that it is in."""

    equation: JaxprEqn
    loop: Scan
    body: Scope
    outside: Scope


class NoPipeline(ValueError):
    """Raised when a program cannot be run as a pipeline; `args[0]` is a sentence that says why."""


@dataclass(frozen=True)
class Pipelined:
    """A scan over layers that is run as a pipeline.

    `loop` is the scan of all rows. `body` is the layer, traced for the rows of one microbatch on
    one device. `inputs` and `outputs` are the dimensions of rows of the scan's operands and
    results, or None, or `SUM`. `draws` are the random numbers for rows.
    """

    equation: JaxprEqn
    loop: Scan
    body: Scope
    inputs: tuple[Place, ...]
    outputs: tuple[Place, ...]
    draws: Mapping[int, Draw]


@dataclass(frozen=True)
class Pipeline:
    """The pipelined scans of a program, by the `id` of their equation.

    `few` is the program for the rows of one microbatch on one device.
    """

    scans: dict[int, Pipelined]
    few: Program
    stages: int
    microbatches: int
    parts: int
    rows: int


def stage_program(program: Program, pipeline: Pipeline) -> Program:
    """The program with the figures of its pipeline."""
    scans = pipeline.scans
    trainable = [value.grad for value in program.parameters]
    outside = follow_program(program.traced, trainable, frozenset(scans))
    carried = returned = 0
    for one in scans.values():
        _, carry, _ = one.loop.split(one.equation.invars)
        _, places, _ = one.loop.split(one.inputs)
        pairs = zip(carry, places, strict=True)
        for aval in (x.aval for x, place in pairs if isinstance(place, int)):
            size = aval.size * aval.dtype.itemsize  # pyright: ignore[reportAttributeAccessIssue]
            carried += size
            returned += size * is_inexact(aval)
    layers = tuple(one.loop.length // pipeline.stages for one in scans.values())
    # The arrays of the model whose first dimension counts layers of a scan.
    classes, count = Classes(program.graph, 1), pipeline.microbatches
    over = classes.of(
        scan.outside.values[x].dims[0]
        for scan in layer_scans(program)
        for x in scan.loop.split(scan.equation.invars)[2]
        if x in scan.outside.values
    )
    arrays = enumerate(program.parameters)
    places = frozenset(i for i, x in arrays if x.dims and classes[x.dims[0]] in over)
    staged = Staged(outside, pipeline.stages, count, places, layers, carried, returned)
    return replace(program, staged=staged)


def count_microbatches(rows: int, parts: int, stages: int, asked: int | None) -> int:
    """The number of microbatches of a batch whose rows are split into `parts`."""
    if rows % parts or rows == 0:
        raise NoPipeline(
            f"The batch has {rows} rows, which do not divide over {parts} parts of the mesh."
        )
    each = rows // parts
    if asked is not None:
        if each % asked:
            raise NoPipeline(
                f"`microbatches={asked}` does not divide the {each} rows that each of the {parts} "
                f"parts of the mesh has of a batch of {rows}."
            )
        return asked
    fits = [count for count in range(1, each + 1) if each % count == 0]
    return next((count for count in fits if count >= _PER_STAGE * (stages - 1)), fits[-1])


def pipeline_of(
    program: Program,
    mesh: Mesh | AbstractMesh,
    fn: Callable[..., Any],
    tree: PyTree,
    args: Any,
    batch_axes: tuple[str, ...],
    microbatches: int | None,
) -> Pipeline:
    """The pipeline of `fn(tree, *args)`, whose program is given. Raises `NoPipeline`."""
    stages, shards = mesh.shape[PIPE], parts(batch_axes, mesh.shape)
    scans = _scans_in_stages(program, stages)
    rows = program.graph.sizes[program.batch.given[0]]
    count = count_microbatches(rows, shards, stages, microbatches)
    each = rows // (shards * count)
    if rows < 4:
        raise NoPipeline(f"The batch has {rows} rows; a pipeline needs four or more.")
    trace_rows = lambda rows: _of_rows(program, mesh, fn, tree, args, rows)
    # A trace with one row has other operations, because JAX broadcasts nothing along it.
    checked = trace_rows(max(each, 2) if max(each, 2) < rows else 2)
    few = checked if each > 1 and each < rows else trace_rows(each)
    found = {}
    pairs = zip(scans, _same_scans(scans, checked), _same_scans(scans, few), strict=True)
    for whole, other, small in pairs:
        try:
            inputs, outputs = _find_rows(whole, other)
            draws = find_draws(small.loop.body, other.loop.body, whole.loop.body, rows)
        except Mixed as error:
            raise NoPipeline(
                f"Its layers cannot work on a part of the batch at a time, because {error}."
            ) from None
        found[id(whole.equation)] = Pipelined(
            whole.equation, whole.loop, small.body, inputs, outputs, draws
        )
    return Pipeline(found, few, stages, count, shards, rows)


def _scans_in_stages(program: Program, stages: int) -> list[LayerScan]:
    """The scans over layers of a program, which have to divide over the stages."""
    scans = list(layer_scans(program))
    if not scans:
        raise NoPipeline(
            "Its layers are not a scan: no `jax.lax.scan` goes over arrays of the model. Stack "
            "equal layers, as `eqx.filter_vmap` does, and scan over them."
        )
    if not program.batch.given:
        raise NoPipeline("It has no batch: the first argument has no array with a dimension.")
    for scan in scans:
        layers = scan.loop.length
        if layers % stages:
            fits = " or ".join(str(n) for n in range(2, layers + 1) if layers % n == 0)
            raise NoPipeline(
                f"Its {layers} layers do not divide over pipe={stages}; {fits} stages would fit."
            )
        if scan.loop.reverse:
            raise NoPipeline("Its scan over layers is reversed (`reverse=True`).")
    return scans


def _of_rows(
    program: Program,
    mesh: Mesh | AbstractMesh,
    fn: Callable[..., Any],
    tree: PyTree,
    args: Any,
    rows: int,
) -> Program:
    """The program of a batch with another number of rows."""
    arrays, static = split(args[0])
    size = program.graph.sizes[program.batch.given[0]]
    shapes = abstract_arrays(arrays)
    for place, x in enumerate(shapes):
        if x.shape and x.shape[0] == size and place not in program.batch.left_out:
            shape = (rows, *x.shape[1:])
            shapes[place] = jax.ShapeDtypeStruct(shape, x.dtype, weak_type=x.weak_type)
    try:
        traced, _ = trace_over(mesh, fn, tree, (join(shapes, static), *args[1:]))
    except Exception as error:
        raise NoPipeline(
            f"The function cannot be traced with a batch of {rows} rows ({type(error).__name__})."
        ) from error
    return follow_program(traced, [value.grad for value in program.parameters])


def _same_scans(scans: Sequence[LayerScan], program: Program) -> list[LayerScan]:
    found = list(layer_scans(program))
    key = lambda scan: (scan.loop.length, scan.loop.consts, scan.loop.carry)
    if list(map(key, scans)) != list(map(key, found)):
        raise NoPipeline("Its scans over layers depend on the number of rows of the batch.")
    return found


def layer_scans(program: Program) -> Iterator[LayerScan]:
    """Yields the scans over arrays of the model that are not in other loops."""
    classes = Classes(program.graph, 1)
    held = classes.of(node for value in program.parameters for node in value.dims[:1])

    def search(scope: Scope) -> Iterator[LayerScan]:
        for index, inner in scope.inner.items():
            equation = scope.jaxpr.eqns[index]
            match control_flow(equation):
                case Scan() as loop:
                    _, _, xs = loop.split(equation.invars)
                    values = [scope.values[x] for x in xs if x in scope.values]
                    if any(classes[v.dims[0]] in held for v in values if v.dims):
                        yield LayerScan(equation, loop, inner[0], scope)
                case Call(kind=kind) if kind is not CallKind.OWN_RULES:
                    yield from search(inner[0])

    return search(program.scope)


def _find_rows(whole: LayerScan, other: LayerScan) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
    """The dimensions of rows of a scan's operands and results, from two traces of it."""
    states: list[State] = []
    for one, two in zip(other.equation.invars, whole.equation.invars, strict=True):
        dims = differing(one.aval, two.aval)
        if len(dims) > 1:
            raise Mixed("an array has rows in several dimensions")
        states.append(Rows(dims[0]) if dims else None)
    consts, carry, xs = whole.loop.split(states)
    if not any(carry):
        raise NoPipeline(
            "The carry of its scan over layers has no batch dimension, so there is nothing to "
            "pass from stage to stage."
        )
    inside = [in_layer(state, "the scan goes over rows") for state in xs]
    body = other.loop.body, whole.loop.body
    count = len(carry)
    try:
        found = follow_rows(*body, [*consts, *carry, *inside])
    except Mixed:
        # Sums over rows start with an array that all rows share.
        _, carried, _ = whole.loop.split(whole.equation.invars)
        pairs = list(zip(carry, carried, strict=True))
        carry = [SUM if x is None and is_inexact(var.aval) else x for x, var in pairs]
        if SUM not in carry:
            raise
        found = follow_rows(*body, [*consts, *carry, *inside])
    if list(map(_place, found[:count])) != list(map(_place, carry)):
        raise Mixed("rows change their dimension from layer to layer")
    inputs = [*consts, *carry, *xs]
    outputs = [*found[:count], *map(of_layers, found[count:])]
    return tuple(map(_place, inputs)), tuple(map(_place, outputs))


def _place(state: State) -> Place:
    if not isinstance(state, Rows):
        return state
    if (state.outer or 1, state.inner) != (1, 1):
        raise Mixed("a dimension of rows is merged with another one outside the layers")
    return state.dim
