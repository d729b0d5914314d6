"""Finds the scans over layers that a program can run as a pipeline."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jax.extend.core import JaxprEqn

from ...core._jaxpr import CHECKPOINTS, called_jaxpr, is_inexact, scan_operands
from ..program._walk import Scope
from ..solver._classes import Classes
from ..solver._strategy import Program, Staged, follow_program
from ._draws import Draw, find_draws
from ._follow import follow_rows, in_layer, of_layers
from ._row_states import SUM, Mixed, Rows, RowSum, State, differing

# The dimension of an array that counts rows, if any.
Place = int | Literal[RowSum.SUM] | None

# Pipelined so often, a batch has less than a tenth of its time in the bubble.
_PER_STAGE = 9


class NoPipeline(ValueError):
    """Raised when a program cannot be run as a pipeline; `args[0]` is a sentence that says why."""


@dataclass(frozen=True)
class Pipelined:
    """A scan over layers that is run as a pipeline.

    `body` is the layer, traced for the rows of one microbatch on one device. `inputs` and `outputs`
    are the dimensions of rows of the scan's operands and results, or None, or `SUM`. `draws` are
    the random numbers for rows.
    """

    equation: JaxprEqn
    body: Scope
    inputs: tuple[Place, ...]
    outputs: tuple[Place, ...]
    layers: int
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
        _, carry, _ = scan_operands(one.equation, one.equation.invars)
        _, places, _ = scan_operands(one.equation, one.inputs)
        pairs = zip(carry, places, strict=True)
        moved: list[Any] = [x.aval for x, place in pairs if isinstance(place, int)]
        carried += sum(map(_bytes, moved))
        returned += sum(map(_bytes, filter(is_inexact, moved)))
    layers = tuple(one.layers // pipeline.stages for one in scans.values())
    count, places = pipeline.microbatches, _layered(program)
    staged = Staged(outside, pipeline.stages, count, places, layers, carried, returned)
    return replace(program, staged=staged)


def _bytes(aval: Any) -> int:
    return aval.size * aval.dtype.itemsize


def _layered(program: Program) -> frozenset[int]:
    """The places of the arrays of the model whose first dimension counts layers of a scan."""
    classes = Classes(program.graph, 1)
    over = classes.of(
        scope.values[x].dims[0]
        for equation, scope in layer_scans(program, outside=True)
        for x in scan_operands(equation, equation.invars)[2]
        if x in scope.values
    )
    parameters = enumerate(program.parameters)
    return frozenset(i for i, x in parameters if x.dims and classes[x.dims[0]] in over)


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


def find_pipeline(
    program: Program,
    trace_rows: Callable[[int], Program],
    *,
    stages: int,
    parts: int,
    microbatches: int | None,
) -> Pipeline:
    """Finds the scans over layers of a program, and checks that they can be pipelined.

    `trace_rows(rows)` is the program for another number of rows; `parts` is how many parts the
    batch is split into. Raises `NoPipeline`.
    """
    scans = list(layer_scans(program))
    if not scans:
        raise NoPipeline(
            "Its layers are not a scan: no `jax.lax.scan` goes over arrays of the model. Stack "
            "equal layers, as `eqx.filter_vmap` does, and scan over them."
        )
    if not program.batch.given:
        raise NoPipeline("It has no batch: the first argument has no array with a dimension.")
    for equation, _ in scans:
        if equation.params["length"] % stages:
            raise NoPipeline(_indivisible(equation.params["length"], stages))
        if equation.params["reverse"]:
            raise NoPipeline("Its scan over layers is reversed (`reverse=True`).")
    rows = program.graph.sizes[program.batch.given[0]]
    count = count_microbatches(rows, parts, stages, microbatches)
    each = rows // (parts * count)
    if rows < 4:
        raise NoPipeline(f"The batch has {rows} rows; a pipeline needs four or more.")
    # A trace with one row has other operations, because JAX broadcasts nothing along it.
    checked = trace_rows(max(each, 2) if max(each, 2) < rows else 2)
    few = checked if each > 1 and each < rows else trace_rows(each)
    found = {}
    pairs = zip(scans, _same_scans(scans, checked), _same_scans(scans, few), strict=True)
    for (equation, _), (other, _), (small, body) in pairs:
        try:
            inputs, outputs = _find_rows(equation, other)
            bodies = [one.params["jaxpr"] for one in (small, other, equation)]
            draws = find_draws(*bodies)
        except Mixed as error:
            raise NoPipeline(
                f"Its layers cannot work on a part of the batch at a time, because {error}."
            ) from None
        length = equation.params["length"]
        found[id(equation)] = Pipelined(equation, body, inputs, outputs, length, draws)
    return Pipeline(found, few, stages, count, parts, rows)


def _same_scans(
    scans: Sequence[tuple[JaxprEqn, Scope]], program: Program
) -> list[tuple[JaxprEqn, Scope]]:
    found = list(layer_scans(program))
    key = lambda one: [one[0].params[k] for k in ("length", "num_consts", "num_carry")]
    if list(map(key, scans)) != list(map(key, found)):
        raise NoPipeline("Its scans over layers depend on the number of rows of the batch.")
    return found


def layer_scans(program: Program, outside: bool = False) -> Iterator[tuple[JaxprEqn, Scope]]:
    """Yields the scans over arrays of the model that are not in other loops, and their bodies.

    With `outside`, in place of the body the scope that the scan is in.
    """
    classes = Classes(program.graph, 1)
    held = classes.of(node for value in program.parameters for node in value.dims[:1])

    def search(scope: Scope) -> Iterator[tuple[JaxprEqn, Scope]]:
        for index, inner in scope.inner.items():
            equation = scope.jaxpr.eqns[index]
            if equation.primitive.name == "scan":
                _, _, xs = scan_operands(equation, equation.invars)
                values = [scope.values[x] for x in xs if x in scope.values]
                if any(classes[v.dims[0]] in held for v in values if v.dims):
                    yield equation, scope if outside else inner[0]
            elif called_jaxpr(equation) is not None or equation.primitive.name in CHECKPOINTS:
                yield from search(inner[0])

    return search(program.scope)


def _find_rows(equation: JaxprEqn, other: JaxprEqn) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
    """The dimensions of rows of a scan's operands and results, from two traces of it."""
    pairs = zip(other.invars, equation.invars, strict=True)
    states = [_state(one.aval, two.aval) for one, two in pairs]
    consts, carry, xs = scan_operands(equation, states)
    if not any(carry):
        raise NoPipeline(
            "The carry of its scan over layers has no batch dimension, so there is nothing to "
            "pass from stage to stage."
        )
    inside = [in_layer(state, "the scan goes over rows") for state in xs]
    body = other.params["jaxpr"], equation.params["jaxpr"]
    count = len(carry)
    try:
        found = follow_rows(*body, [*consts, *carry, *inside])
    except Mixed:
        # Sums over rows start with an array that all rows share.
        _, given, _ = scan_operands(equation, equation.invars)
        pairs = list(zip(carry, given, strict=True))
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
        raise Mixed("a dimension of rows is merged with another one outside of the layers")
    return state.dim


def _state(few: Any, all_: Any) -> Rows | None:
    dims = differing(few, all_)
    if len(dims) > 1:
        raise Mixed("an array has rows in several dimensions")
    return Rows(dims[0]) if dims else None


def _indivisible(layers: int, stages: int) -> str:
    fits = [n for n in range(2, layers + 1) if layers % n == 0]
    return (
        f"Its {layers} layers do not divide over pipe={stages}; {' or '.join(map(str, fits))} "
        "stages would fit."
    )
