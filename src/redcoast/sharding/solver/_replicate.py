"""Arrays for which `model` saves nothing but memory, whole where there is plenty of it."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from ..tree._overrides import spec_axes, spec_parts
from ..tree._rows import OVERRIDE, Row
from ._memory import FILLED, estimate
from ._strategy import USUAL, Decision, computed_dims, parts

# So much of what an estimate leaves. Programs for accelerators were seen to take up to 1.4 times
# the estimate (experiments/benchmarks/meshes.py), and what fits must go on fitting.
_SPENT = 0.25


def spare(
    rows: Sequence[Row],
    decision: Decision,
    axes: Mapping[str, int],
    memory: int | float,
    state_bytes: int,
) -> tuple[Decision, frozenset[int]]:
    """The places of arrays that need not be split over `model`, and a decision without them.

    Each of them costs communication in every step, and no arithmetic is saved by that: what is only
    stored split is gathered, and what is looked up in parts is added up. The smallest of them are
    taken, as long as all together need a small part of the memory that is left. There are none
    where the batch is split, since gradients are summed over it, whole ones or parts.
    """
    if decision.way != USUAL or axes["model"] == 1 or parts(decision.way.batch, axes) > 1:
        return decision, frozenset()
    left = _SPENT * (FILLED * memory - estimate(rows, decision, axes, state_bytes)["total"])
    parameters = decision.program.parameters
    states = state_bytes / max(1, sum(value.grad * value.bytes for value in parameters))

    def more(place: int) -> float:
        """Bytes on each device for a whole array in the place of a part."""
        value = parameters[place]
        part = value.bytes / spec_parts(rows[place].spec, axes)
        return (axes["model"] - 1) * part * (1 + value.grad * (1 + states))

    size = lambda places: sum(map(more, places))
    spared: set[int] = set()
    # Arrays that are alike, as those of layers, are treated alike.
    for _, alike in groupby(sorted(_idle(rows, decision), key=size), key=size):
        places = [place for one in alike for place in one]
        left -= size(places)
        if left < 0:
            break
        spared.update(places)
    return _without(decision, spared), frozenset(spared)


def _without(decision: Decision, places: set[int]) -> Decision:
    """The decision if these arrays, and whatever is split with them, are not computed split."""
    split = [(decision.program.parameters[place], decision.computed[place]) for place in places]
    classes = decision.classes
    chosen = decision.chosen - {classes[value.dims[d]] for value, d in split if d is not None}
    computed = computed_dims(decision.program, classes, chosen)
    return replace(decision, chosen=chosen, computed=computed)


def _idle(rows: Sequence[Row], decision: Decision) -> list[list[int]]:
    """Arrays, in sets that are split together, of which `model` only spares memory."""
    classes, program = decision.classes, decision.program
    busy = [work.dims for work in program.graph.works] + list(program.graph.saved)
    needed = classes.of(node for dims in busy for node in dims if classes.divides(node))
    stored: list[list[int]] = []
    together: dict[int, list[int]] = defaultdict(list)
    for place, (row, d) in enumerate(zip(rows, decision.computed, strict=True)):
        if d is not None:
            together[classes[program.parameters[place].dims[d]]].append(place)
        elif any("model" in spec_axes(entry) for entry in row.spec) and row.reason != OVERRIDE:
            stored.append([place])
    free = [
        places
        for root, places in together.items()
        if root not in needed and all(rows[place].reason != OVERRIDE for place in places)
    ]
    return stored + free
