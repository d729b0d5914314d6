"""Decides which dimensions of a tree's arrays to shard, from the program that uses them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod

from ...core._control_flow import open_jaxpr
from ...distributed._mesh import BATCH_AXES
from ..program._constants import Constant, find_constants
from ..program._graph import Cursor, Graph, Source, Value
from ..program._remat import Region
from ..program._shared_programs import once
from ..program._trace import Traced
from ..program._walk import Scope, walk
from ._batch import BatchNodes, find_batch
from ._batch_dims import BatchDims, SplitNodes
from ._classes import Classes, conflicts, splittable
from ._cost import Axes, Parameter, Prices, group, price
from ._eliminate import search_groups
from ._hardware import Hardware, all_gather


@dataclass(frozen=True)
class Program:
    """The graph and values of a traced function.

    `parameters` are the values of the tree, `batch_arrays` those of the batch, and `examples` the
    batch's arrays of rows.
    """

    traced: Traced
    graph: Graph
    scope: Scope
    parameters: tuple[Value, ...]
    batch_arrays: tuple[Value, ...]
    examples: tuple[Value, ...]
    batch: BatchNodes
    constants: tuple[Constant, ...] = ()  # arrays that the function closes over
    staged: "Staged | None" = None  # if it runs as a pipeline

    @cached_property
    def owned(self) -> frozenset[int]:
        """The dimensions of parameters and of large constants, along which no example is split."""
        values = (*self.parameters, *(value for _, value in self.planned))
        return frozenset(node for value in values for node in value.dims)

    @property
    def planned(self) -> list[tuple[Constant, Value]]:
        """Large arrays that the function closes over; they can be tensor-parallel."""
        return [(one, value) for one in self.constants if one.is_planned for value in one.values]


@dataclass(frozen=True)
class Staged:
    """How the layers of a program run as a pipeline.

    `outside` is the program without what is done in its layers. `layered` are the places of the
    arrays of layers, and `layers` the number of them in each scan. `carried` are the bytes of the
    batch that go from stage to stage, and `returned` those that have a gradient.
    """

    outside: Program
    stages: int
    microbatches: int
    layered: frozenset[int]
    layers: tuple[int, ...]
    carried: int
    returned: int

    @property
    def bubble(self) -> float:
        """The part of the time in which a stage waits for its first or after its last rows."""
        return 1 - self.microbatches / self.ticks

    @property
    def ticks(self) -> int:
        return self.microbatches + self.stages - 1

    @property
    def share(self) -> float:
        """The work of one stage, in the bubble too, relative to the work of all layers."""
        return self.ticks / self.microbatches / self.stages


@dataclass(frozen=True)
class Strategy:
    """The mesh axes of the batch, and of tensor parallelism."""

    batch: tuple[str, ...]
    model: tuple[str, ...]


# The second is data parallelism over all axes, cheapest with many examples. The third uses `fsdp`
# for tensor parallelism too, where FSDP is not possible.
DEFAULT = Strategy(BATCH_AXES, ("model",))
OTHERS = Strategy((*BATCH_AXES, "model"), ("model",)), Strategy(("data",), ("fsdp", "model"))


@dataclass(frozen=True)
class Decision:
    """The tensor-parallel dimensions.

    `computed` has the tensor-parallel dimension of each array of the tree, or None. `chosen` are
    the classes that are sharded over `strategy.model`. `seconds` is the estimated time of a step,
    `serial` the same if no communication hides behind arithmetic, and `communication` the part of
    the latter for communication.
    """

    computed: tuple[int | None, ...]
    strategy: Strategy
    program: Program
    classes: Classes
    chosen: frozenset[int]
    seconds: int | float
    serial: int | float
    communication: int | float


def follow_program(
    traced: Traced, trainable: Sequence[bool], skipped: frozenset[int] = frozenset()
) -> Program:
    """Follows every dimension through a traced function. Only trainable arrays have gradients.

    What is done in `skipped` scans, by the `id` of their equation, is not counted.
    """
    return once(_follow, traced, tuple(trainable), skipped)


def _follow(traced: Traced, trainable: Sequence[bool], skipped: frozenset[int]) -> Program:
    # Of a loss, only the first result is differentiated.
    places = range(len(traced.jaxpr.out_avals))
    differentiated = tuple(not traced.trains or place == 0 for place in places)
    used = (True,) * len(places)
    if traced.trains and traced.moved == traced.arrays:
        # The trained arrays of a returned model are not used.
        used = (*used[traced.moved :], *(not trained for trained in trainable))
    regions = Region(used), Region(differentiated, differentiated=True)
    graph = Graph(skipped=skipped, cursor=Cursor(regions))
    jaxpr = open_jaxpr(traced.jaxpr)
    grads = [*trainable, *(False for _ in jaxpr.invars[traced.arrays :])]
    pairs = zip(jaxpr.invars, grads, strict=True)
    inputs = [graph.value(var.aval, grad=grad and traced.trains) for var, grad in pairs]
    scope = walk(graph, traced.jaxpr, inputs)
    parameters, rest = tuple(inputs[: traced.arrays]), inputs[traced.arrays :]
    graph.of_parameters.update(node for value in parameters for node in value.dims)
    given = rest[: traced.batch]
    batch = find_batch(graph, given, rest[traced.batch :])
    rows = (value for place, value in enumerate(given) if place not in batch.left_out)
    examples = tuple(value for value in rows if value.dims)
    constants = find_constants(scope)
    return Program(traced, graph, scope, parameters, tuple(given), examples, batch, constants)


def best_strategy(
    program: Program,
    sizes: Mapping[str, int],
    sharded: Sequence[bool],
    hardware: Hardware,
    forced: Sequence[int | None] = (),
    excess: Callable[[Decision], int | float] = lambda _: 0,
) -> Decision:
    """Returns the cheapest strategy for the mesh, with its cheapest set of tensor-parallel classes.

    `sharded` is whether each array is sharded in storage whatever that costs. `forced` has the
    dimension of each array that must be tensor-parallel, or None. `excess` are the bytes by which
    the activations of a decision do not fit into memory.
    """
    parameters = list(map(Parameter, program.parameters, sharded))
    for _, value in program.planned:
        # Constants are always replicated in storage, so they are not gathered.
        parameters.append(Parameter(value, sharded=False))
    several = all(d is None for d in forced)
    strategies = (DEFAULT, *OTHERS) if several or program.batch.sets else (DEFAULT,)
    first, *rest = [one for one in strategies if _applies(one, program, sizes)]
    best = _solve(program, first, sizes, parameters, hardware, forced)
    for strategy in rest:
        other = _solve(program, strategy, sizes, parameters, hardware, ())
        too_large, best_too_large = excess(other), excess(best)
        if (too_large > 0) != (best_too_large > 0):
            best = best if too_large else other
            continue
        margin = 1e-6
        if "fsdp" in strategy.model:
            if is_fsdp_possible(program, sizes) and too_large >= best_too_large:
                continue
            margin = 0.1
        # Another use of a mesh than its axes ask for must be faster whether communication hides
        # behind arithmetic or not, since it is an estimate that it does.
        if other.seconds > best.seconds:
            continue
        if other.serial < best.serial - margin * best.communication:
            best = other
    return best


def is_fsdp_possible(program: Program, sizes: Mapping[str, int]) -> bool:
    """Whether a program can be trained with FSDP: it has gradients, and its batch is sharded over
    `fsdp`."""
    trains = any(value.grad for value in program.parameters)
    return trains and "fsdp" in split_axes(program, DEFAULT.batch, sizes)


def _applies(strategy: Strategy, program: Program, sizes: Mapping[str, int]) -> bool:
    if program.batch.sets:
        if "fsdp" in strategy.model:
            return False
        over = {axis for one in program.batch.sets for axis in one.axes}
        return over <= set(strategy.batch) and ("model" in over) == ("model" in strategy.batch)
    if program.batch.sequence:
        return strategy == DEFAULT
    if "model" in strategy.batch:
        return sizes["model"] > 1 and batch_dims(program, parts(strategy.batch, sizes)).is_split
    return strategy == DEFAULT or sizes["fsdp"] > 1


def parts(axes: Sequence[str], sizes: Mapping[str, int]) -> int:
    """The number of devices of these axes together."""
    return prod(sizes[axis] for axis in axes)


def used_axes(axes: Sequence[str], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Those of the axes that have more than one device."""
    return tuple(axis for axis in axes if sizes[axis] > 1)


def any_tensor_parallel(decision: Decision, dims: Sequence[int]) -> bool:
    """Whether an array with these dimensions is tensor-parallel."""
    classes = decision.classes
    return any(classes.divides(node) and classes[node] in decision.chosen for node in dims)


def stored(strategy: Strategy, sizes: Mapping[str, int]) -> int:
    """The number of devices that share the batch and each store a different shard."""
    return parts([axis for axis in strategy.batch if axis != "data"], sizes)


def _solve(
    program: Program,
    strategy: Strategy,
    sizes: Mapping[str, int],
    parameters: Sequence[Parameter],
    hardware: Hardware,
    forced: Sequence[int | None],
) -> Decision:
    graph, n = program.graph, parts(strategy.model, sizes)
    classes, batch = Classes(graph, n), batch_over(program, strategy.batch, sizes)
    fsdp = 1 if "fsdp" in strategy.model else sizes["fsdp"]
    axes = Axes(batch.count, fsdp, n, stored(strategy, sizes))
    free = n > 1 and "model" not in strategy.batch
    candidates = _candidates(program, classes, batch) if free else []
    pairs = zip(program.parameters, forced, strict=False)
    fixed = classes.of(value.dims[d] for value, d in pairs if d is not None)
    fixed = fixed.intersection(candidates)
    against = conflicts(graph, classes, candidates)
    taken = fixed.union(*(against[one] for one in fixed))
    candidates = [one for one in candidates if one not in taken]
    groups, price_of = _grouped(graph, classes, candidates, batch, parameters, axes)
    prices = price_of(hardware)
    picked = search_groups(prices.problem())
    chosen = fixed.union(one for one, number in groups.items() if number in picked)
    computed = computed_dims(program, classes, chosen)
    seconds = prices.seconds(picked)
    gathered = batch_gathers(program, strategy, sizes) / hardware.batch_bandwidth
    return Decision(
        computed,
        strategy,
        program,
        classes,
        chosen,
        seconds.of_step(overlaps=hardware.overlaps) + gathered,
        seconds.serial + gathered,
        seconds.communication + gathered,
    )


def batch_dims(program: Program, count: int) -> BatchDims:
    """The dimensions that are sharded with the batch over `count` devices, if that is possible."""
    batch = program.batch
    return BatchDims((_split_nodes(program, batch.given, batch.made, count),))


def _split_nodes(
    program: Program,
    given: Sequence[int],
    made: Sequence[int],
    count: int,
    axes: tuple[str, ...] = (),
) -> SplitNodes:
    classes = example_classes(program, count)
    if not any(map(classes.divides, given)):
        return SplitNodes(classes, frozenset(), 1)
    roots = frozenset(classes[node] for node in (*given, *made) if classes.divides(node))
    return SplitNodes(classes, roots, count, axes)


def example_classes(program: Program, count: int) -> Classes:
    """The classes of dimensions that are sharded with the batch."""
    apart = program.owned if program.batch.sequence else ()
    return Classes(program.graph, count, soft=True, apart=apart)


def split_axes(program: Program, axes: Sequence[str], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes that the batch is split over: fewer than are given if it does not divide."""
    if program.batch.sets:
        return tuple(axis for axis in axes if any(axis in one.axes for one in program.batch.sets))
    over = tuple(axes)
    while over and not batch_dims(program, parts(over, sizes)).is_split:
        over = over[:-1]
    return over


def batch_over(program: Program, axes: Sequence[str], sizes: Mapping[str, int]) -> BatchDims:
    """The dimensions that are sharded with the batch over as many of the axes as it divides."""
    batch = program.batch
    if batch.sets:
        return BatchDims(
            tuple(
                _split_nodes(program, one.given, one.made, parts(one.axes, sizes), one.axes)
                for one in batch.sets
            )
        )
    over = split_axes(program, axes, sizes)
    count = parts(over, sizes)
    return BatchDims((_split_nodes(program, batch.given, batch.made, count, over),))


def batch_of(decision: Decision, sizes: Mapping[str, int]) -> BatchDims:
    """The dimensions that a decision shards with the batch."""
    return batch_over(decision.program, decision.strategy.batch, sizes)


def batch_gathers(program: Program, strategy: Strategy, sizes: Mapping[str, int]) -> int | float:
    """Bytes that each device sends to all-gather the batch over `fsdp`.

    A batch is given split over `data` and `fsdp`, also if the strategy splits it over `data` alone.
    """
    if "fsdp" in strategy.batch:
        return 0
    given = batch_dims(program, parts(DEFAULT.batch, sizes))
    size = sum(value.bytes for value in program.examples if given.parts(value.dims[:1]) > 1)
    return all_gather(sizes["fsdp"], size / sizes["data"])


def _grouped(
    graph: Graph,
    classes: Classes,
    candidates: Sequence[int],
    batch: BatchDims,
    parameters: Sequence[Parameter],
    axes: Axes,
) -> tuple[dict[int, int], Callable[[Hardware], Prices]]:
    """The group of each candidate, and a function that returns the prices for some hardware."""
    against = conflicts(graph, classes, candidates)
    groups = group(graph, classes, candidates, against, parameters)
    between: dict[int, set[int]] = {number: set() for number in groups.values()}
    for one, others in against.items():
        between[groups[one]] |= {groups[other] for other in others}
    return groups, partial(price, graph, classes, batch, parameters, groups, between, axes)


def _candidates(program: Program, classes: Classes, batch: BatchDims) -> list[int]:
    """The classes of parameter dimensions that can be sharded, in the order of the program."""
    values = *program.parameters, *(value for _, value in program.planned)
    nodes = [node for value in values for node in value.dims]
    free = splittable(program.graph, classes, nodes)
    free -= {classes[node] for node in range(len(program.graph.sizes)) if batch.has(node)}
    # This order does not depend on the order of the leaves.
    order = dict.fromkeys(classes[node] for work in program.graph.works for node in work.dims)
    order |= dict.fromkeys(classes[found.node] for found in program.graph.partial_sums.values())
    order |= dict.fromkeys(classes[node] for node in nodes)
    return [one for one in order if one in free]


def computed_dims(
    program: Program, classes: Classes, chosen: frozenset[int]
) -> tuple[int | None, ...]:
    """The tensor-parallel dimension of each array, or None."""
    return tuple(_dimension(value, classes, chosen) for value in program.parameters)


def constant_dims(decision: Decision) -> list[tuple[Constant, Value, int | None]]:
    """The tensor-parallel dimension, or None, of each use of a planned constant."""
    dimension = lambda value: _dimension(value, decision.classes, decision.chosen)
    return [(one, value, dimension(value)) for one, value in decision.program.planned]


def _dimension(value: Value, classes: Classes, chosen: frozenset[int]) -> int | None:
    is_split = lambda node: classes.divides(node) and classes[node] in chosen
    return next((d for d, node in enumerate(value.dims) if is_split(node)), None)


def staged_sum(decision: Decision, measure: Callable[[Decision], int | float]) -> int | float:
    """A sum over the operations of a program, for one stage if it runs as a pipeline."""
    total, staged = measure(decision), decision.program.staged
    if staged is None:
        return total
    outside = measure(replace(decision, program=staged.outside))
    return outside + (total - outside) * staged.share


def saved_bytes(decision: Decision, axes: Mapping[str, int]) -> int | float:
    """Bytes per device that are saved for the backward pass."""
    return staged_sum(decision, lambda one: sum(size for size, _ in saved_parts(one, axes)))


def saved_parts(
    decision: Decision, axes: Mapping[str, int]
) -> Iterator[tuple[int | float, Source]]:
    """Bytes per device that are saved for the backward pass, and the operation of each."""
    batch, n = batch_of(decision, axes), parts(decision.strategy.model, axes)
    for (dims, source), size in decision.program.graph.saved.items():
        share = batch.parts(dims)
        if any_tensor_parallel(decision, dims):
            share *= n
        yield size / share, source
