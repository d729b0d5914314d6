"""Which dimensions of a tree's arrays to split, read off the program that computes with them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from .classes import Classes, conflicts, splittable
from .graph import Graph, Value
from .groups import group
from .hardware import Hardware
from .price import Axes, BatchDims, Parameter, Problem, pose
from .search import search
from .trace import Traced
from .walk import Scope, walk


@dataclass(frozen=True)
class Program:
    """A traced function, followed: its graph, its values, and those that come from the tree."""

    traced: Traced
    graph: Graph
    scope: Scope
    parameters: tuple[Value, ...]
    batch: tuple[int, ...]  # nodes


@dataclass(frozen=True)
class Decision:
    """What is computed split over `model`.

    `computed` has, for each array of the tree, the dimension that is, or None; `batch_axes` the
    axes of the mesh that the batch is split over; `classes` which dimensions go together.
    """

    computed: tuple[int | None, ...]
    batch_axes: tuple[str, ...]
    program: Program
    classes: Classes
    chosen: frozenset[int]
    seconds: int | float


def follow_program(traced: Traced, trainable: Sequence[bool]) -> Program:
    """Follows all dimensions of a traced function; gradients flow from trainable arrays."""
    graph = Graph()
    jaxpr = traced.jaxpr.jaxpr
    grads = [*trainable, *(False for _ in jaxpr.invars[traced.arrays :])]
    inputs = [
        graph.value(var.aval, grad=grad and traced.trains)
        for var, grad in zip(jaxpr.invars, grads, strict=True)
    ]
    scope = walk(graph, jaxpr, [graph.value(var.aval) for var in jaxpr.constvars], inputs)
    first = inputs[traced.arrays : traced.arrays + traced.batch]
    batch = tuple(value.dims[0] for value in first if value.dims)
    return Program(traced, graph, scope, tuple(inputs[: traced.arrays]), batch)


def decide(
    program: Program,
    sizes: Mapping[str, int],
    covered: Sequence[bool],
    hardware: Hardware,
    forced: Sequence[int | None] = (),
) -> Decision:
    """The cheapest of: classes computed split over `model`, or the batch split over it as well.

    `covered` says which arrays are split whatever it costs, and `forced` has for each array a
    dimension that is to be computed split, or None.
    """
    graph, model = program.graph, sizes["model"]
    parameters = [
        Parameter(value, cover) for value, cover in zip(program.parameters, covered, strict=True)
    ]
    classes = Classes(graph, model)
    over = batch_dims(program, sizes["data"] * sizes["fsdp"])
    axes = Axes(over.count, sizes["fsdp"], model)
    candidates = _candidates(program, classes, over) if model > 1 else []
    fixed = {
        classes[value.dims[d]]
        for value, d in zip(program.parameters, forced, strict=False)
        if d is not None and classes[value.dims[d]] in candidates
    }
    against = conflicts(graph, classes, candidates)
    taken = fixed.union(*(against[one] for one in fixed))
    candidates = [one for one in candidates if one not in taken]
    groups, problem = _problem(graph, classes, candidates, over, parameters, axes, hardware)
    picked = search(problem)
    chosen = fixed.union(one for one, number in groups.items() if number in picked)
    # Between the two ways what is sent decides: both divide the arithmetic.
    quick = replace(hardware, memory_bandwidth=inf)
    _, problem = _problem(graph, classes, candidates, over, parameters, axes, quick)
    seconds, batch_axes = problem.price(picked), ("data", "fsdp")
    everywhere = batch_dims(program, sizes["data"] * sizes["fsdp"] * model)
    if model > 1 and everywhere.roots and not fixed:
        axes = Axes(everywhere.count, sizes["fsdp"], model)
        _, other = _problem(graph, classes, [], everywhere, parameters, axes, quick)
        if other.constant < seconds * (1 - 1e-6):
            chosen, seconds, batch_axes = set(), other.constant, (*batch_axes, "model")
    picked = frozenset(chosen)
    computed = tuple(_dimension(value, classes, picked) for value in program.parameters)
    return Decision(computed, batch_axes, program, classes, picked, seconds)


def batch_dims(program: Program, count: int) -> BatchDims:
    """The dimensions that go over `count` devices with the batch; none if it does not divide."""
    classes = Classes(program.graph, count, soft=True)
    roots = frozenset(classes[node] for node in program.batch if classes.divides(node))
    return BatchDims(classes, roots, count if roots else 1)


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
    nodes = [node for value in program.parameters for node in value.dims]
    found = set(splittable(program.graph, classes, nodes))
    taken = {classes[node] for node in range(len(program.graph.sizes)) if batch.has(node)}
    # In the order of the program, so that the order of the leaves makes no difference.
    order = dict.fromkeys(classes[node] for work in program.graph.works for node in work.dims)
    order |= dict.fromkeys(classes[found.node] for found in program.graph.sums.values())
    order |= dict.fromkeys(classes[node] for node in nodes)
    return [one for one in order if one in found and one not in taken]


def _dimension(value: Value, classes: Classes, chosen: frozenset[int]) -> int | None:
    found = [
        d for d, node in enumerate(value.dims) if classes.divides(node) and classes[node] in chosen
    ]
    return found[0] if found else None
