"""Where the arrays of a model are stored: the spec of each one, for a decision."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from jax.sharding import PartitionSpec as P

from ...distributed._mesh import PIPE
from .._mesh_axes import parts, used_axes
from ..pipeline._stages import Pipeline
from ..program._batch_dims import Entries
from ..program._graph import Cursor, Nodes, Value
from ..program._program import Program
from ..tree._leaf_plans import trim_spec
from ..tree._leaves import LARGE
from ..tree._overrides import axes_of_spec, spec_axes, spec_parts
from ._buffers import ModelArray, WrittenBytes
from ._hardware import scatters_over
from ._memory_access import padding
from ._peak import find_peak
from ._planned_collectives import cast_share, parts_together
from ._strategy import Decision

_FLOAT32 = 4  # bytes
# The axes over which arrays can be sharded that the program computes with as a whole.
STORAGE_AXES = ("fsdp", "model")


def is_large(program: Program, value: Value) -> bool:
    """Whether an array is sharded even if it has to be all-gathered where it is used."""
    of_layer = 1  # elements; a scan gathers one layer at a time
    for node, size in zip(value.nodes, value.shape, strict=True):
        if node not in program.graph.stacks:
            of_layer *= size
    return of_layer >= LARGE


@dataclass(frozen=True)
class StorageLayout:
    """A decision, and how arrays are stored, by their places in the model.

    Arrays that are `stored_in_parts` are sharded whatever that costs, but over `fsdp` alone if they
    are `replicated` over `model`. `overrides` are the specs that a user has decided. `updated` are
    the arrays that an optimizer updates element by element, with the bytes of its state for each. A
    step adds up the gradients of `accumulate` runs of the program.
    """

    decision: Decision
    stored_in_parts: Sequence[bool]
    overrides: Mapping[int, P]
    updated: Mapping[int, int] = field(default_factory=dict)
    replicated: frozenset[int] = frozenset()
    accumulate: int = 1

    @cached_property
    def specs(self) -> list[P]:
        """The spec of each array of the model."""
        specs: list[P] = []
        for place in range(len(self.decision.program.parameters)):
            if place in self.overrides:
                specs.append(self.overrides[place])  # as it is, without `fsdp` beside it
                continue
            spec = self._spec(place)
            if place in self.decision.layered:
                spec = P(PIPE, *spec[1:])  # the first dimension counts layers
            specs.append(spec)
        return specs

    @cached_property
    def update_specs(self) -> dict[int, P]:
        """How arrays are divided over the devices of the batch, which all have copies of them, to
        be updated.

        Gradients are reduce-scattered then, each device updates a part, and the parts are
        all-gathered, which together sends as much as an all-reduce (arXiv:2004.13336). Gradients
        of what the program casts are summed in the narrower dtype, and gathers would send more.
        """
        decision, specs = self.decision, dict[int, P]()
        over = decision.used_batch_axes
        if decision.pipeline is not None or not over:
            return specs
        for place in self.updated:
            value, spec = decision.program.parameters[place], self.specs[place]
            has_copies = set(over).isdisjoint(axes_of_spec(spec)) and place not in self.overrides
            is_cast = cast_share(decision.program.graph, value) < 1
            if not has_copies or is_cast or not is_large(decision.program, value):
                continue
            entries: Entries = [None] * len(value.nodes)
            for d, entry in enumerate(spec):
                entries[d] = spec_axes(entry) or None
            self._shard(value, entries, over)
            divided = trim_spec(entries)
            if divided != trim_spec([*spec]):
                specs[place] = divided
        return specs

    @cached_property
    def gradient_bytes(self) -> list[float]:
        """Bytes per device of the gradient of each array as a run of the program returns it.

        An optimizer that updates an array element by element casts the gradient where it reads it.
        """
        sizes: list[float] = []
        for place, value in enumerate(self.decision.program.parameters):
            spec = self.specs[place]
            if scatters_over(self.decision.hardware, self.decision.batch.count):
                spec = self.update_specs.get(place, spec)
            size = value.grad * value.bytes / spec_parts(spec, self.decision.sizes)
            if place in self.updated:
                size *= cast_share(self.decision.program.graph, value)
            sizes.append(size)
        return sizes

    @property
    def summed_gradients(self) -> float:
        """Bytes per device of gradients until the update; those of several runs are added up in
        float32."""
        if self.accumulate == 1:
            return sum(self.gradient_bytes, 0.0)
        total = 0.0
        for place, value in enumerate(self.decision.program.parameters):
            wide = value.bytes * max(1.0, _FLOAT32 / value.itemsize)
            spec = self.update_specs.get(place, self.specs[place])
            total += value.grad * wide / spec_parts(spec, self.decision.sizes)
        return total

    @cached_property
    def activation_parts(self) -> tuple[WrittenBytes, ...]:
        """Bytes per device of intermediate values at the peak, and the operation of each."""
        decision = self.decision
        if decision.pipeline is not None:
            return self._pipeline_activations(decision.pipeline)
        program, sizes, compiler = decision.program, decision.sizes, decision.hardware.compiler
        shares: dict[tuple[Nodes, bool], int | float] = {}  # of an array, that each device has

        def size_of(value: Value, *, of_product: bool = False) -> int | float:
            key = value.nodes, of_product
            if key not in shares:
                shares[key] = 1 / decision.devices_of(value.nodes, of_product=of_product)
                if compiler == "tpu":
                    local: list[int] = []
                    for size, axes in zip(value.shape, decision.axes_of(value.nodes), strict=True):
                        local.append(max(1, size // parts(axes or (), sizes)))
                    shares[key] *= padding(local)
            return value.bytes * shares[key]

        arrays: list[ModelArray] = []
        for spec, value, d, gradient in zip(
            self.specs,
            program.parameters,
            decision.parallel_dims,
            self.gradient_bytes,
            strict=True,
        ):
            share, split = spec_parts(spec, sizes), 1
            if d is not None:
                split = decision.n
            in_use = value.bytes / split  # of a device, while it is computed with
            local = in_use
            if share > split and not program.graph.is_stacked(value):
                # What is gathered after a cast has its gradient summed before that of the cast.
                local *= cast_share(program.graph, value)
            arrays.append(
                ModelArray(
                    stored=value.bytes / share,
                    gathered=in_use * (share > split),  # 0 if it is stored as it is used
                    gradient=gradient,
                    local=value.grad * local * (decision.batch.count > 1),  # before it is summed
                    first_use=program.graph.first_use.get(value.nodes, Cursor()).source,
                )
            )
        peak = find_peak(
            program.scope,
            size_of,
            arrays,
            compiler=compiler,
            trains=program.traced.trains,
            gathered_size_of=partial(size_of, of_product=True),
            together=parts_together(program.graph, decision.batch),
            keeps_gradients=self.accumulate == 1,
        )
        if self.accumulate > 1:
            return peak.parts
        # Gradients are counted by themselves. Those that come later leave their memory until then.
        scale = max(0.0, peak.bytes - self.summed_gradients) / max(1.0, peak.temporaries)
        return tuple((size * scale, source) for size, source in peak.parts)

    def _pipeline_activations(self, pipeline: Pipeline) -> tuple[WrittenBytes, ...]:
        """The activations of a pipeline, whose microbatches are not followed one by one."""
        decision = self.decision
        of_stage, saved, gradients, in_use = decision.of_stage, 0.0, 0.0, 0.0
        # A stage saves what it computes at every tick, at those of the bubble too.
        computed = pipeline.ticks / pipeline.microbatches
        for dims, size in of_stage.program.graph.saved.items():
            saved += computed * size / of_stage.devices_of(dims)
        # Layers are gathered while they run, over all axes but `model`, and so are gradients.
        for place in pipeline.layered:
            value = decision.program.parameters[place]
            gathered = value.bytes / pipeline.stages
            if decision.parallel_dims[place] is not None:
                gathered /= decision.n
            own = value.bytes / spec_parts(self.specs[place], decision.sizes)
            in_use += (1 + value.grad) * (gathered - own)
            gradients += value.grad * own
        if self.accumulate > 1:
            # The ticks of one run of the program add up a gradient beside that of all runs.
            in_use += gradients
        if decision.batch.count > 1:
            # What is summed over the devices is written where values were saved.
            saved = max(saved, gradients)
        # The microbatches that enter and leave.
        carried, _ = pipeline.carried_bytes
        carried /= decision.batch.count
        in_use += 2 * carried * computed
        return (saved, ()), (in_use, ())

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
        entries: Entries = [None] * len(value.nodes)
        parallel, is_stored_in_parts = decision.parallel_dims[place], self.stored_in_parts[place]
        if parallel is not None:
            entries[parallel] = model
        elif is_stored_in_parts and model and place not in self.replicated:
            self._shard(value, entries, model)
        if is_stored_in_parts and fsdp:
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
        for d, (node, size) in enumerate(zip(value.nodes, value.shape, strict=True)):
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
