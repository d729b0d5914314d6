"""What a plan sends, by axis of the mesh and by cause, as it was priced."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from ..solver._cost import (
    batch_meetings,
    batch_sums,
    cut_sides,
    gathers,
    met,
    over_batch,
    reduced,
    sum_bytes,
)
from ..solver._hardware import Hardware, all_gather, all_reduce
from ..solver._strategy import Decision, batch_dims, parts, stored
from ..tree._overrides import spec_axes
from ..tree._rows import Row
from ._reasons import Set, find_sets
from ._text import shortened

Add = Callable[[str, str, int | float], None]
_GRADIENTS = "gradients, summed over the batch"


def traffic(
    rows: Sequence[Row], decision: Decision, axes: Mapping[str, int], hardware: Hardware
) -> list[dict[str, Any]]:
    """Bytes that each device sends in a step: `axis`, `cause` and `bytes`, largest first."""
    batch = batch_dims(decision.program, parts(decision.way.batch, axes))
    n = parts(decision.way.model, axes)
    over = " x ".join(axis for axis in decision.way.model if axes[axis] > 1)
    sent: dict[tuple[str, str], float] = {}

    def add(axis: str, cause: str, size: int | float) -> None:
        if size > 0:
            sent[axis, cause] = sent.get((axis, cause), 0.0) + size

    sets = find_sets([row.leaf for row in rows], decision, axes)
    spread = " x ".join(axis for axis in decision.way.batch if axes[axis] > 1)
    graph = decision.program.graph
    for found in reduced(graph.sums.values(), decision.classes, hardware):
        root = decision.classes[found.node]
        way = "backward" if found.backward else "forward"
        if decision.classes.divides(found.node) and root in decision.chosen:
            size = sum_bytes(found, hardware) / batch.parts(found.dims)
            cause = f"all-reduces of activations, {way}: {sets[root].names}"
            add(over, cause, all_reduce(n, size))
    for found in batch_sums(graph, batch, hardware):
        way = "backward" if found.backward else "forward"
        split = n if _is_split(decision, found.dims) else 1
        size = over_batch(found, batch, stored(decision.way, axes), hardware)
        gradient = found.backward and batch.parts(found.dims) == 1
        add(spread, _GRADIENTS if gradient else f"sums over the batch, {way}", size / split)
    for meeting in batch_meetings(graph, batch):
        split = n if _is_split(decision, meeting.dims) else 1
        add(spread, "gathers of the batch, compared with itself", met(meeting, batch) / split)
    _cuts(decision, batch, (over, n), sets, add)
    _gathers(rows, decision, axes, add)
    ordered = sorted(sent.items(), key=lambda item: (-item[1], item[0]))
    return [{"axis": a, "cause": c, "bytes": round(size)} for (a, c), size in ordered]


def _is_split(decision: Decision, dims: Sequence[int]) -> bool:
    classes = decision.classes
    return any(classes.divides(n) and classes[n] in decision.chosen for n in dims)


def _cuts(
    decision: Decision, batch: Any, axis: tuple[str, int], sets: Mapping[int, Set], add: Add
) -> None:
    over, n = axis
    for cut in decision.program.graph.cuts:
        for root, size in cut_sides(cut, decision.classes, batch):
            if root in decision.chosen:
                add(over, f"gathers where a split ends: {sets[root].names}", all_gather(n, size))


def _gathers(rows: Sequence[Row], decision: Decision, axes: Mapping[str, int], add: Add) -> None:
    """What is stored split is gathered, over the axes not computed over."""
    found: dict[str, list[tuple[Row, float]]] = {}
    for row, value, d in zip(rows, decision.program.parameters, decision.computed, strict=True):
        entries = [*row.spec, *[None] * (len(value.dims) - len(row.spec))]
        kept = set() if d is None else set(spec_axes(entries[d]))
        used = {axis for entry in entries for axis in spec_axes(entry)}
        over = [axis for axis in axes if axis in used - kept]
        size = value.bytes * gathers(decision.program.graph, value)
        size = all_gather(parts(over, axes), size / prod(axes[axis] for axis in kept))
        found.setdefault(" x ".join(over), []).append((row, size))
    for over, gathered in found.items():
        names = shortened([row.leaf.name for row, _ in gathered])
        add(over, f"gathers of parameters: {names}", sum(size for _, size in gathered))
