"""Decides which dimensions of a tree's arrays to shard, from the program that uses them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress

from jax.sharding import PartitionSpec as P

from ...distributed._mesh import BATCH_AXES
from .._mesh_axes import parts, used_axes
from ..pipeline._stages import Pipeline
from ..program._batch_dims import BatchDims, Entries, batch_dims, batch_over
from ..program._classes import Classes, conflicts, splittable
from ..program._graph import Value, have_grad
from ..program._program import Constant, Program
from ..program._tensor_sequence import find_sequence
from ..tree._overrides import model_dim, spec_parts
from ._cost import Seconds, price
from ._eliminate import search_classes
from ._hardware import DEFAULT_MEMORY, Hardware, all_gather


@dataclass(frozen=True)
class PlanTask:
    """What is planned; `overrides` are the specs that a user decided, by the place of an array.

    The step adds up the gradients of `accumulate` runs of the program. Memory is estimated for what
    one stage of a `pipeline` runs.
    """

    program: Program
    axes: dict[str, int]
    overrides: Mapping[int, P]
    hardware: Hardware
    state_bytes: int
    updated: Mapping[int, int]  # as in a `StorageLayout`
    splits_sequence: bool = False  # between the tensor-parallel parts
    accumulate: int = 1
    pipeline: Pipeline | None = None

    @property
    def memory(self) -> int | float:
        if self.hardware.memory is None:
            return DEFAULT_MEMORY
        return self.hardware.memory


@dataclass(frozen=True, eq=False)
class Decision:
    """Which dimensions of a program are sharded over which axes of a mesh.

    Layers of a `pipeline` are divided over `pipe`.

    The batch is split over `batch_axes`, as far as it divides, and the classes that are `chosen`
    over `model_axes`. `hardware` is what the choice is for, and `sizes` are those of all axes.
    `cost` is the time of a step in parts, before arrays are replicated where memory is left. With
    `splits_sequence`, values between the tensor-parallel parts are sharded along the sequence. With
    `for_memory`, axes are used otherwise than they are named so that a step fits into memory.
    """

    program: Program
    hardware: Hardware
    sizes: Mapping[str, int]
    batch_axes: tuple[str, ...]
    model_axes: tuple[str, ...]
    classes: Classes
    chosen: frozenset[int]
    cost: Seconds
    splits_sequence: bool = False
    for_memory: bool = False
    pipeline: Pipeline | None = None

    @property
    def seconds(self) -> int | float:
        """The time of arithmetic and communication, but for what overlaps."""
        return self.cost.of_step(overlaps=self.hardware.overlaps)

    @property
    def n(self) -> int:
        """The number of devices that the chosen classes are sharded over."""
        return parts(self.model_axes, self.sizes)

    @property
    def used_model_axes(self) -> tuple[str, ...]:
        """Those of `model_axes` with more than one device."""
        return used_axes(self.model_axes, self.sizes)

    @property
    def of_stage(self) -> "Decision":
        """The decision for what one device runs: in a pipeline, the layers of a stage."""
        if self.pipeline is None:
            return self
        return replace(self, program=self.pipeline.stage_program)

    @property
    def layered(self) -> frozenset[int]:
        """The places of the arrays whose layers are divided over the stages of a pipeline."""
        if self.pipeline is None:
            return frozenset()
        return self.pipeline.layered

    @cached_property
    def batch(self) -> BatchDims:
        """The dimensions that are sharded with the batch."""
        return batch_over(self.program, self.batch_axes, self.sizes)

    @property
    def used_batch_axes(self) -> tuple[str, ...]:
        """Those of `batch_axes` over which the batch divides, with more than one device."""
        return used_axes(self.batch.over(self.batch_axes), self.sizes)

    @cached_property
    def parallel_dims(self) -> tuple[int | None, ...]:
        """The tensor-parallel dimension of each array of the tree, or None."""
        return tuple(map(self._dimension, self.program.parameters))

    @property
    def constants(self) -> list[tuple[Constant, Value, int | None]]:
        """The tensor-parallel dimension, or None, of each use of a planned constant."""
        large = self.program.large_constants
        return [(constant, value, self._dimension(value)) for constant, value in large]

    def is_chosen(self, node: int) -> bool:
        """Whether a dimension is tensor-parallel."""
        return self.classes.divides(node) and self.classes[node] in self.chosen

    def axes_of(self, dims: Sequence[int]) -> Entries:
        """The axes that each dimension of an array is sharded over."""
        return self.batch.axes_of(dims, self.is_chosen, self.model_axes)

    def is_parallel(self, dims: Sequence[int]) -> bool:
        """Whether an array with these dimensions is tensor-parallel."""
        return any(map(self.is_chosen, dims))

    def is_along_sequence(self, dims: Sequence[int]) -> bool:
        """Whether an array with these dimensions is sharded along the sequence, between the parts
        that are tensor-parallel."""
        roots = self.classes.of(filter(self.classes.divides, dims))
        return not self._sequence.isdisjoint(roots) and not self.is_parallel(dims)

    def devices_of(self, dims: Sequence[int], *, of_product: bool = False) -> int:
        """The number of devices that share an array with these dimensions.

        An operand or a result of a product (`of_product`) is not split along the sequence.
        """
        count = spec_parts(self.axes_of(dims), self.sizes)
        if not of_product and self.is_along_sequence(dims):
            count *= self.n
        return count

    @cached_property
    def _sequence(self) -> frozenset[int]:
        if not self.splits_sequence:
            return frozenset()
        return find_sequence(self.program, self.classes, self.chosen, self.batch, self.batch_axes)

    def _dimension(self, value: Value) -> int | None:
        for d, node in enumerate(value.nodes):
            if self.is_chosen(node):
                return d
        return None


@dataclass(frozen=True)
class _Strategy:
    """The mesh axes of the batch, and of tensor parallelism."""

    batch: tuple[str, ...]
    model: tuple[str, ...]


# The second is data parallelism over all axes, cheapest with many examples. The third uses `fsdp`
# for tensor parallelism too, where FSDP is not possible.
_DEFAULT = _Strategy(BATCH_AXES, ("model",))
_OTHERS = _Strategy((*BATCH_AXES, "model"), ("model",)), _Strategy(("data",), ("fsdp", "model"))


def best_strategy(
    task: PlanTask, stored_in_parts: Sequence[bool], excess: Callable[[Decision], int | float]
) -> Decision:
    """Returns the cheapest strategy for the mesh, with its cheapest set of tensor-parallel classes.

    `stored_in_parts` is whether each array is sharded in storage whatever that costs. `excess` are
    the bytes by which a step of a decision does not fit into memory.
    """
    program, sizes = task.program, task.axes
    # Overrides over `model` are computed with in parts, like chosen dimensions.
    forced: dict[int, int] = {}
    for place, spec in task.overrides.items():
        d = model_dim(spec)
        if d is not None:
            forced[place] = d
    # They shard dimensions over `model` alone, as only the default does. If the program's examples
    # are split, `_applies` finds the strategy with the same axes.
    strategies = [_DEFAULT]
    if program.batch.sets or not forced:
        strategies += _OTHERS
    applicable = (strategy for strategy in strategies if _applies(strategy, program, sizes))
    best = _solve(task, stored_in_parts, next(applicable), forced)
    for strategy in applicable:
        other = _solve(task, stored_in_parts, strategy, {})
        too_large, best_too_large = excess(other), excess(best)
        # What fits into memory is better than what does not, whatever it costs.
        if (too_large > 0) != (best_too_large > 0):
            if best_too_large:
                best = replace(other, for_memory=True)
            continue
        # Equal costs, up to rounding, leave the mesh as its axes ask for.
        margin = 1e-6
        if "fsdp" in strategy.model:
            if is_fsdp_possible(program, sizes) and too_large >= best_too_large:
                continue
            # Without FSDP each device keeps more: that must save a tenth of the communication.
            margin = 0.1
        # Another use of a mesh than its axes ask for must be faster whether communication hides
        # behind arithmetic or not, since it is an estimate that it does.
        if other.seconds > best.seconds:
            continue
        if other.cost.serial < best.cost.serial - margin * best.cost.communication:
            best = other
    return best


def is_fsdp_possible(program: Program, sizes: Mapping[str, int]) -> bool:
    """Whether a program can be trained with FSDP: it has gradients, and its batch is sharded over
    `fsdp`."""
    trains = have_grad(program.parameters)
    return trains and "fsdp" in batch_over(program, BATCH_AXES, sizes).over(BATCH_AXES)


def _applies(strategy: _Strategy, program: Program, sizes: Mapping[str, int]) -> bool:
    if program.batch.sets:
        if "fsdp" in strategy.model:
            return False
        over: set[str] = set()
        for split_set in program.batch.sets:
            over.update(split_set.axes)
        return over <= set(strategy.batch) and ("model" in over) == ("model" in strategy.batch)
    if program.batch.splits_examples:
        return strategy == _DEFAULT
    if "model" in strategy.batch:
        return sizes["model"] > 1 and batch_dims(program, parts(strategy.batch, sizes)).is_split
    return strategy == _DEFAULT or sizes["fsdp"] > 1


def gradient_shards(batch_axes: Sequence[str], sizes: Mapping[str, int]) -> int:
    """The number of devices that share the batch and each store a different shard."""
    return parts([axis for axis in batch_axes if axis != "data"], sizes)


def _solve(
    task: PlanTask, stored_in_parts: Sequence[bool], strategy: _Strategy, forced: Mapping[int, int]
) -> Decision:
    """The cheapest decision of a strategy. `forced` are dimensions of arrays, by their places."""
    program, sizes, hardware = task.program, task.axes, task.hardware
    graph, n = program.graph, parts(strategy.model, sizes)
    classes, batch = Classes(graph, n), batch_over(program, strategy.batch, sizes)
    # Without candidates, every array is computed with as a whole.
    candidates: list[int] = []
    if n > 1 and "model" not in strategy.batch:
        candidates = _candidates(program, classes, batch)
    against = conflicts(graph, classes, candidates)
    # Overrides are chosen whatever they cost, and rule out what an array has beside them.
    nodes = [program.parameters[place].nodes[d] for place, d in forced.items()]
    fixed = classes.of(nodes).intersection(candidates)
    decided = fixed.union(*map(against.__getitem__, fixed))
    free: dict[int, set[int]] = {}
    for root in candidates:
        if root not in decided:
            free[root] = against[root] - decided
    fsdp = sizes["fsdp"]
    if "fsdp" in strategy.model:
        fsdp = 1  # its devices are already those of tensor parallelism
    problem = price(
        graph,
        classes,
        batch,
        free,
        list(compress(program.parameters, stored_in_parts)),
        hardware,
        model=n,
        fsdp=fsdp,
        gradient_shards=gradient_shards(batch.over(strategy.batch), sizes),
    )
    picked = search_classes(problem)
    cost = problem.seconds(picked)
    # Every use of the batch waits for it, so nothing hides this.
    received = bytes_of_given_batch(program, strategy.batch, sizes)
    return Decision(
        program=program,
        hardware=hardware,
        sizes=sizes,
        batch_axes=strategy.batch,
        model_axes=strategy.model,
        classes=classes,
        chosen=fixed | picked,
        cost=replace(cost, exposed=cost.exposed + received / hardware.batch_bandwidth),
        splits_sequence=task.splits_sequence,
    )


def bytes_of_given_batch(
    program: Program, batch_axes: Sequence[str], sizes: Mapping[str, int]
) -> int | float:
    """Bytes that each device sends to all-gather the batch over `fsdp`.

    A batch is given split over `data` and `fsdp`, also if the plan splits it over `data` alone.
    """
    if "fsdp" in batch_axes:
        return 0
    batch = batch_dims(program, parts(BATCH_AXES, sizes))
    size = sum(value.bytes for value in program.examples if batch.parts(value.nodes[:1]) > 1)
    return all_gather(sizes["fsdp"], size / sizes["data"])


def _candidates(program: Program, classes: Classes, batch: BatchDims) -> list[int]:
    """The classes of parameter dimensions that can be sharded, in the order of the program."""
    graph = program.graph
    nodes: list[int] = []
    for value in program.parameters:
        nodes.extend(value.nodes)
    for _, value in program.large_constants:
        nodes.extend(value.nodes)
    free = splittable(graph, classes, nodes)
    # What counts rows is divided by the batch's axes already.
    free -= classes.of(filter(batch.has, range(len(graph.sizes))))
    # This order does not depend on the order of the leaves.
    in_order: list[int] = []
    for work in graph.works:
        in_order.extend(work.nodes)
    in_order.extend(partial_sum.node for partial_sum in graph.partial_sums.values())
    roots = dict.fromkeys(map(classes.__getitem__, [*in_order, *nodes]))
    return list(filter(free.__contains__, roots))
