"""Replicates arrays whose sharding over `model` only saves memory, if there is enough memory."""

from collections import defaultdict
from dataclasses import replace

from ...distributed._mesh import BATCH_AXES
from .._mesh_axes import parts
from ..tree._overrides import model_dim, spec_parts
from ._hardware import FILLED
from ._layout import StorageLayout
from ._memory_estimate import estimate_memory

# The part of the free memory that replicated arrays may use. Programs for accelerators used up to
# 1.4 times the estimate (experiments/benchmarks/meshes.py), and must still fit.
_FRACTION = 0.25


def replicate(layout: StorageLayout, memory: int | float, state_bytes: int) -> StorageLayout:
    """The layout with arrays replicated over `model` as far as memory is left.

    Sharding these arrays costs communication in every step and saves no arithmetic: arrays that are
    only sharded in storage are all-gathered, and lookups in a sharded table are all-reduced. The
    smallest are replicated first, as long as all of them use a small part of the free memory. If
    the batch is sharded, none are replicated, because their gradients would be larger.
    """
    decision = layout.decision
    axes = decision.sizes
    if decision.batch_axes != BATCH_AXES or parts(BATCH_AXES, axes) > 1 or axes["model"] == 1:
        return layout
    # What is free with everything sharded.
    used = estimate_memory(layout, state_bytes).total
    room = _FRACTION * (FILLED * memory - used)
    parameters = decision.program.parameters
    trained_bytes = sum(value.grad * value.bytes for value in parameters)
    states = state_bytes / max(1, trained_bytes)

    def extra_bytes(place: int) -> float:
        """Additional bytes per device if an array is replicated."""
        value = parameters[place]
        part = value.bytes / spec_parts(layout.specs[place], axes)
        return (axes["model"] - 1) * part * (1 + value.grad * (1 + states))

    # Sets of arrays of the same size, such as those of repeated layers, are treated alike.
    by_size: dict[float, list[int]] = defaultdict(list)
    for places in _memory_only(layout):
        by_size[sum(map(extra_bytes, places))].extend(places)
    replicated: set[int] = set()
    for size in sorted(by_size):
        # All layers or none: half of them replicated would make layers unlike.
        room -= sum(map(extra_bytes, by_size[size]))
        if room < 0:
            break
        replicated.update(by_size[size])
    if not replicated:
        return layout
    # Without tensor parallelism for these arrays and the classes they are in.
    dropped: set[int] = set()
    for place in replicated:
        d = decision.parallel_dims[place]
        if d is not None:
            dropped.add(decision.classes[parameters[place].nodes[d]])
    decision = replace(decision, chosen=decision.chosen - dropped)
    return replace(layout, decision=decision, replicated=frozenset(replicated))


def _memory_only(layout: StorageLayout) -> list[list[int]]:
    """Sets of arrays whose sharding over `model` only saves memory, each of one class."""
    decision = layout.decision
    classes, program = decision.classes, decision.program
    # The classes whose sharding saves arithmetic or activations.
    needed: set[int] = set()
    for work in program.graph.works:
        needed |= classes.of(filter(classes.divides, work.nodes))
    for dims in program.graph.saved:
        needed |= classes.of(filter(classes.divides, dims))
    stored: list[list[int]] = []
    by_class: dict[int, list[int]] = defaultdict(list)
    for place, d in enumerate(decision.parallel_dims):
        is_override = place in layout.overrides
        if d is not None:
            root = classes[program.parameters[place].nodes[d]]
            by_class[root].append(place)
            if is_override:
                needed.add(root)
        elif not is_override and model_dim(layout.specs[place]) is not None:
            stored.append([place])
    free = [places for root, places in by_class.items() if root not in needed]
    return stored + free
