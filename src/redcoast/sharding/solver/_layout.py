"""Where the arrays of a model are stored: the spec of each one, for a decision."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from jax.sharding import PartitionSpec as P

from ...distributed._mesh import PIPE
from .._mesh_axes import parts, used_axes
from ..program._batch_dims import Entries
from ..program._graph import Value
from ..program._program import Program
from ..tree._leaf_plans import trim_spec
from ..tree._leaves import LARGE
from ._strategy import Decision

# The axes over which arrays can be sharded that the program computes with as a whole.
STORAGE_AXES = ("fsdp", "model")


def is_large(program: Program, value: Value) -> bool:
    """Whether an array is sharded even if it has to be all-gathered where it is used."""
    of_layer = 1  # elements; a scan gathers one layer at a time
    for node, size in zip(value.dims, value.shape, strict=True):
        if node not in program.graph.stacks:
            of_layer *= size
    return of_layer >= LARGE


@dataclass(frozen=True)
class StorageLayout:
    """A decision, and how arrays are stored, by their places in the model.

    Arrays that are `fsdp_sharded` are sharded whatever that costs, but over `fsdp` alone if they
    are `replicated` over `model`. `overrides` are the specs that a user has decided.
    """

    decision: Decision
    fsdp_sharded: Sequence[bool]
    overrides: Mapping[int, P]
    replicated: frozenset[int] = frozenset()

    @cached_property
    def specs(self) -> list[P]:
        """The spec of each array of the model."""
        specs: list[P] = []
        staged = self.decision.program.staged
        for place in range(len(self.decision.program.parameters)):
            if place in self.overrides:
                specs.append(self.overrides[place])  # as it is, without `fsdp` beside it
                continue
            spec = self._spec(place)
            if staged is not None and place in staged.layered:
                spec = P(PIPE, *spec[1:])  # the first dimension counts layers
            specs.append(spec)
        return specs

    def _spec(self, place: int) -> P:
        decision = self.decision
        value = decision.program.parameters[place]
        model_axes, fsdp_axes = decision.model_axes, ("fsdp",)
        if "model" in decision.batch_axes:
            # If the batch is split over all axes, an array that is sharded over the last two along
            # one dimension has a gradient that can be reduce-scattered.
            model_axes = STORAGE_AXES
        if "fsdp" in model_axes:
            fsdp_axes = ()  # an axis can shard one dimension alone
        model, fsdp = used_axes(model_axes, decision.sizes), used_axes(fsdp_axes, decision.sizes)
        entries: Entries = [None] * len(value.dims)
        computed, is_sharded = decision.computed[place], self.fsdp_sharded[place]
        if computed is not None:
            entries[computed] = model
        elif is_sharded and model and place not in self.replicated:
            self._shard(value, entries, model)
        if is_sharded and fsdp:
            # A tensor-parallel array is stored in parts along a second dimension.
            self._shard(value, entries, fsdp)
        return trim_spec(entries)

    def _shard(self, value: Value, entries: Entries, over: tuple[str, ...]) -> None:
        """Shards the largest dimension that divides over all of the axes, or else one over each.

        It is neither a layer count nor a window. The first of equal dimensions is taken.
        """
        classes, sizes = self.decision.classes, self.decision.sizes
        n, blocked = parts(over, sizes), classes.of(self.decision.program.graph.blocked)
        largest: int | None = None
        for d, (node, size) in enumerate(zip(value.dims, value.shape, strict=True)):
            divides = size > 0 and size % n == 0
            if entries[d] is not None or not divides or classes[node] in blocked:
                continue
            if largest is None or size > value.shape[largest]:
                largest = d
        if largest is not None:
            entries[largest] = over
        elif len(over) > 1:
            for axis in over:
                self._shard(value, entries, (axis,))
