"""Replicates arrays whose sharding over `model` only saves memory, if there is enough memory."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from ...distributed._mesh import BATCH_AXES
from .._mesh_axes import parts
from ..tree._leaf_plans import OVERRIDE, LeafPlan
from ..tree._overrides import spec_axes, spec_parts
from ._memory import FILLED, estimate_memory
from ._strategy import Decision

# The part of the free memory that replicated arrays may use. Programs for accelerators used up to
# 1.4 times the estimate (experiments/benchmarks/meshes.py), and must still fit.
_FRACTION = 0.25


def replicate(
    plans: Sequence[LeafPlan],
    decision: Decision,
    memory: int | float,
    state_bytes: int,
) -> tuple[Decision, frozenset[int]]:
    """Returns the decision without the arrays that are replicated over `model`, and their indices.

    Sharding these arrays costs communication in every step and saves no arithmetic: arrays that are
    only sharded in storage are all-gathered, and lookups in a sharded table are all-reduced. The
    smallest are replicated first, as long as all of them use a small part of the free memory. If
    the batch is sharded, none are replicated, because their gradients would be larger.
    """
    axes = decision.sizes
    if decision.batch_axes != BATCH_AXES or parts(BATCH_AXES, axes) > 1 or axes["model"] == 1:
        return decision, frozenset()
    # What is free with everything sharded.
    used = estimate_memory(plans, decision, state_bytes).total
    left = _FRACTION * (FILLED * memory - used)
    parameters = decision.program.parameters
    trained_bytes = sum(value.grad * value.bytes for value in parameters)
    states = state_bytes / max(1, trained_bytes)

    def extra_bytes(place: int) -> float:
        """Additional bytes per device if an array is replicated."""
        value = parameters[place]
        part = value.bytes / spec_parts(plans[place].spec, axes)
        return (axes["model"] - 1) * part * (1 + value.grad * (1 + states))

    # Sets of arrays of the same size, such as those of repeated layers, are treated alike.
    by_size: dict[float, list[int]] = defaultdict(list)
    for places in _memory_only(plans, decision):
        by_size[sum(map(extra_bytes, places))].extend(places)
    replicated: set[int] = set()
    for size in sorted(by_size):
        # All layers or none: half of them replicated would make layers unlike.
        left -= sum(map(extra_bytes, by_size[size]))
        if left < 0:
            break
        replicated.update(by_size[size])
    # Without tensor parallelism for these arrays and the classes they are in.
    dropped: set[int] = set()
    for place in replicated:
        d = decision.computed[place]
        if d is not None:
            dropped.add(decision.classes[parameters[place].dims[d]])
    return replace(decision, chosen=decision.chosen - dropped), frozenset(replicated)


def _memory_only(plans: Sequence[LeafPlan], decision: Decision) -> list[list[int]]:
    """Sets of arrays whose sharding over `model` only saves memory, each of one class."""
    classes, program = decision.classes, decision.program
    # The classes whose sharding saves arithmetic or activations.
    needed: set[int] = set()
    for work in program.graph.works:
        needed |= classes.of(filter(classes.divides, work.dims))
    for dims, _ in program.graph.saved:
        needed |= classes.of(filter(classes.divides, dims))
    stored: list[list[int]] = []
    by_class: dict[int, list[int]] = defaultdict(list)
    for place, (plan, d) in enumerate(zip(plans, decision.computed, strict=True)):
        is_override = plan.reason == OVERRIDE
        if d is not None:
            root = classes[program.parameters[place].dims[d]]
            by_class[root].append(place)
            if is_override:
                needed.add(root)
        elif not is_override and any("model" in spec_axes(entry) for entry in plan.spec):
            stored.append([place])
    free = [places for root, places in by_class.items() if root not in needed]
    return stored + free
