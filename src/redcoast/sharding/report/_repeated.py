"""Arithmetic that every device does, how much of it there is, and why."""

from collections.abc import Callable, Sequence
from functools import partial

from ..program._graph import Work
from ..solver._batch import OF_PARAMETERS, REPLICATED, WITH_BATCH, reasons_against
from ..solver._classes import Classes
from ..solver._memory import arithmetic, sharing
from ..solver._strategy import Program, batch_of, parts
from ._data import Repeated
from ._reasons import Reasons
from ._text import grouped, shortened

# Smaller shares of a device's arithmetic are not reported.
_LITTLE = 0.05


def repeated(reasons: Reasons) -> tuple[Repeated, ...]:
    """The arithmetic that every device does, the most first."""
    decision, axes = reasons.decision, reasons.axes
    if parts(tuple(axes), axes) == 1:
        return ()
    shared, program = sharing(decision, axes), decision.program
    alone = [work for work in program.graph.works if shared(work.dims) == 1]
    least = _LITTLE * arithmetic(decision, axes).per_device
    if sum(work.flops for work in alone) <= least:
        return ()
    count = batch_of(decision, axes).count
    why = _rows_reason(program, count) if count > 1 else partial(_no_rows, reasons)
    found = []
    for text, works in grouped(alone, why).items():
        places = {place for work in works for place in _places(program, work)}
        names = shortened([reasons.leaves[place].name for place in sorted(places)])
        found.append(Repeated(sum((work.flops for work in works), 0.0), names, text))
    return tuple(one for one in sorted(found, key=lambda one: -one.flops) if one.flops > least)


def _places(program: Program, work: Work) -> list[int]:
    """The places of the parameters that are multiplied unchanged, transposed or cast."""
    operands = [set(dims) for dims in work.of if dims]
    values = enumerate(program.parameters)
    return [place for place, x in values if any(dims.issubset(x.dims) for dims in operands)]


def _no_rows(reasons: Reasons, work: Work) -> str:
    """Why work is not divided if the batch is not split."""
    program = reasons.decision.program
    places = _places(program, work)
    why = reasons.not_computed(places[0]) if places and reasons.n > 1 else ""
    batch = "the batch is not split" if program.batch.given else "there is no batch"
    return f"{batch}, and {why}" if why else batch


def _rows_reason(program: Program, count: int) -> Callable[[Work], str]:
    """Returns a function that gives the reason if the batch is split over `count` devices."""
    graph, given = program.graph, program.batch.given
    if program.batch.sequence:
        return lambda work: "none of its dimensions is linked to the sequence"
    sizes = sorted({graph.sizes[node] for node in given})
    classes = Classes(graph, 1, soft=True, least=2)
    against = reasons_against(graph, classes, given)

    def why(work: Work) -> str:
        for node in work.dims:
            found, size = against.get(classes[node], ""), graph.sizes[node]
            # Dimensions such as experts are not rows, unless they have the size of the batch.
            if found and (found != OF_PARAMETERS or size in sizes):
                return _sentence(size, found, sizes, count)
        return "none of its dimensions is linked to the batch"

    return why


def _sentence(size: int, against: str, batch: Sequence[int], count: int) -> str:
    rows = f"the {size:,} rows that the program makes"
    if against == OF_PARAMETERS:
        return f"{rows} are also a dimension that cannot be split with the batch"
    if against == WITH_BATCH:
        return f"most operations on {rows} are combined with rows of the batch"
    if against == REPLICATED:
        return f"the program constrains {rows} to be replicated"
    few = f"{rows} differ in number from the batch ({', '.join(f'{n:,}' for n in batch)})"
    if size % count:
        return f"{few}, and do not divide over {count} devices"
    return f"{few}; `jax.lax.with_sharding_constraint` on them splits them too"
