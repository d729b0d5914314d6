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
from functools import cached_property
from itertools import chain
from math import prod

from ...core._control_flow import Scan, While, control_flow
from ...core._jaxpr import struct_of
from .._mesh_axes import parts, used_axes
from ..operations import Atom, Rule, rule_of
from ..program._facts import Facts, Operation, alike, follow_facts
from ..program._graph import Asked, Dims, Source, Value, Work
from ..solver._hardware import all_gather, all_reduce
from ..solver._strategy import Decision
from ..tree._overrides import axes_of_spec, spec_parts

Axes = tuple[str, ...]
Sizes = Mapping[str, int]
Spec = Sequence[Axes]  # the axes of each dimension


@dataclass(frozen=True)
class ChangeOfSharding:
    """A change of sharding: bytes that each device sends, and whether it gathers the array."""

    before: Spec
    sent: int | float
    gathers_all: bool


_Fact = tuple[Axes, ...] | None  # a sharding that is asked for; None where it is as planned
# An operand of a product, None for a number, and its sharding.
_Operand = tuple[Value | None, _Fact]
_Path = tuple[int, ...]  # the `id`s of an equation and of those around it, outermost first


@dataclass(frozen=True)
class AskedShardings:
    """Where the program's own shardings hold.

    - `changes`: the shardings before and after, for each one that is asked for.
    - `operands`: the operands of products that read an array with such a sharding.
    """

    changes: list[tuple[Asked, Spec, Spec]] = field(default_factory=list)
    operands: dict[_Path, list[_Operand]] = field(default_factory=dict)


def changes_asked(decision: Decision) -> Iterator[tuple[Asked, ChangeOfSharding, int | float]]:
    """The changes of sharding that the program asks for, and how often a step makes each."""
    sizes = decision.sizes
    for asked, before, after in follow_asked(decision).changes:
        size = asked.value.bytes
        yield asked, change_of_sharding(size, before, after, sizes), asked.times
        # What follows computes the cotangent in the sharding that is asked for.
        yield asked, change_of_sharding(size, after, before, sizes), asked.backward


def follow_asked(decision: Decision) -> AskedShardings:
    """Follows the shardings that the program asks for to where they are read."""
    program, shardings = decision.program, AskedShardings()
    all_asked = {path_of(asked.source): asked for asked in program.graph.asked}
    if not all_asked:
        return shardings
    changes: dict[_Path, tuple[Asked, Spec, Spec]] = {}  # the last time that a loop is followed

    def of_results(operation: Operation, facts: Sequence[_Fact]) -> _Fact:
        path = _path(operation)
        if path in all_asked:
            asked = all_asked[path]
            before = facts[0] or _planned(asked, decision)
            after = _reached(asked, before, decision.sizes)
            changes[path] = asked, before, after
            return after
        if operation.name == "dot_general" and any(facts):
            shardings.operands[path] = list(zip(operation.operands, facts, strict=True))
        for fact, value in zip(facts, operation.operands, strict=True):
            if fact is not None and value is not None and value.dims == operation.result.dims:
                return fact
        return None

    join = lambda facts: next((fact for fact in facts if fact is not None), None)
    # An iteration of a loop begins with what the one before ends with.
    facts = Facts[_Fact](of_number=lambda number: None, of_results=alike(of_results), join=join)
    follow_facts(facts, program.scope, [None] * len(program.scope.jaxpr.invars))
    shardings.changes.extend(changes.values())
    return shardings


@dataclass(frozen=True)
class ForProduct:
    """What devices send over some axes for a product that reads an array as the program asks for.

    With `sums_whole`, devices have all terms of a sum that the plan computes in parts.
    """

    axes: Axes
    bytes: int | float
    work: Work
    sums_whole: bool = False


def sent_for_products(decision: Decision) -> Iterator[ForProduct]:
    """What products with operands in shardings that the program asks for need."""
    operands = follow_asked(decision).operands
    for work in decision.program.graph.works:
        of_product = operands.get(path_of(work.source))
        if of_product is None or not work.forward:
            continue
        for side, (value, fact) in enumerate(of_product):
            if value is not None and fact is not None:
                yield from _Read(decision, work, side, value, fact).sent()


@dataclass(frozen=True)
class _Read:
    """A product that reads an operand, at the place `side`, in a sharding that is asked for."""

    decision: Decision
    work: Work
    side: int
    value: Value
    fact: tuple[Axes, ...]

    def sent(self) -> Iterator[ForProduct]:
        n, times = self.decision.n, self.work.times
        along_model = [d for d, axes in enumerate(self.fact) if self._model.intersection(axes)]
        over = tuple(self._model)
        gathers_other = self._gathers_other(along_model)
        if gathers_other:
            is_again = self.work.grads > 0 and is_in_loop(self.work.source)
            gathered = all_gather(n, self._other_bytes) * (1 + is_again)
            yield ForProduct(over, gathered * times, self.work, True)
        if gathers_other and along_model and self.work.grads:
            # The gradient of the other operand is a sum over the parts of this one.
            yield ForProduct(over, all_reduce(n, self._other_bytes) * times, self.work)
        if not gathers_other and self._is_split_otherwise(along_model):
            size = self.value.bytes / self._row_parts(self.value.dims)
            yield ForProduct(over, all_gather(n, size) * times, self.work)
        if self.value.grad:
            yield self._cotangent(gathers_other)

    @cached_property
    def _rule(self) -> Rule:
        rule = rule_of(self.work.source[-1])
        assert rule is not None
        return rule

    @property
    def _model(self) -> set[str]:
        return set(used_axes(self.decision.model_axes, self.decision.sizes))

    @property
    def _of_result(self) -> Dims:
        """The dimensions of the result."""
        return self.work.own[: len(self._rule.results[0])]

    def _row_parts(self, dims: Dims) -> int:
        """The number of devices that share the rows of an array, and those of scans around it."""
        return self.decision.batch.parts((*self.work.rows, *dims))

    @property
    def _result_bytes(self) -> int:
        return _bytes(self.work.source[-1].outvars[0])

    @property
    def _other_bytes(self) -> int | float:
        """The bytes of the other operand, of the rows that a device has."""
        other = 1 - self.side
        rows = self._row_parts(self.work.of[other])
        return _bytes(self.work.source[-1].invars[other]) / rows

    def _gathers_other(self, along_model: Sequence[int]) -> bool:
        """Whether the other operand is gathered, where the plan sums over `model`.

        A device has all terms of the sum in this operand. It could take its part of them instead,
        and sum the results over devices.
        """
        decision, is_summed = self.decision, False
        for d, dimension in enumerate(self._rule.operands[self.side]):
            is_parallel = decision.is_chosen(self.value.dims[d]) and d not in along_model
            is_summed = is_summed or (is_parallel and dimension[0] in self._rule.reduced)
        of_rows = self._result_bytes / self._row_parts(self._of_result)
        cheaper = all_gather(decision.n, self._other_bytes) < all_reduce(decision.n, of_rows)
        return is_summed and cheaper

    def _is_split_otherwise(self, along_model: Sequence[int]) -> bool:
        """Whether the result is split over `model` along another dimension than the operand."""
        if not along_model:
            return False
        own = {self._rule.operands[self.side][d] for d in along_model}
        pairs = zip(self._of_result, self._rule.results[0], strict=True)
        return any(self.decision.is_chosen(node) and dim not in own for node, dim in pairs)

    def _cotangent(self, gathers_other: bool) -> ForProduct:
        """What the cotangent of the operand needs to be in the sharding that is asked for."""
        decision = self.decision
        planned: list[Axes] = []
        for axes, asked in zip(decision.axes_of(self.value.dims), self.fact, strict=True):
            axes = used_axes(axes or (), decision.sizes)
            if gathers_other and self._model.issuperset(axes):
                axes = asked  # computed as a whole, with the other operand
            planned.append(axes)
        sent = change_of_sharding(self.value.bytes, planned, self.fact, decision.sizes).sent
        rows = used_axes(decision.batch_axes, decision.sizes)
        if set(rows).isdisjoint(chain.from_iterable(self.fact)):
            # The cotangent of the result may be gathered before the product, if it is smaller.
            size = self._result_bytes
            if decision.is_parallel(self._of_result):
                size /= decision.n
            sent = min(sent, all_gather(decision.batch.parts(self._of_result), size) or sent)
        over = used_axes(axes_of_spec(planned), decision.sizes)
        around = decision.batch.parts(self.work.rows)
        return ForProduct(over, sent * self.work.times / around, self.work)


def _bytes(atom: Atom) -> int:
    array = struct_of(atom)
    return array.size * array.dtype.itemsize


def is_in_loop(source: Source) -> bool:
    return any(isinstance(control_flow(equation), Scan | While) for equation in source[:-1])


def path_of(source: Sequence[object]) -> _Path:
    """The path of an equation, from itself and those around it."""
    return tuple(map(id, source))


def _path(operation: Operation) -> _Path:
    around: _Path = ()
    if operation.outer is not None:
        around = _path(operation.outer)
    return (*around, id(operation.equation))


def _planned(asked: Asked, decision: Decision) -> Spec:
    axes = decision.axes_of(asked.value.dims)
    return [used_axes(of_dimension or (), decision.sizes) for of_dimension in axes]


def _reached(asked: Asked, before: Spec, sizes: Sizes) -> tuple[Axes, ...]:
    """The sharding that is asked for: where any will do, the one before, over other axes."""
    taken: set[str] = set()
    for axes in asked.axes:
        taken.update(axes or ())
    after: list[Axes] = []
    for axes_before, axes_asked in zip(before, asked.axes, strict=True):
        if axes_asked is None:
            axes_asked = tuple(axis for axis in axes_before if axis not in taken)
        after.append(used_axes(axes_asked, sizes))
    return tuple(after)


def change_of_sharding(whole: int, before: Spec, after: Spec, axes: Sizes) -> ChangeOfSharding:
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
        return ChangeOfSharding(before, all_gather(count, whole), True)
    size = whole / count  # of the part that a device has
    size /= prod((more - exchanged).elements())  # what is split further sends nothing
    sent = sum(size * (1 - 1 / ratio) for ratio in exchanged.elements())
    for ratio in (less - exchanged).elements():
        sent += size * (ratio - 1)
        # The next gather has what this one has brought together.
        size *= ratio
    if any(map(_is_permuted, before, after)):
        sent += size  # each device has the part of another one
    return ChangeOfSharding(before, sent, False)


def _is_permuted(before: Axes, after: Axes) -> bool:
    """Whether a dimension is split over other axes, and not only over more or fewer of them."""
    common = min(len(before), len(after))
    return before[:common] != after[:common]
