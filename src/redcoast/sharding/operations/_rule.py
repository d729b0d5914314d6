"""The form of a rule."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from operator import index
from typing import SupportsIndex, TypeVar

from jax.extend.core import JaxprEqn, Literal, Var

Item = TypeVar("Item")
Atom = Var | Literal
Factor = int
Dimension = tuple[Factor, ...]  # slowest first
Dimensions = tuple[Dimension, ...]  # of one array

# In place of the number of elements that an operation needs of the next part: it needs all of them,
# so that the array is split along another dimension meanwhile.
TURNED = -1

# Parameters of equations that are the shape of the result, and sizes in the first operand.
RESULT_SIZES = frozenset(["shape", "new_sizes"])
OPERAND_SIZES = frozenset(["limit_indices", "slice_sizes"])

# Groups of operands, by their places, that an operation is linear in while the others are fixed.
Linear = tuple[frozenset[int], ...]


@dataclass(frozen=True)
class Rule:
    """What an operation does with each dimension of its operands and results.

    A dimension is the product of its factors. A factor that stands in several arrays is split in
    all of them alike. Factors that are neither `reduced`, `moved`, `whole` nor `indexed` are
    carried: along them, each element of a result depends on the same element of the operands alone.

    - `operands`, `results`: the factors of each dimension of each array.
    - `sizes`: the size of each factor.
    - `reduced`: the results combine all elements along these factors, and do not have them.
    - `moved`: elements change their places along these, or depend on their neighbours.
    - `whole`: the arrays are needed as a whole along these: a sharding ends here. Where a result
        has the factor too, as in a concatenation, a batch is sharded again, unless it is
        `shuffled`.
    - `shuffled`: the part of `whole` along which any element may come from any place, as in a sort.
    - `blocked`: dimensions of these are never tensor-parallel, such as the space of a convolution.
    - `near`: the part of `blocked` along which an example can be split, and how many elements of
        the next part are needed, the halo, or `TURNED`.
    - `indexed`: elements along these are addressed by their numbers, so that an element is not
        treated as every other one is.
    - `repeated`: all elements of a result along these are equal.
    - `sums`: whether `reduced` factors are summed over.
    - `linear`: what the operation is linear in.
    - `copies`: whether each element of a result is one of the first operand, perhaps rounded.
    - `writes`: the place of an operand that is written into the first, at places that are computed.
        Where only a part of a dimension is written, the dimension of the first operand is `moved`.
    """

    operands: tuple[Dimensions, ...]
    results: tuple[Dimensions, ...]
    sizes: tuple[int, ...]
    reduced: frozenset[Factor] = frozenset()
    moved: frozenset[Factor] = frozenset()
    whole: frozenset[Factor] = frozenset()
    shuffled: frozenset[Factor] = frozenset()
    blocked: frozenset[Factor] = frozenset()
    indexed: frozenset[Factor] = frozenset()
    repeated: frozenset[Factor] = frozenset()
    sums: bool = False
    linear: Linear = ()
    copies: bool = False
    writes: int | None = None
    near: tuple[tuple[Factor, int], ...] = ()

    def size(self, factors: Iterable[Factor]) -> int:
        """The number of elements along a dimension, or along some of its factors."""
        return prod(map(self.sizes.__getitem__, factors))

    def is_carried(self, factor: Factor) -> bool:
        """Whether an element of a result depends on the same element of operands along a factor."""
        return factor not in self.reduced | self.moved | self.whole | self.indexed

    def split_product(
        self, operands: Sequence[Dimension | None], of_result: Dimension | None
    ) -> tuple[bool, list[int]]:
        """What a product does whose operands and result are split along these dimensions: whether
        it sums parts, and else the operands that are gathered."""
        left, right = operands
        # A sum over a dimension along which both operands are split alike is one of parts.
        if left is not None and left == right and not self.reduced.isdisjoint(left):
            return True, []
        return False, [side for side in (0, 1) if operands[side] not in (None, of_result)]

    @property
    def is_product(self) -> bool:
        """Whether the result is a sum of products of two arrays, as that of `dot_general`.

        A convolution is one of shifted arrays, and a ragged product one of groups.
        """
        is_sum = self.sums and len(self.operands) == 2 and len(self.results) == 1
        return is_sum and not self.moved | self.whole

    @property
    def is_lookup(self) -> bool:
        """Whether rows of a table are read, at places that are computed."""
        return self.writes is None and not self.reduced.isdisjoint(self.indexed)

    @property
    def is_slice(self) -> bool:
        """Whether a part of a dimension is read, at places that the program says."""
        is_read = self.writes is None and len(self.results) == 1
        return is_read and not self.moved.isdisjoint(self.indexed)

    @property
    def is_concatenation(self) -> bool:
        """Whether arrays are joined along a dimension."""
        if len(self.operands) < 2 or len(self.results) != 1:
            return False
        common = all_factors(self.operands[0]) & all_factors(self.results[0])
        return not common.isdisjoint(self.whole - self.shuffled - self.indexed)

    @property
    def is_pairwise(self) -> bool:
        """Whether each result is the operand at the same place, whatever the other operands are."""
        return len(self.operands) > 1 and self.operands == self.results


class Factors:
    """Numbers the factors of a rule while it is made."""

    def __init__(self):
        self._sizes: list[int] = []

    def new(self, size: int) -> Dimension:
        """A dimension that is one new factor."""
        self._sizes.append(size)  # by the number of the factor
        return (len(self._sizes) - 1,)

    def of(self, shape: Iterable[int]) -> list[Dimension]:
        """The dimensions of an array that shares none with another."""
        return [self.new(size) for size in shape]

    def of_each(self, atoms: Iterable[Atom]) -> list[list[Dimension]]:
        """The dimensions of arrays that share none with each other."""
        return [self.of(shape_of(atom)) for atom in atoms]

    def rule(
        self,
        operands: Sequence[Sequence[Dimension]],
        results: Sequence[Sequence[Dimension]],
        *,
        sums: bool = False,
        linear: Linear = (),
        copies: bool = False,
        writes: int | None = None,
        near: Iterable[tuple[Dimension, int]] = (),
        **sets: Iterable[Dimension],
    ) -> Rule:
        """The rule, whose `sets` of factors, such as `reduced`, are given as dimensions."""
        factors = {name: all_factors(dimensions) for name, dimensions in sets.items()}
        return Rule(
            operands=tuple(map(tuple, operands)),
            results=tuple(map(tuple, results)),
            sizes=tuple(self._sizes),
            sums=sums,
            linear=linear,
            copies=copies,
            writes=writes,
            near=tuple((dimension[0], count) for dimension, count in near),
            **factors,  # pyright: ignore[reportArgumentType]
        )


def primitives(text: str) -> frozenset[str]:
    """The names of primitives in a text."""
    return frozenset(text.split())


def all_factors(dimensions: Iterable[Dimension]) -> frozenset[Factor]:
    """All factors of some dimensions."""
    return frozenset[Factor]().union(*dimensions)


def at_places(dimensions: Sequence[Item], places: Iterable[SupportsIndex]) -> list[Item]:
    """The dimensions of an array at some places."""
    return [dimensions[index(d)] for d in places]


def without(dimensions: Sequence[Item], removed: Collection[SupportsIndex]) -> list[Item]:
    """The dimensions of an array, in order, but for those at the places `removed`."""
    return [dimension for d, dimension in enumerate(dimensions) if d not in removed]


def shape_of(atom: Atom) -> tuple[int, ...]:
    """The shape of a variable or a literal of a jaxpr; `()` for what has none, as tokens."""
    return tuple(getattr(atom.aval, "shape", ()))


def atom_bytes(atom: Atom) -> int:
    """The bytes of a variable or a literal; 0 for what has no elements of a size, as tokens."""
    dtype = getattr(atom.aval, "dtype", None)
    return prod(shape_of(atom)) * getattr(dtype, "itemsize", 0)


def shapes_before_and_after(equation: JaxprEqn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of the first operand and of the first result."""
    return shape_of(equation.invars[0]), shape_of(equation.outvars[0])


def each_alone(*places: int) -> Linear:
    """Linear in each of several operands."""
    return tuple(frozenset([place]) for place in places)


def together(count: int, first: int = 0) -> Linear:
    """Linear in several operands at once, as a sum of them is."""
    return (frozenset(range(first, count)),)


def is_linear(rule: Rule, varied: Sequence[bool]) -> bool:
    """Whether an operation is linear in each of the `varied` operands, in one or by itself."""
    linear_in = frozenset[int]().union(*rule.linear)
    return all(place in linear_in for place, varies in enumerate(varied) if varies)


def fixed_operands(rule: Rule, varied: Sequence[bool]) -> list[bool]:
    """Which operands the derivative of a linear operation by the `varied` ones needs.

    These are the operands that are fixed while it is linear in a varied one: the other factor of a
    product, and the indices of a lookup.
    """
    fixed = [False] * len(varied)
    for group in rule.linear:
        if not any(varied[place] for place in group):
            continue
        for place in range(len(varied)):
            fixed[place] |= place not in group
    return fixed


def neighbours(size: int, stride: int, lhs_dilation: int, rhs_dilation: int) -> int:
    """How many elements of the next part a window needs at the edge of a part."""
    beyond = (size - 1) * rhs_dilation + 1 - stride  # of a window that begins at the edge
    return max(0, -(-beyond // lhs_dilation))
