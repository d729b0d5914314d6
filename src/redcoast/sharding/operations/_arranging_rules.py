"""Operations that rearrange, cut and join arrays."""

from collections.abc import Callable, Sequence
from math import gcd

from jax.extend.core import JaxprEqn

from ._rule import Dimension, Factors, Linear, Rule, each_alone, shape_of, together


def transpose_rule(equation: JaxprEqn) -> Rule:
    factors = Factors()
    operand = factors.of(shape_of(equation.invars[0]))
    result = [operand[d] for d in equation.params["permutation"]]
    return factors.rule([operand], [result], linear=each_alone(0))


def squeeze_rule(equation: JaxprEqn) -> Rule:
    factors, gone = Factors(), equation.params["dimensions"]
    operand = factors.of(shape_of(equation.invars[0]))
    result = [dimension for d, dimension in enumerate(operand) if d not in gone]
    return factors.rule([operand], [result], linear=each_alone(0))


def expand_dims_rule(equation: JaxprEqn) -> Rule:
    factors, new = Factors(), equation.params["dimensions"]
    operand = factors.of(shape_of(equation.invars[0]))
    rest = iter(operand)
    rank = len(shape_of(equation.outvars[0]))
    result = [factors.new(1) if d in new else next(rest) for d in range(rank)]
    return factors.rule([operand], [result], linear=each_alone(0))


def broadcast_in_dim_rule(equation: JaxprEqn) -> Rule:
    factors, before = Factors(), shape_of(equation.invars[0])
    operand = factors.of(before)
    places = {at: d for d, at in enumerate(equation.params["broadcast_dimensions"])}
    result: list[Dimension] = []
    for at, size in enumerate(shape_of(equation.outvars[0])):
        carried = at in places and before[places[at]] == size
        result.append(operand[places[at]] if carried else factors.new(size))
    # A size that is only known at run time is an operand too.
    sizes = [factors.of(shape_of(atom)) for atom in equation.invars[1:]]
    return factors.rule([operand, *sizes], [result], linear=each_alone(0))


def reshape_rule(equation: JaxprEqn) -> Rule:
    """Dimensions are merged from the factors of several, or taken apart into them."""
    factors, before = Factors(), shape_of(equation.invars[0])
    order = equation.params.get("dimensions") or range(len(before))
    shape = [before[d] for d in order]
    permuted, result, torn = _common_factors(factors, shape, shape_of(equation.outvars[0]))
    operand: list[Dimension] = [()] * len(before)
    for d, dimension in zip(order, permuted, strict=True):
        operand[d] = dimension
    return factors.rule([operand], [result], whole=torn, linear=each_alone(0))


def _common_factors(
    factors: Factors, before: Sequence[int], after: Sequence[int]
) -> tuple[list[Dimension], list[Dimension], list[Dimension]]:
    """Takes two shapes of as many elements apart into common factors, slowest first.

    Where the boundaries of the two do not meet, such as between (6, 4) and (4, 6), what is left
    of both has factors of its own, which are returned as the third list.
    """
    sides: list[list[list[int]]] = [[[] for _ in before], [[] for _ in after]]
    shapes, places, left = (before, after), [0, 0], [1, 1]
    torn: list[Dimension] = []
    if 0 in before or 0 in after:
        return factors.of(before), factors.of(after), []
    while True:
        for side in (0, 1):
            while left[side] == 1 and places[side] < len(shapes[side]):
                left[side] = shapes[side][places[side]]
                places[side] += 1
        if left == [1, 1]:
            break
        common = gcd(*left)
        if common > 1:
            (factor,) = factors.new(common)
            for side in (0, 1):
                sides[side][places[side] - 1].append(factor)
                left[side] //= common
            continue
        # What is torn ends where the products of both sides are equal again.
        products = list(left)
        for side in (0, 1):
            torn.append(factors.new(left[side]))
            sides[side][places[side] - 1].append(torn[-1][0])
        while products[0] != products[1]:
            side = int(products[1] < products[0])
            size = shapes[side][places[side]]
            torn.append(factors.new(size))
            sides[side][places[side]].append(torn[-1][0])
            products[side] *= size
            places[side] += 1
        left = [1, 1]
    # A dimension of one element has a factor too.
    for side, shape in enumerate(shapes):
        for d, size in enumerate(shape):
            if not sides[side][d]:
                sides[side][d] = list(factors.new(size))
    return [tuple(d) for d in sides[0]], [tuple(d) for d in sides[1]], torn


# Whether dimension `d` of an operand is carried, given the shapes of operand and result.
Carried = Callable[[JaxprEqn, int, Sequence[int], Sequence[int]], bool]


def same_size(equation: JaxprEqn, d: int, before: Sequence[int], after: Sequence[int]) -> bool:
    return before[d] == after[d]


def not_along(key: str) -> Carried:
    """Every dimension but those that a parameter names."""

    def carried(equation: JaxprEqn, d: int, before: Sequence[int], after: Sequence[int]) -> bool:
        named = equation.params.get(key, -1)
        dimensions = (named,) if isinstance(named, int) else named
        return d not in {at % len(before) for at in dimensions}

    return carried


def unpadded(equation: JaxprEqn, d: int, before: Sequence[int], after: Sequence[int]) -> bool:
    return equation.params["padding_config"][d] == (0, 0, 0)


def unwindowed(equation: JaxprEqn, d: int, before: Sequence[int], after: Sequence[int]) -> bool:
    return equation.params["window_dimensions"][d] == 1 and before[d] == after[d]


def along(
    carried: Carried,
    *,
    moved: bool = False,
    shuffled: bool = False,
    blocked: bool = False,
    indexed: bool = False,
    linear: Linear = (),
) -> Callable[[JaxprEqn], Rule]:
    """The rule of operations along dimensions of arrays that all have the first operand's shape.

    The other dimensions are carried. Operands of other shapes, such as indices, share nothing.
    """

    def rule(equation: JaxprEqn) -> Rule:
        factors = Factors()
        before, after = shape_of(equation.invars[0]), shape_of(equation.outvars[0])
        dimensions = factors.of(before)
        operands = [dimensions]
        for atom in equation.invars[1:]:
            shape = shape_of(atom)
            operands.append(dimensions if shape == before else factors.of(shape))
        changed = [
            dimension
            for d, dimension in enumerate(dimensions)
            if not carried(equation, d, before, after)
        ]
        results = [dimensions] * len(equation.outvars)
        return factors.rule(
            operands,
            results,
            moved=changed if moved else [],
            whole=[] if moved else changed,
            shuffled=changed if shuffled else [],
            blocked=changed if blocked else [],
            indexed=changed if indexed else [],
            linear=linear,
        )

    return rule


def tile_rule(equation: JaxprEqn) -> Rule:
    """A dimension of one element is broadcast; a larger one is repeated."""
    factors, repetitions = Factors(), equation.params["reps"]
    before, after = shape_of(equation.invars[0]), shape_of(equation.outvars[0])
    operand = factors.of(before)
    result: list[Dimension] = []
    moved: list[Dimension] = []
    for dimension, times, size, total in zip(operand, repetitions, before, after, strict=True):
        if times == 1:
            result.append(dimension)
        elif size == 1:
            result.append(factors.new(total))
        else:
            result.append(dimension)
            moved.append(dimension)
    return factors.rule([operand], [result], moved=moved, linear=each_alone(0))


def concatenate_rule(equation: JaxprEqn) -> Rule:
    factors, axis = Factors(), equation.params["dimension"]
    result = factors.of(shape_of(equation.outvars[0]))
    operands = [result] * len(equation.invars)
    return factors.rule(operands, [result], whole=[result[axis]], linear=together(len(operands)))


def stack_rule(equation: JaxprEqn) -> Rule:
    factors, axis = Factors(), equation.params["axis"]
    result = factors.of(shape_of(equation.outvars[0]))
    operand = [*result[:axis], *result[axis + 1 :]]
    count = len(equation.invars)
    return factors.rule([operand] * count, [result], moved=[result[axis]], linear=together(count))


def unstack_rule(equation: JaxprEqn) -> Rule:
    factors, axis = Factors(), equation.params["axis"]
    operand = factors.of(shape_of(equation.invars[0]))
    result = [*operand[:axis], *operand[axis + 1 :]]
    results = [result] * len(equation.outvars)
    gone = [operand[axis]]
    return factors.rule([operand], results, whole=gone, indexed=gone, linear=each_alone(0))


def bitcast_rule(equation: JaxprEqn) -> Rule:
    """If the item sizes differ, the last dimension is added or removed."""
    factors = Factors()
    before, after = shape_of(equation.invars[0]), shape_of(equation.outvars[0])
    longer = factors.of(max(before, after, key=len))
    operand, result = longer[: len(before)], longer[: len(after)]
    return factors.rule([operand], [result], moved=longer[min(len(before), len(after)) :])


def reduction_rule(equation: JaxprEqn) -> Rule:
    """Sums, maxima and similar over the dimensions that a parameter names."""
    factors, params = Factors(), equation.params
    axes = params.get("axes", params.get("dimensions", ()))
    operand = factors.of(shape_of(equation.invars[0]))
    operands = [operand if shape_of(atom) else [] for atom in equation.invars]
    result = [dimension for d, dimension in enumerate(operand) if d not in axes]
    reduced = [operand[d] for d in axes]
    sums = equation.primitive.name == "reduce_sum"
    linear = each_alone(0) if sums else ()
    results = [result] * len(equation.outvars)
    return factors.rule(operands, results, reduced=reduced, sums=sums, linear=linear)


def named_reduction_rule(equation: JaxprEqn) -> Rule:
    """`psum` and similar: under `vmap`, the axis that they name is a dimension."""
    factors = Factors()
    axes = [axis for axis in equation.params.get("axes", ()) if isinstance(axis, int)]
    operands = [factors.of(shape_of(atom)) for atom in equation.invars]
    results = [[x for d, x in enumerate(operand) if d not in axes] for operand in operands]
    reduced = [operand[d] for operand in operands for d in axes]
    sums = equation.primitive.name.startswith("psum")
    linear = together(len(operands)) if sums else ()
    return factors.rule(operands, results, reduced=reduced, sums=sums, linear=linear)


def fourier_rule(equation: JaxprEqn) -> Rule:
    factors = Factors()
    before, after = shape_of(equation.invars[0]), shape_of(equation.outvars[0])
    count = len(equation.params["fft_lengths"])
    dimensions = factors.of([max(pair) for pair in zip(before, after, strict=True)])
    transformed = dimensions[len(before) - count :]
    return factors.rule(
        [dimensions], [dimensions], whole=transformed, blocked=transformed, linear=each_alone(0)
    )


def window_scatter_rule(equation: JaxprEqn) -> Rule:
    """`select_and_scatter_add` and similar: the derivatives of pooling."""
    factors, after = Factors(), shape_of(equation.outvars[0])
    result = factors.of(after)
    windows = equation.params["window_dimensions"]
    operands: list[list[Dimension]] = []
    moved = {dimension for d, dimension in enumerate(result) if windows[d] > 1}
    for atom in equation.invars:
        shape = shape_of(atom)
        if len(shape) != len(after):
            operands.append(factors.of(shape))
            continue
        operands.append(result)
        moved.update(x for x, a, b in zip(result, shape, after, strict=True) if a != b)
    return factors.rule(operands, [result], moved=tuple(moved), blocked=tuple(moved))
