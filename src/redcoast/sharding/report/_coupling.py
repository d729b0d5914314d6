"""Where a loss relates the examples of a batch, so that it is not a mean over them.

A mean over examples can be taken in parts: of microbatches, or of the batches of an evaluation. If
the term of one example depends on others, it cannot. Examples are a contrastive loss, batch
normalisation, and a nonlinear function of a mean. Means weighted by arrays of the batch can.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ...core._jaxpr import is_inexact
from ..operations import Factor, Rule, is_cumulative
from ..operations._rule import each_alone
from ..operations._rule_table import UNCOUPLED
from ..program._batch_dims import BatchDims, find_examples
from ..program._facts import Facts, Operation, alike, follow_facts
from ..program._program import Program
from ._data import Coupling


@dataclass(frozen=True)
class _Origin:
    """What a value depends on.

    `model` is whether it depends on the model's arrays, and `counts` whether on a count, such as
    the indices of examples. `summed` is an operation that reduced over examples a value that
    depends on the model, and `weighed` one that reduced a value that does not. `weights` is 1 if
    the result of `weighed` is a scalar, such as a sum of weights, and otherwise 2.
    """

    model: bool = False
    counts: bool = False
    summed: Operation | None = None
    weighed: Operation | None = None
    weights: int = 0


Origins = Sequence[_Origin]


def _merged(origins: Origins) -> _Origin:
    """What a result depends on: all that its operands depend on."""
    merged = _Origin()
    for origin in origins:
        merged = _Origin(
            merged.model or origin.model,
            merged.counts or origin.counts,
            merged.summed or origin.summed,
            merged.weighed or origin.weighed,
            max(merged.weights, origin.weights),
        )
    return merged


def find_coupling(program: Program) -> Coupling | None:
    """The first operation that relates examples to each other, if there is one."""
    examples = find_examples(program)
    if examples is None:
        return None
    couplings: list[Coupling] = []

    def origin_of(operation: Operation, origins: Origins) -> _Origin:
        """The origin of an operation's results; what relates examples is recorded."""
        rule = operation.rule
        if operation.name in UNCOUPLED:
            return _Origin()
        if rule is None:
            return _merged(origins)
        if rule.indexed and not rule.operands:
            # As of `iota`: the number of an example, by which it is written to its own place.
            return _Origin(counts=True)
        if rule.linear == each_alone(0, 1):
            # Of a product, with the sizes of groups behind its factors if it is a ragged one. They
            # are sums over the rows of all examples, and only say where the rows of a group are.
            groups = [_Origin(origin.model, origin.counts) for origin in origins[2:]]
            origins = [*origins[:2], *groups]
        use = _Use(examples, operation, rule, origins)
        coupling = use.coupling()
        if coupling is not None:
            couplings.append(coupling)
        return use.origin()

    facts = Facts(
        of_number=lambda value: _Origin(),
        of_results=alike(origin_of),
        join=_merged,
        control=lambda result, condition: _merged([result, *condition]),
    )
    # Metrics may relate examples: microbatches add up the gradients of the loss alone.
    needed = program.scope.jaxpr.outvars
    if program.traced.trains:
        needed = needed[:1]  # the loss
    inputs = program.for_each_input(model=_Origin(model=True), batch=_Origin(), other=_Origin())
    follow_facts(facts, program.scope, inputs, needed=needed)
    # The first in the order of the program: later ones often follow from it.
    return next(iter(couplings), None)


@dataclass(frozen=True)
class _Use:
    """An operation on values of which some have rows, one for each example."""

    examples: BatchDims
    operation: Operation
    rule: Rule
    origins: Origins  # of the operands

    def rows(self, dims: Sequence[int]) -> int:
        """How many of the dimensions are the batch dimension."""
        return sum(map(self.examples.has, dims))

    @property
    def result_rows(self) -> int:
        return self.rows(self.operation.result.nodes)

    def along(self, factors: frozenset[Factor]) -> bool:
        """Whether the batch dimension of an operand is one of the factors."""
        return self.operation.along(self.examples.has, factors)

    def reduces(self) -> bool:
        """Whether the operation reduces over examples."""
        if self.rule.writes is not None and self.origins[1].counts:
            return False  # each example is written to its own place
        return self.along(self.rule.reduced - self.rule.indexed)

    @cached_property
    def merged(self) -> _Origin:
        return _merged(self.origins)

    def origin(self) -> _Origin:
        merged = self.merged
        # Sorted numbers of examples are a permutation, and not each example's own.
        if self.rule.shuffled:
            merged = replace(merged, counts=False)
        arrays = [value for value in self.operation.operands if value is not None]
        # Combined with rows, it is no longer a sum of weights.
        if self.result_rows and len(arrays) > 1:
            merged = replace(merged, weights=0, weighed=None)
        if not self.reduces():
            return merged
        if merged.model:
            return replace(merged, summed=self.operation)
        weights = 1
        if max(self.operation.result.shape, default=1) > 1:
            weights = 2
        return replace(merged, weighed=self.operation, weights=weights)

    def coupling(self) -> Coupling | None:
        """How the operation relates examples, if it does."""
        origin = self.merged
        is_inexact_result = is_inexact(self.operation.equation.outvars[0].aval)
        where, why = self.operation, ""
        if origin.model and self._compares_all():
            why = "compares every example with every other"
        elif origin.model and self._is_along_batch():
            why = "operates along the batch dimension"
        elif self._looks_up():
            why = "looks up other examples of the batch"
        elif self._reorders():
            why = "relates examples by their places in the batch"
        elif is_inexact_result and self._is_nonlinear():
            why = "is a nonlinear function of a sum over examples"
        elif self._is_used_for_each():
            # The sum is more informative than its use, which may be a broadcast.
            where = origin.summed or origin.weighed or self.operation
            why = "reduces over all examples, and its result is used for each of them"
        elif origin.model and is_inexact_result and not self.rule.sums and self.reduces():
            why = "selects one of the examples"
        if not why:
            return None
        return Coupling(where.name, where.line(), why)

    def _compares_all(self) -> bool:
        """Whether the result has more batch dimensions than any operand, and more than one."""
        most = 1
        for value in self.operation.operands:
            if value is not None:
                most = max(most, self.rows(value.nodes))
        return self.result_rows > most

    def _is_along_batch(self) -> bool:
        """Whether it sorts the examples, or adds up all before each."""
        cumulative = frozenset[Factor]()
        if is_cumulative(self.operation.equation):
            cumulative = self.rule.moved
        first = self.operation.equation.invars[0]
        return is_inexact(first.aval) and self.along(self.rule.shuffled | cumulative)

    def _looks_up(self) -> bool:
        """Whether examples are permuted, for example by a random order."""
        looked_up = self.rule.reduced & self.rule.indexed
        if not looked_up or None in self.operation.operands[:2]:
            return False
        index = self.origins[1]
        return not index.model and not index.counts and self.along(looked_up)

    def _reorders(self) -> bool:
        """Whether it reverses, selects or splits the examples, or transforms along them.

        A part of an array with more rows, such as the real examples among real and generated ones,
        is not.
        """
        # What chooses by platform has no operands.
        if is_cumulative(self.operation.equation) or not self.operation.operands:
            return False
        operand, result = self.operation.operands[0], self.operation.result
        transformed = dict(self.rule.near).keys()
        changed = self.rule.moved | (self.rule.whole & (self.rule.indexed | transformed))
        if operand is None or len(operand.shape) != len(result.shape):
            return False
        dimensions = self.rule.operands[0]
        for d, node in enumerate(operand.nodes):
            before, after = operand.shape[d], result.shape[d]
            is_changed = self.examples.has(node) and dimensions[d][0] in changed
            if is_changed and before == self.examples.size >= after:
                return True
        return False

    def _is_nonlinear(self) -> bool:
        """Whether it is a nonlinear function of a sum over examples."""
        summed = {place for place, origin in enumerate(self.origins) if origin.summed is not None}
        is_power_of_one = self.operation.equation.params.get("y") == 1
        # Linear in all sums at once: the product of two sums is not, though it is in each.
        is_linear = any(summed <= places for places in self.rule.linear)
        return bool(summed) and not (is_linear or is_power_of_one or self.rule.is_pairwise)

    def _is_used_for_each(self) -> bool:
        """Whether a reduction over all examples is used for each of them."""
        if not self.result_rows:
            return False
        weights: list[int] = []
        for origin, value in zip(self.origins, self.operation.operands, strict=True):
            if value is None:
                continue
            weights.append(origin.weights)
            is_reduction = origin.summed is not None or origin.weights == 2
            if is_reduction and not self.rows(value.nodes):
                return True
        # Division by a sum of weights is a weighted mean; its subtraction is not.
        adds = self.rule.linear == (frozenset([0, 1]),)  # linear in both at once
        return adds and sorted(weights) == [0, 1]
