"""Operations on each element along some dimensions alone, and operations that create arrays.

The former are those on keys and matrices, kernels, and functions on the host under `jax.vmap`.
"""

from collections.abc import Sequence
from dataclasses import replace

from jax.extend.core import JaxprEqn

from ...core._mapped_callbacks import independent_levels
from ...core._pallas import independent_dims
from ._rule import Dimension, Factors, Rule, primitives, shape_of, without

# For each dimension of an array, the number of what it counts, or None.
Numbers = list[int | None]

DECOMPOSITIONS = primitives("""
    cholesky cholesky_update eig eigh hessenberg householder_product lu
    lu_pivots_to_permutation qr geqrf geqp3 ormqr schur svd triangular_solve tridiagonal
    tridiagonal_solve
""")
# These solve for each vector of the last operand alone. Its vectors are columns, or rows.
SOLVES = frozenset(["triangular_solve", "tridiagonal_solve"])
# The first operand of these is a vector for each matrix.
OF_VECTORS = frozenset(["lu_pivots_to_permutation", "tridiagonal_solve"])
# Equinox's reductions over all rows of a `vmap`. They say whether something is needed by any row,
# and rows do not depend on the answer of other rows.
OF_ANY_ROW = frozenset(["unvmap_all", "unvmap_any", "unvmap_max"])
# These have no dimensions to shard, or no results.
FRESH = primitives("""
    iota rng_uniform rng_bit_generator debug_callback debug_print axis_index empty empty2
    create_token partition_id platform_index inspect_sharding unvmap_all unvmap_any unvmap_max
""")
# Each key is independent: the results have the leading dimensions of the keys.
KEYED = primitives("random_bits random_clone random_seed random_split random_unwrap random_wrap")


def fresh_rule(equation: JaxprEqn) -> Rule:
    factors = Factors()
    operands = factors.of_each(equation.invars)
    results = factors.of_each(equation.outvars)
    numbered: list[Dimension] = []
    repeated: list[Dimension] = []
    if equation.primitive.name == "iota":
        axis = equation.params["dimension"]
        numbered = [results[0][axis]]
        repeated = without(results[0], [axis])
    return factors.rule(operands, results, indexed=numbered, repeated=repeated)


def keyed_rule(equation: JaxprEqn) -> Rule:
    """Raw keys are arrays of numbers, whose last dimension is removed or added."""
    # [i 2] -> [i], and [i] -> [i 2]
    factors = Factors()
    keys, *others = factors.of_each(equation.invars)
    after = shape_of(equation.outvars[0])
    result = keys[: len(after)] + factors.of(after[len(keys) :])
    return factors.rule([keys, *others], [result], whole=keys[len(after) :])


def random_gamma_rule(equation: JaxprEqn) -> Rule:
    """The numbers that are drawn from one key depend on how many there are."""
    # keys [i], shapes [i j] -> [i j], with `j` numbered
    factors = Factors()
    result = factors.of(shape_of(equation.outvars[0]))
    keys, shapes = map(shape_of, equation.invars)
    count = min(len(keys), len(result))
    of_keys = [*result[:count], *factors.of(keys[count:])]
    return factors.rule([of_keys, result[: len(shapes)]], [result], indexed=result[count:])


def vmapped_rule(equation: JaxprEqn) -> Rule | None:
    """A primitive of Equinox under `vmap` acts on each element along one axis alone."""
    axes = equation.params.get("__batch_axes")
    if axes is None:
        return None
    dims: list[Numbers] = []
    for atom, axis in zip(equation.invars, axes, strict=True):
        numbers: Numbers = [None] * len(shape_of(atom))
        if axis is not None:
            numbers[axis] = 0
        dims.append(numbers)
    for var in equation.outvars:
        dims.append([0, *[None] * (len(shape_of(var)) - 1)])
    return independent_rule(equation, dims)


def kernel_rule(equation: JaxprEqn) -> Rule | None:
    """A kernel of Pallas acts on each element alone along dimensions such as that of a `vmap`."""
    dims = independent_dims(equation)
    if dims is None:
        return None
    return independent_rule(equation, dims)


def callback_rule(equation: JaxprEqn) -> Rule | None:
    """A function on the host under `vmap` acts on each element along the dimensions that it adds.

    None for one that gets entire arrays.
    """
    levels = independent_levels(equation)
    if not levels or not equation.outvars:
        return None
    leading = shape_of(equation.outvars[0])[:levels]
    dims: list[Numbers] = []
    for atom in (*equation.invars, *equation.outvars):
        numbers: Numbers = [None] * len(shape_of(atom))
        for d, size in enumerate(shape_of(atom)[:levels]):
            # All elements share an operand of size one.
            if size == leading[d]:
                numbers[d] = d
        dims.append(numbers)
    return independent_rule(equation, dims)


def independent_rule(equation: JaxprEqn, dims: Sequence[Sequence[int | None]]) -> Rule:
    """The rule of an operation on each element alone along the dimensions that have a number in
    `dims`, the same one in all arrays. It needs the others as a whole."""
    # [i j], [k] -> [i l], with all but `i` needed as a whole
    factors = Factors()
    arrays = factors.of_each([*equation.invars, *equation.outvars])
    shared: dict[int, Dimension] = {}
    whole: list[Dimension] = []
    for dimensions, numbers in zip(arrays, dims, strict=True):
        for d, number in enumerate(numbers):
            if number is None:
                whole.append(dimensions[d])
            else:
                dimensions[d] = shared.setdefault(number, dimensions[d])
    count = len(equation.invars)
    return factors.rule(arrays[:count], arrays[count:], whole=whole)


def decomposition_rule(equation: JaxprEqn) -> Rule:
    """Leading dimensions count matrices; each matrix is needed as a whole.

    What is solved for may be divided into its vectors.
    """
    # [i r c] -> [i r], [i r c], with `r` and `c` needed as a whole
    # [i r r], [i r c] -> [i r c], with `r` needed as a whole
    first = shape_of(equation.invars[0])
    own_rank = 2
    if equation.primitive.name in OF_VECTORS:
        own_rank = 1
    count = len(first) - own_rank
    dims: list[Numbers] = []
    for atom in (*equation.invars, *equation.outvars):
        numbers: Numbers = [None] * len(shape_of(atom))
        if shape_of(atom)[:count] == first[:count]:
            numbers[:count] = range(count)
        dims.append(numbers)
    if equation.primitive.name in SOLVES:
        place = -2
        if equation.params.get("left_side", True):
            place = -1
        # The columns of what is solved for, the last operand, are those of the result.
        right_side, solution = dims[len(equation.invars) - 1], dims[len(equation.invars)]
        right_side[place] = count
        solution[place] = count
    rule = independent_rule(equation, dims)
    return replace(rule, blocked=rule.whole)
