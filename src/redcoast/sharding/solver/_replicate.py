"""Replicates arrays whose sharding over `model` only saves memory, if there is enough memory."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from ..tree._leaf_plans import OVERRIDE, LeafPlan
from ..tree._overrides import spec_axes, spec_parts
from ._memory import FILLED, estimate_memory
from ._strategy import DEFAULT, Decision, computed_dims, parts

# The part of the free memory that replicated arrays may use. Programs for accelerators used up to
# 1.4 times the estimate (experiments/benchmarks/meshes.py), and must still fit.
_FRACTION = 0.25


def replicate(
    plans: Sequence[LeafPlan],
    decision: Decision,
    axes: Mapping[str, int],
    memory: int | float,
    state_bytes: int,
) -> tuple[Decision, frozenset[int]]:
    """Returns the decision without the arrays that are replicated over `model`, and their indices.

    Sharding these arrays costs communication in every step and saves no arithmetic: arrays that are
    only sharded in storage are all-gathered, and lookups in a sharded table are all-reduced. The
    smallest are replicated first, as long as all of them use a small part of the free memory. If
    the batch is sharded, none are replicated, because their gradients would be larger.
    """
    batch = parts(decision.strategy.batch, axes)
    if decision.strategy != DEFAULT or axes["model"] == 1 or batch > 1:
        return decision, frozenset()
    left = _FRACTION * (FILLED * memory - estimate_memory(plans, decision, axes, state_bytes).total)
    parameters = decision.program.parameters
    states = state_bytes / max(1, sum(value.grad * value.bytes for value in parameters))

    def extra_bytes(place: int) -> float:
        """Additional bytes per device if an array is replicated."""
        value = parameters[place]
        part = value.bytes / spec_parts(plans[place].spec, axes)
        return (axes["model"] - 1) * part * (1 + value.grad * (1 + states))

    size = lambda places: sum(map(extra_bytes, places))
    replicated: set[int] = set()
    # Arrays of the same size, such as those of repeated layers, are treated alike.
    for _, alike in groupby(sorted(_memory_only(plans, decision), key=size), key=size):
        places = [place for one in alike for place in one]
        left -= size(places)
        if left < 0:
            break
        replicated.update(places)
    # Without tensor parallelism for these arrays and the classes they are in.
    split = [(parameters[place], decision.computed[place]) for place in replicated]
    classes = decision.classes
    chosen = decision.chosen - {classes[value.dims[d]] for value, d in split if d is not None}
    computed = computed_dims(decision.program, classes, chosen)
    return replace(decision, chosen=chosen, computed=computed), frozenset(replicated)


def _memory_only(plans: Sequence[LeafPlan], decision: Decision) -> list[list[int]]:
    """Sets of arrays whose sharding over `model` only saves memory, each of one class."""
    classes, program = decision.classes, decision.program
    busy = [work.dims for work in program.graph.works]
    busy += [dims for dims, _ in program.graph.saved]
    needed = classes.of(node for dims in busy for node in dims if classes.divides(node))
    stored: list[list[int]] = []
    together: dict[int, list[int]] = defaultdict(list)
    for place, (row, d) in enumerate(zip(plans, decision.computed, strict=True)):
        if d is not None:
            together[classes[program.parameters[place].dims[d]]].append(place)
        elif any("model" in spec_axes(entry) for entry in row.spec) and row.reason != OVERRIDE:
            stored.append([place])
    free = (places for root, places in together.items() if root not in needed)
    own = lambda places: all(plans[place].reason != OVERRIDE for place in places)
    return stored + list(filter(own, free))
