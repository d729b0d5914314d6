"""Arithmetic that every device does, how much of it there is, and why."""

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter

from .._mesh_axes import parts
from ..program._batch import NotRows, reasons_against
from ..program._classes import Classes
from ..program._graph import Work
from ..program._program import Program
from ..solver._memory_estimate import arithmetic, sharing
from ._data import Repeated
from ._reasons import Reasons
from ._text import grouped, shortened

# Smaller shares of a device's arithmetic are not reported.
_LITTLE = 0.05


def repeated(reasons: Reasons) -> tuple[Repeated, ...]:
    """The arithmetic that every device does, the most first."""
    decision = reasons.decision
    if parts(tuple(decision.sizes), decision.sizes) == 1:
        return ()
    program = decision.program
    devices_sharing = sharing(decision)
    undivided: list[Work] = []
    for work in program.graph.works:
        if devices_sharing(work.nodes) == 1:
            undivided.append(work)
    least = _LITTLE * arithmetic(decision).per_device
    # Most plans end here, before reasons are looked for.
    if _flops(undivided) <= least:
        return ()
    # If the batch is split, work is repeated because it has no rows.
    count = decision.batch.count
    why = partial(_no_rows, reasons)
    if count > 1:
        why = _rows_reason(program, count)
    entries = []
    for text, works in grouped(undivided, why).items():
        flops = _flops(works)
        if flops <= least:
            continue
        places: set[int] = set()
        for work in works:
            places.update(_places(program, work))
        names = shortened([reasons.leaves[place].name for place in sorted(places)])
        entries.append(Repeated(flops, names, text))
    return tuple(sorted(entries, key=lambda entry: -entry.flops))


def _flops(works: Sequence[Work]) -> float:
    return sum(map(attrgetter("flops"), works), 0.0)


def _places(program: Program, work: Work) -> list[int]:
    """The places of the parameters that are multiplied unchanged, transposed or cast."""
    operands = list(map(set, filter(None, work.of)))  # scalars have no dimensions
    places: list[int] = []
    for place, value in enumerate(program.parameters):
        if any(dims.issubset(value.nodes) for dims in operands):
            places.append(place)
    return places


def _no_rows(reasons: Reasons, work: Work) -> str:
    """Why work is not divided if the batch is not split."""
    program = reasons.decision.program
    batch = "there is no batch"
    if program.batch.of_inputs:
        batch = "the batch is not split"
    places = _places(program, work)
    if not places or reasons.decision.n == 1:
        return batch
    why = reasons.not_computed(places[0])
    if not why:
        return batch
    return f"{batch}, and {why}"


def _rows_reason(program: Program, count: int) -> Callable[[Work], str]:
    """Returns a function that gives the reason if the batch is split over `count` devices."""
    graph = program.graph
    if program.batch.splits_examples:
        return lambda work: "none of its dimensions is linked to the sequence"
    sizes = map("{:,}".format, sorted({graph.sizes[node] for node in program.batch.of_inputs}))
    batch = ", ".join(sizes)
    classes = Classes(graph, 1, soft=True, least=2)
    against = reasons_against(graph, classes, program.batch)

    def why(work: Work) -> str:
        for node in work.nodes:
            size = graph.sizes[node]
            rows = f"the {size:,} rows that the program makes"
            number = f"{rows} differ in number from the batch ({batch})"
            match against.get(classes[node]):
                case NotRows.REPLICATED:
                    return f"the program constrains {rows} to be replicated"
                case NotRows.OTHER_SIZE if size % count:
                    return f"{number}, and do not divide over {count} devices"
                case NotRows.OTHER_SIZE:
                    remedy = "`jax.lax.with_sharding_constraint` on them splits them too"
                    return f"{number}; {remedy}"
        return "none of its dimensions is linked to the batch"

    return why
