"""Which dimensions of a tree's arrays to split, read off the program that computes with them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, prod

from ..program._constants import Constant, find_constants
from ..program._graph import Graph, Value
from ..program._remat import Region
from ..program._trace import Traced
from ..program._walk import Scope, walk
from ._batch import Batch, find_batch
from ._classes import Classes, conflicts, splittable
from ._cost import Axes, BatchDims, Parameter, Problem, pose
from ._eliminate import search
from ._groups import group
from ._hardware import Hardware


@dataclass(frozen=True)
class Program:
    """A traced function, followed: its graph, its values, and those that come from the tree."""

    traced: Traced
    graph: Graph
    scope: Scope
    parameters: tuple[Value, ...]
    batch: Batch
    constants: tuple[Constant, ...] = ()  # what it closes over

    @property
    def planned(self) -> list[tuple[Constant, Value]]:
        """Large arrays that it closes over: they are computed split as those of the tree are."""
        return [(one, value) for one in self.constants if one.is_planned for value in one.values]


@dataclass(frozen=True)
class Way:
    """Over which axes of the mesh the batch goes, and over which dimensions are computed split."""

    batch: tuple[str, ...]
    model: tuple[str, ...]


# The last two are for programs where little is worth computing split, as with many examples, and
# for those where much is, as with few.
USUAL = Way(("data", "fsdp"), ("model",))
WAYS = (USUAL, Way(("data", "fsdp", "model"), ("model",)), Way(("data",), ("fsdp", "model")))


@dataclass(frozen=True)
class Decision:
    """What is computed split.

    `computed` has, for each array of the tree, the dimension that is, or None; `classes` are the
    dimensions that go together, and `chosen` those of them that are split over `way.model`.
    """

    computed: tuple[int | None, ...]
    way: Way
    program: Program
    classes: Classes
    chosen: frozenset[int]
    seconds: int | float  # for a step
    sending: int | float  # of these


def follow_program(traced: Traced, trainable: Sequence[bool]) -> Program:
    """Follows all dimensions of a traced function; gradients flow from trainable arrays."""
    graph = Graph(regions=(Region(_used(traced, trainable)), Region(_leading(traced))))
    jaxpr = traced.jaxpr.jaxpr
    grads = [*trainable, *(False for _ in jaxpr.invars[traced.arrays :])]
    inputs = [
        graph.value(var.aval, grad=grad and traced.trains)
        for var, grad in zip(jaxpr.invars, grads, strict=True)
    ]
    scope = walk(graph, jaxpr, [graph.constant(var.aval) for var in jaxpr.constvars], inputs)
    parameters, rest = inputs[: traced.arrays], inputs[traced.arrays :]
    graph.held.update(node for value in parameters for node in value.dims)
    batch = find_batch(graph, rest[: traced.batch], rest[traced.batch :])
    constants = find_constants(traced.jaxpr, scope)
    return Program(traced, graph, scope, tuple(parameters), batch, constants)


def _used(traced: Traced, trainable: Sequence[bool]) -> tuple[bool, ...]:
    """Which results are used: of a model that a loss returns, what is trained is not."""
    count, moved = len(traced.jaxpr.out_avals), traced.moved
    if not traced.trains or moved != traced.arrays:
        return (True,) * count
    return (*(True,) * (count - moved), *(not trained for trained in trainable))


def _leading(traced: Traced) -> tuple[bool, ...]:
    """Into which results gradients flow: into a loss, and not into what is returned beside it."""
    return tuple(not traced.trains or place == 0 for place in range(len(traced.jaxpr.out_avals)))


def decide(
    program: Program,
    sizes: Mapping[str, int],
    covered: Sequence[bool],
    hardware: Hardware,
    forced: Sequence[int | None] = (),
    room: int | float = inf,
) -> Decision:
    """The cheapest way, with the cheapest set of classes that is computed split.

    `covered` says which arrays are split whatever it costs, `forced` has for each array a
    dimension that is to be computed split over `model`, or None, and `room` is how many bytes there
    are for activations.
    """
    parameters = [
        Parameter(value, cover) for value, cover in zip(program.parameters, covered, strict=True)
    ]
    # They are stored whole whatever is decided: nothing has to be gathered.
    parameters += [Parameter(value, False) for _, value in program.planned]
    best = _decide(program, USUAL, sizes, parameters, hardware, forced)
    for way in WAYS[1:] if not any(d is not None for d in forced) else ():
        if not _applies(way, program, sizes):
            continue
        found = _decide(program, way, sizes, parameters, hardware, ())
        fits, fitted = (saved_bytes(one, sizes) <= room for one in (found, best))
        if fits != fitted:
            best = found if fits else best
            continue
        # Whoever asks for `fsdp` expects the batch to go over it: unless that sends clearly more.
        margin = 0.1 if "fsdp" in way.model else 1e-6
        if found.seconds < best.seconds - margin * best.sending:
            best = found
    return best


def _applies(way: Way, program: Program, sizes: Mapping[str, int]) -> bool:
    if "model" in way.batch:
        return sizes["model"] > 1 and bool(batch_dims(program, parts(way.batch, sizes)).roots)
    return sizes["fsdp"] > 1


def parts(axes: Sequence[str], sizes: Mapping[str, int]) -> int:
    """Over how many devices these axes split."""
    return prod(sizes[axis] for axis in axes)


def stored(way: Way, sizes: Mapping[str, int]) -> int:
    """Over how many of the devices that the batch is split over parameters are stored split."""
    return parts([axis for axis in way.batch if axis != "data"], sizes)


def _decide(
    program: Program,
    way: Way,
    sizes: Mapping[str, int],
    parameters: Sequence[Parameter],
    hardware: Hardware,
    forced: Sequence[int | None],
) -> Decision:
    graph, n = program.graph, parts(way.model, sizes)
    classes, batch = Classes(graph, n), batch_dims(program, parts(way.batch, sizes))
    axes = Axes(batch.count, 1 if "fsdp" in way.model else sizes["fsdp"], n, stored(way, sizes))
    free = n > 1 and "model" not in way.batch
    candidates = _candidates(program, classes, batch) if free else []
    fixed = {
        classes[value.dims[d]]
        for value, d in zip(program.parameters, forced, strict=False)
        if d is not None and classes[value.dims[d]] in candidates
    }
    against = conflicts(graph, classes, candidates)
    taken = fixed.union(*(against[one] for one in fixed))
    candidates = [one for one in candidates if one not in taken]
    groups, problem = _problem(graph, classes, candidates, batch, parameters, axes, hardware)
    picked = search(problem)
    chosen = frozenset(fixed.union(one for one, number in groups.items() if number in picked))
    # Between the ways what is sent decides: all divide the arithmetic, or it is priced.
    quick = replace(hardware, memory_bandwidth=inf)
    _, problem = _problem(graph, classes, candidates, batch, parameters, axes, quick)
    computed = computed_dims(program, classes, chosen)
    seconds = problem.price(picked)
    quick = replace(quick, flops=inf)
    _, problem = _problem(graph, classes, candidates, batch, parameters, axes, quick)
    return Decision(computed, way, program, classes, chosen, seconds, problem.price(picked))


def batch_dims(program: Program, count: int) -> BatchDims:
    """The dimensions that go over `count` devices with the batch; none if it does not divide."""
    classes = Classes(program.graph, count, soft=True)
    if not any(map(classes.divides, program.batch.given)):
        return BatchDims(classes, frozenset(), 1)
    nodes = (*program.batch.given, *program.batch.made)
    roots = frozenset(classes[node] for node in nodes if classes.divides(node))
    return BatchDims(classes, roots, count)


def _problem(
    graph: Graph,
    classes: Classes,
    candidates: Sequence[int],
    batch: BatchDims,
    parameters: Sequence[Parameter],
    axes: Axes,
    hardware: Hardware,
) -> tuple[dict[int, int], Problem]:
    against = conflicts(graph, classes, candidates)
    groups = group(graph, classes, candidates, against, parameters)
    between: dict[int, set[int]] = {number: set() for number in groups.values()}
    for one, others in against.items():
        between[groups[one]] |= {groups[other] for other in others}
    return groups, pose(graph, classes, batch, parameters, groups, between, axes, hardware)


def _candidates(program: Program, classes: Classes, batch: BatchDims) -> list[int]:
    """The classes of the parameters' dimensions that can be split, in the order of the program."""
    values = *program.parameters, *(value for _, value in program.planned)
    nodes = [node for value in values for node in value.dims]
    found = set(splittable(program.graph, classes, nodes))
    taken = {classes[node] for node in range(len(program.graph.sizes)) if batch.has(node)}
    # In the order of the program, so that the order of the leaves makes no difference.
    order = dict.fromkeys(classes[node] for work in program.graph.works for node in work.dims)
    order |= dict.fromkeys(classes[found.node] for found in program.graph.sums.values())
    order |= dict.fromkeys(classes[node] for node in nodes)
    return [one for one in order if one in found and one not in taken]


def computed_dims(
    program: Program, classes: Classes, chosen: frozenset[int]
) -> tuple[int | None, ...]:
    """For each array the dimension that is computed split, if one of its classes is chosen."""
    return tuple(_dimension(value, classes, chosen) for value in program.parameters)


def constant_dims(decision: Decision) -> list[tuple[Constant, Value, int | None]]:
    """Of each place of a planned constant the dimension that is computed split, if any."""
    return [
        (one, value, _dimension(value, decision.classes, decision.chosen))
        for one, value in decision.program.planned
    ]


def _dimension(value: Value, classes: Classes, chosen: frozenset[int]) -> int | None:
    found = [
        d for d, node in enumerate(value.dims) if classes.divides(node) and classes[node] in chosen
    ]
    return found[0] if found else None


def saved_bytes(decision: Decision, axes: Mapping[str, int]) -> int | float:
    """Bytes kept for the backward pass: contractions, non-linear functions and carries."""
    batch = batch_dims(decision.program, parts(decision.way.batch, axes))
    n = parts(decision.way.model, axes)
    classes, total = decision.classes, 0.0
    for dims, size in decision.program.graph.saved.items():
        split = any(classes.divides(n) and classes[n] in decision.chosen for n in dims)
        total += size / batch.parts(dims) / (n if split else 1)
    return total
