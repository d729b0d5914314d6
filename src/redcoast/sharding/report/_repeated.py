"""Arithmetic that every device does, how much of it there is, and why."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..program._graph import Work
from ..solver._batch import HELD, MET, WHOLE, reasons_against
from ..solver._classes import Classes
from ..solver._memory import arithmetic, sharing
from ..solver._strategy import Decision, Program, batch_dims, parts
from ..tree._leaves import Leaf
from ._reasons import Reasons
from ._text import shortened

# Below this part of a device's arithmetic it is not worth a sentence.
_LITTLE = 0.05


def repeated(
    leaves: Sequence[Leaf], decision: Decision, axes: Mapping[str, int], reasons: Reasons
) -> list[dict[str, Any]]:
    """What every device computes: `flops`, the `arrays` in it and `why`, the most first."""
    if parts(tuple(axes), axes) == 1:
        return []
    shared = sharing(decision, axes)
    alone = [work for work in decision.program.graph.works if shared(work.dims) == 1]
    everything = arithmetic(decision, axes)["per_device"]
    if sum(work.flops for work in alone) <= _LITTLE * everything:
        return []
    count = batch_dims(decision.program, parts(decision.way.batch, axes)).count
    rows = _Rows(decision.program, count) if count > 1 else None
    found: dict[str, tuple[float, set[int]]] = {}
    for work in alone:
        places = _places(decision.program, work)
        why = rows.why(work) if rows else _no_rows(decision.program, places, reasons)
        flops, known = found.get(why, (0.0, set()))
        found[why] = (flops + work.flops, known.union(places))
    ordered = sorted(found.items(), key=lambda item: -item[1][0])
    return [
        {"flops": flops, "arrays": shortened([leaves[p].name for p in sorted(known)]), "why": why}
        for why, (flops, known) in ordered
        if flops > _LITTLE * everything
    ]


def _places(program: Program, work: Work) -> list[int]:
    """The places of the parameters that are multiplied as they are, transposed or cast."""
    operands = [set(dims) for dims in work.of if dims]
    return [
        place
        for place, value in enumerate(program.parameters)
        if any(dims.issubset(value.dims) for dims in operands)
    ]


def _no_rows(program: Program, places: Sequence[int], reasons: Reasons) -> str:
    """Why work is not divided where there is no batch to divide it by."""
    over = parts(reasons.decision.way.model, reasons.axes)
    why = reasons.not_computed(places[0]) if places and over > 1 else ""
    batch = "the batch is not split" if program.batch.given else "there is no batch"
    return f"{batch}, and {why}" if why else batch


class _Rows:
    """Why work is not divided as the batch is."""

    def __init__(self, program: Program, count: int):
        graph, given = program.graph, program.batch.given
        self._graph, self._count = graph, count
        self._sizes = sorted({graph.sizes[node] for node in given})
        self._classes = Classes(graph, 1, soft=True, least=2)
        self._against = reasons_against(graph, self._classes, given)

    def why(self, work: Work) -> str:
        for node in work.dims:
            against, size = self._against.get(self._classes[node], ""), self._graph.sizes[node]
            # Experts and the like are no rows, unless there are as many.
            if against and (against != HELD or size in self._sizes):
                return self._sentence(size, against)
        return "none of its dimensions is linked to those of the batch"

    def _sentence(self, size: int, against: str) -> str:
        rows = f"the {size:,} rows that the program makes"
        if against == HELD:
            return f"{rows} are also a dimension that cannot be split with the batch"
        if against == MET:
            return f"most is done for {rows} together with those of the batch"
        if against == WHOLE:
            return f"the program constrains {rows} to be replicated"
        sizes = ", ".join(f"{size:,}" for size in self._sizes)
        few = f"{rows} are not as many as the batch has ({sizes})"
        if size % self._count:
            return f"{few}, and do not divide over {self._count} devices"
        return f"{few}; `jax.lax.with_sharding_constraint` on them splits them too"
