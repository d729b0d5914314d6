"""What devices send for shardings that the program itself asks for.

To reach another sharding, XLA gathers dimensions that are split less, exchanges parts between a
dimension that is split less and one that is split as much more, or permutes devices. If none of
these applies, it gathers the entire array on every device, which it calls an involuntary full
rematerialization. The operations that follow keep the sharding that is asked for, up to a product,
whose result is sharded as planned.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from math import prod

from ...core._control_flow import Scan, While, control_flow
from .._mesh_axes import parts, used_axes
from ..operations import atom_bytes, shape_of
from ..program._facts import Facts, Operation, alike, follow_facts
from ..program._graph import ProgramConstraint, SourcePath, Value, Work, path_of
from ..solver._hardware import all_gather, all_reduce
from ..solver._strategy import Decision
from ..tree._overrides import axes_of_spec, spec_parts

Axes = tuple[str, ...]
Sizes = Mapping[str, int]
Spec = Sequence[Axes]  # the axes of each dimension


@dataclass(frozen=True)
class ReshardCost:
    """A change of sharding: bytes that each device sends, and whether it gathers the array."""

    before: Spec
    sent: int | float
    gathers_all: bool


_ConstrainedSpec = tuple[Axes, ...] | None  # None where the sharding is as planned


@dataclass(frozen=True)
class _Constrained:
    """Where the program's own shardings hold.

    - `changes`: the shardings before and after each constraint of the program.
    - `operands`: for products that read an array with such a sharding, all operands; a number has
        no value.
    """

    changes: dict[SourcePath, tuple[ProgramConstraint, Spec, Spec]] = field(default_factory=dict)
    operands: dict[SourcePath, list[tuple[Value | None, _ConstrainedSpec]]] = field(
        default_factory=dict
    )


def constraint_reshards(
    decision: Decision,
) -> Iterator[tuple[ProgramConstraint, ReshardCost, int | float]]:
    """The changes of sharding that the program asks for, and how often a step makes each."""
    sizes = decision.sizes
    for constraint, before, after in _follow_constraints(decision).changes.values():
        size = constraint.value.bytes
        yield constraint, find_reshard(size, before, after, sizes), constraint.times
        # What follows computes the cotangent in the sharding that is asked for.
        yield constraint, find_reshard(size, after, before, sizes), constraint.backward


def _follow_constraints(decision: Decision) -> _Constrained:
    """Follows the shardings that the program asks for to where they are read."""
    program, constrained = decision.program, _Constrained()
    by_path = {path_of(constraint.source): constraint for constraint in program.graph.constraints}
    if not by_path:
        return constrained

    def of_results(operation: Operation, specs: Sequence[_ConstrainedSpec]) -> _ConstrainedSpec:
        path = path_of(operation.source)
        if path in by_path:
            constraint = by_path[path]
            before = specs[0] or _used_spec(decision, constraint.value)
            after = _spec_after(constraint, before, decision.sizes)
            # A loop is followed several times, and the last time counts.
            constrained.changes[path] = constraint, before, after
            return after
        if operation.rule is not None and operation.rule.is_product and any(specs):
            constrained.operands[path] = list(zip(operation.operands, specs, strict=True))
        for spec, value in zip(specs, operation.operands, strict=True):
            if spec is not None and value is not None and value.nodes == operation.result.nodes:
                return spec
        return None

    # An iteration of a loop begins with what the one before ends with.
    facts = Facts[_ConstrainedSpec](
        of_number=lambda number: None,
        of_results=alike(of_results),
        join=lambda specs: next(filter(None, specs), None),
    )
    follow_facts(facts, program.scope, [None] * len(program.scope.jaxpr.invars))
    return constrained


@dataclass(frozen=True)
class ProductTraffic:
    """What devices send over some axes for a product that reads an array as the program asks for.

    With `sums_whole`, devices have all terms of a sum that the plan computes in parts.
    """

    axes: Axes
    bytes: int | float
    work: Work
    sums_whole: bool = False


def product_traffic(decision: Decision) -> Iterator[ProductTraffic]:
    """What products with operands in shardings that the program asks for need."""
    by_path = _follow_constraints(decision).operands
    for work in decision.program.graph.works:
        if not work.forward:
            continue
        for place, (value, spec) in enumerate(by_path.get(path_of(work.source), ())):
            if value is not None and spec is not None:
                yield from _operand_traffic(decision, work, place, value, spec)


def _operand_traffic(
    decision: Decision, work: Work, place: int, value: Value, spec: Spec
) -> Iterator[ProductTraffic]:
    """What a product needs to read `value`, its operand at a place, in a sharding."""
    equation, rule = work.source[-1], decision.program.graph.rule_at(work.source)
    n, times = decision.n, work.times
    model = decision.used_model_axes
    is_split = [not set(model).isdisjoint(axes) for axes in spec]  # by dimension of the operand
    result_dims = work.own[: len(rule.results[0])]

    def row_parts(dims: Sequence[int]) -> int:
        # Devices share the rows of the operands and the result, and those of scans around it.
        return decision.batch.parts((*work.rows, *dims))

    other_bytes = atom_bytes(equation.invars[1 - place]) / row_parts(work.of[1 - place])
    is_summed = False
    for d, dimension in enumerate(rule.operands[place]):
        is_in_parts = decision.is_chosen(value.nodes[d]) and not is_split[d]
        is_summed = is_summed or (is_in_parts and dimension[0] in rule.reduced)
    # Where a device has all terms of a sum that the plan computes in parts, it takes its part of
    # them and sums the results over devices, or gathers the other operand.
    of_sum = all_reduce(n, atom_bytes(equation.outvars[0]) / row_parts(result_dims))
    gathers_other = is_summed and all_gather(n, other_bytes) < of_sum
    if gathers_other:
        # A loop gathers it again for the derivative.
        in_loop = any(isinstance(flow, Scan | While) for flow in map(control_flow, work.source))
        sent = all_gather(n, other_bytes) * (1 + (in_loop and work.grads > 0)) * times
        yield ProductTraffic(model, sent, work, True)
    if gathers_other and any(is_split) and work.grads:
        # The gradient of the other operand is a sum over the parts of this one.
        yield ProductTraffic(model, all_reduce(n, other_bytes) * times, work)
    if any(is_split) and not gathers_other:
        own = set(compress(rule.operands[place], is_split))
        # Whether the plan splits the result along another dimension than the operand.
        others = zip(result_dims, rule.results[0], strict=True)
        if any(decision.is_chosen(node) and dimension not in own for node, dimension in others):
            size = value.bytes / row_parts(value.nodes)
            yield ProductTraffic(model, all_gather(n, size) * times, work)
    if value.grad:
        planned = _used_spec(decision, value)
        for d, axes in enumerate(planned):
            if gathers_other and set(model).issuperset(axes):
                planned[d] = spec[d]  # computed as a whole, with the other operand
        sent = _cotangent_bytes(decision, work, value, planned, spec)
        over = used_axes(axes_of_spec(planned), decision.sizes)
        yield ProductTraffic(over, sent * times / decision.batch.parts(work.rows), work)


def _cotangent_bytes(
    decision: Decision, work: Work, value: Value, planned: Spec, spec: Spec
) -> int | float:
    """What a device sends to have the cotangent of an operand in a sharding, and not as planned."""
    sent = find_reshard(value.bytes, planned, spec, decision.sizes).sent
    rows = used_axes(decision.batch_axes, decision.sizes)
    if not set(rows).isdisjoint(chain.from_iterable(spec)):
        return sent
    # The cotangent of the result may be gathered before the product, if it is smaller.
    (result,) = work.source[-1].outvars
    result_dims, size = work.own[: len(shape_of(result))], atom_bytes(result)
    if decision.is_parallel(result_dims):
        size /= decision.n
    return min(sent, all_gather(decision.batch.parts(result_dims), size) or sent)


def _used_spec(decision: Decision, value: Value) -> list[Axes]:
    """The axes of more than one device that the plan shards each dimension of a value over."""
    spec: list[Axes] = []
    for axes in decision.axes_of(value.nodes):
        spec.append(used_axes(axes or (), decision.sizes))
    return spec


def _spec_after(constraint: ProgramConstraint, before: Spec, sizes: Sizes) -> tuple[Axes, ...]:
    """The sharding that is asked for: where any will do, the one before, over other axes."""
    taken: set[str] = set()
    for axes in constraint.axes:
        taken.update(axes or ())
    after: list[Axes] = []
    for axes_before, axes in zip(before, constraint.axes, strict=True):
        if axes is None:
            axes = tuple(axis for axis in axes_before if axis not in taken)
        after.append(used_axes(axes, sizes))
    return tuple(after)


def find_reshard(whole: int, before: Spec, after: Spec, axes: Sizes) -> ReshardCost:
    """What a change between two shardings of an array of `whole` bytes sends.

    `less` are the factors by which dimensions are split less than before, and `more` those by which
    others are split more. A factor in both is exchanged between two dimensions.
    """
    less: Counter[float] = Counter()
    more: Counter[float] = Counter()
    for axes_before, axes_after in zip(before, after, strict=True):
        ratio = parts(axes_after, axes) / parts(axes_before, axes)
        if ratio < 1:
            less[1 / ratio] += 1
        elif ratio > 1:
            more[ratio] += 1
    exchanged = less & more
    count = spec_parts(before, axes)
    # No factor of one dimension fits into another, so that nothing can be exchanged.
    if less and more and not exchanged:
        return ReshardCost(before, all_gather(count, whole), True)
    size = whole / count  # of the part that a device has
    size /= prod((more - exchanged).elements())  # what is split further sends nothing
    sent = sum(size * (1 - 1 / ratio) for ratio in exchanged.elements())
    for ratio in (less - exchanged).elements():
        sent += size * (ratio - 1)
        # The next gather has what this one has brought together.
        size *= ratio
    if any(map(_is_permuted, before, after)):
        sent += size  # each device has the part of another one
    return ReshardCost(before, sent, False)


def _is_permuted(before: Axes, after: Axes) -> bool:
    """Whether a dimension is split over other axes, and not only over more or fewer of them."""
    common = min(len(before), len(after))
    return before[:common] != after[:common]
