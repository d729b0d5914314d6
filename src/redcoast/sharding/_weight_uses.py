"""Reads off a program how it uses the arrays of a model: in products with activations, or in
lookups."""

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter

import jax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, PyTree

from .operations import Dimension, Factor, Rule, all_factors
from .operations._rule import shape_of
from .program._facts import Facts, Operation, alike, follow_facts
from .program._program import follow_program
from .program._trace import Traced, trace_over
from .tree._leaves import flat_leaves

Dims = frozenset[int]


@dataclass(frozen=True)
class _Weight:
    """An array that is computed from the model alone, as a view of one of the model's arrays.

    `dims` has for each dimension the dimensions of the model's array that it is made of, and
    `summed` those that a product with another array of the model sums over.
    """

    index: int
    dims: tuple[Dims, ...]
    summed: Dims = frozenset()


@dataclass(frozen=True)
class _Origin:
    """What an array is computed from.

    `weights` are empty if anything but the model is (`is_data`). `last` are the model's arrays by
    which it was multiplied with no other such product after it.
    """

    weights: tuple[_Weight, ...] = ()
    is_data: bool = False
    last: frozenset[int] = frozenset()


@dataclass(frozen=True)
class WeightUses:
    """How a program uses the arrays of a model, by their places among its leaves.

    `products` has for each array that activations are multiplied by the dimensions that are summed
    over, and those that the result has. In `lookups`, rows are looked up. After a product with
    `last`, there is no other.
    """

    products: dict[int, tuple[Dims, Dims]] = field(default_factory=dict)
    lookups: set[int] = field(default_factory=set)
    last: frozenset[int] = frozenset()

    def last_matrices(self, model: PyTree) -> set[int]:
        """The arrays of the last product alone: the last layer may be one of a stack."""
        leaves = jax.tree.leaves(model)
        last: set[int] = set()
        for place in self.last:
            summed, of_result = self.products[place]
            # A stack has a matrix for each element along another dimension.
            if len(summed | of_result) == len(leaves[place].shape):
                last.add(place)
        return last


def find_uses(
    model: PyTree,
    fn: Callable[..., Array | tuple],
    args: Sequence[PyTree],
    mesh: Mesh | AbstractMesh | None = None,
) -> WeightUses:
    """How `fn(model, *args)` uses the arrays of the model. A mesh is that of its constraints."""
    if mesh is None:
        mesh = AbstractMesh((), ())
    traced, _ = trace_over(mesh, fn, model, args)
    return uses_in(traced, model)


def uses_in(traced: Traced, model: PyTree) -> WeightUses:
    """How a traced function uses the arrays of the model that it was traced for."""
    program = follow_program(traced, [False] * traced.arrays)
    scope = program.scope
    uses = WeightUses()
    facts = Facts(
        of_number=lambda number: _Origin(),
        of_results=alike(partial(_follow, uses)),
        join=_joined,
    )
    # The arrays of the model are the first inputs, and what follows them is data.
    inputs = [_Origin(is_data=True)] * len(scope.jaxpr.invars)
    for i, leaf in enumerate(flat_leaves(model)):
        # Each dimension of an array is made of itself.
        dims = tuple(frozenset([d]) for d in range(len(leaf.shape)))
        inputs[i] = _Origin((_Weight(leaf.index, dims),))
    results = follow_facts(facts, scope, inputs)
    # The first result is the loss, whose last product is that of a head.
    return replace(uses, last=results[0].last)


def _joined(origins: Sequence[_Origin]) -> _Origin:
    """The origin of an array that is one of several, or is computed element by element."""
    is_data = False
    last: frozenset[int] = frozenset()
    weights: dict[int, _Weight] = {}
    for origin in origins:
        is_data |= origin.is_data
        last |= origin.last
        for weight in origin.weights:
            # Of several views of an array, as of its layers, the first stands for all.
            weights.setdefault(weight.index, weight)
    if is_data:
        weights = {}  # a view is made of the model alone
    return _Origin(tuple(weights.values()), is_data, last)


def _follow(uses: WeightUses, operation: Operation, origins: Sequence[_Origin]) -> _Origin:
    """The origin of an operation's results; products and lookups are recorded."""
    rule, equation = operation.rule, operation.equation
    if rule is None:
        return replace(_joined(origins), weights=())
    # Linear in each operand, as products are and sums are not.
    is_product = rule.sums and len(origins) > 1 and len(rule.linear) > 1
    views: list[_Origin] = []
    for place, origin in enumerate(origins):
        views.append(origin)
        if not origin.weights:
            continue
        rank = len(shape_of(equation.invars[place]))
        # Inside a scan over layers, an operand lacks the dimension of layers.
        weights: list[_Weight] = []
        for weight in origin.weights:
            missing = rank - len(weight.dims)  # more than 0 where iterations stack it
            dims = (frozenset[int](),) * missing + weight.dims[max(0, -missing) :]
            weights.append(replace(weight, dims=dims))
        views[-1] = replace(origin, weights=tuple(weights))
        if place == 0 and _looks_up_several(rule):
            uses.lookups.update(map(attrgetter("index"), weights))
    result = _joined(views)
    if is_product and result.is_data:
        return _multiply(uses, rule, views)
    if result.is_data:
        return result
    made_of: dict[int, _Weight] = {}
    for place, view in enumerate(views):
        for weight in view.weights:
            made_of.setdefault(weight.index, _view(weight, rule, place, is_product))
    return replace(result, weights=tuple(made_of.values()))


def _looks_up_several(rule: Rule) -> bool:
    """Whether rows of the first operand are looked up by an array of numbers."""
    if not rule.indexed or len(rule.operands) < 2:
        return False
    of_indices = all_factors(rule.operands[1]) & all_factors(rule.results[0])
    return rule.size(of_indices) > 1


def _multiply(uses: WeightUses, rule: Rule, origins: Sequence[_Origin]) -> _Origin:
    """The product of activations with an array of the model, or with other activations."""
    for place, origin in enumerate(origins):
        for weight in origin.weights:
            # The first use decides, as of a matrix that is multiplied by in each layer.
            summed, free = _sides(weight, rule, place)
            uses.products.setdefault(weight.index, (summed, free))
        if origin.weights:
            last = frozenset(map(attrgetter("index"), origin.weights))
            return _Origin(is_data=True, last=last)
    return _joined(origins)


def _sides(weight: _Weight, rule: Rule, place: int) -> tuple[Dims, Dims]:
    """The dimensions of the model's array that are summed over, and those of the result.

    Along the others, such as those of experts, each element is a matrix of its own.
    """
    others: set[Factor] = set()
    for operand, dimensions in enumerate(rule.operands):
        if operand != place:
            others |= all_factors(dimensions)
    of_result = all_factors(rule.results[0]) - others
    reduced = set(rule.reduced)
    # The window of a convolution, unless each channel is filtered by itself.
    if not rule.indexed and rule.size(reduced) > 1:
        reduced |= rule.whole
    summed = _dims_with(weight, rule.operands[place], reduced)
    free = _dims_with(weight, rule.operands[place], of_result)
    # Of two arrays of the model that are multiplied first, what they share is the other side.
    if weight.summed and not summed:
        return weight.summed, free
    return summed, free | weight.summed


def _dims_with(weight: _Weight, dimensions: Iterable[Dimension], factors: Set[Factor]) -> Dims:
    """The dimensions of the model's array that any of the factors is in."""
    dims: set[int] = set()
    # A dimension of a view may be made of several of the array, as after a reshape.
    for sources, dimension in zip(weight.dims, dimensions, strict=True):
        if not factors.isdisjoint(dimension):
            dims |= sources
    return frozenset(dims)


def _view(weight: _Weight, rule: Rule, place: int, is_product: bool) -> _Weight:
    """An array of the model after an operation on arrays of the model alone."""
    before, after = rule.operands[place], rule.results[0]
    sources: dict[Factor, Dims] = {}
    for dims, dimension in zip(weight.dims, before, strict=True):
        for factor in dimension:
            sources[factor] = dims
    result: list[Dims] = []
    for d, dimension in enumerate(after):
        known = [sources[factor] for factor in dimension if factor in sources]
        # A part of a dimension, as of several matrices in one, has factors of its own.
        is_part = not known and len(before) == len(after) and not is_product
        if is_part and rule.size(dimension) > 1:
            known = [weight.dims[d]]
        result.append(frozenset().union(*known))
    summed = weight.summed
    if is_product:
        summed = summed | _dims_with(weight, before, set(rule.reduced))
    return _Weight(weight.index, tuple(result), summed)
