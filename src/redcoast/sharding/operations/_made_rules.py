"""Operations that make arrays, and those on keys and matrices."""

import itertools

from jax.extend.core import JaxprEqn

from ...core._mapped_callbacks import independent_levels
from ...core._pallas import independent_dims
from ._rule import Dimension, Factors, Rule, shape_of, without

DECOMPOSITIONS = frozenset(
    """
    cholesky cholesky_update eig eigh hessenberg householder_product lu
    lu_pivots_to_permutation qr geqrf geqp3 ormqr schur svd triangular_solve tridiagonal
    tridiagonal_solve
    """.split()  # noqa: SIM905
)
# These solve for each vector of the last operand alone. Its vectors are columns, or rows.
SOLVES = frozenset(["triangular_solve", "tridiagonal_solve"])
# The first operand of these is a vector for each matrix.
OF_VECTORS = frozenset(["lu_pivots_to_permutation", "tridiagonal_solve"])
# Equinox's reductions over all rows of a `vmap`. They say whether something is needed by any row,
# and rows do not depend on the answer of other rows.
OF_ANY_ROW = frozenset(["unvmap_all", "unvmap_any", "unvmap_max"])
# These have no dimensions to shard, or no results.
FRESH = frozenset(
    """
    iota rng_uniform rng_bit_generator debug_callback debug_print axis_index empty empty2
    create_token partition_id platform_index inspect_sharding unvmap_all unvmap_any unvmap_max
    """.split()  # noqa: SIM905
)
# Each key is independent: the results have the leading dimensions of the keys.
KEYED = frozenset(
    """
    random_bits random_clone random_seed random_split random_unwrap random_wrap
    """.split()  # noqa: SIM905
)


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
    # [i j], [k i] -> [i l], with all but `i` needed as a whole
    axes = equation.params.get("__batch_axes")
    if axes is None:
        return None
    factors = Factors()
    operands = factors.of_each(equation.invars)
    results = factors.of_each(equation.outvars)
    rows = factors.new(equation.params["__axis_size"])
    for dimensions, axis in zip(operands, axes, strict=True):
        if axis is not None:
            dimensions[axis] = rows
    for dimensions in results:
        dimensions[0] = rows
    others = itertools.chain.from_iterable([*operands, *results])
    whole = [dimension for dimension in others if dimension != rows]
    return factors.rule(operands, results, whole=whole)


def kernel_rule(equation: JaxprEqn) -> Rule | None:
    """A kernel of Pallas acts on each element alone along dimensions such as that of a `vmap`."""
    # [i j], [k] -> [i l], with all but `i` needed as a whole
    dims = independent_dims(equation)
    if dims is None:
        return None
    factors = Factors()
    arrays = factors.of_each([*equation.invars, *equation.outvars])
    of_grid: dict[int, Dimension] = {}
    whole: list[Dimension] = []
    for dimensions, of_array in zip(arrays, dims, strict=True):
        for d, dim in enumerate(of_array):
            if dim is None:
                whole.append(dimensions[d])
            else:
                dimensions[d] = of_grid.setdefault(dim, dimensions[d])
    count = len(equation.invars)
    return factors.rule(arrays[:count], arrays[count:], whole=whole)


def callback_rule(equation: JaxprEqn) -> Rule | None:
    """A function on the host under `vmap` acts on each element along the dimensions that it adds.

    None for one that gets entire arrays.
    """
    # [i j], [1 k] -> [i l], with all but `i` needed as a whole
    levels = independent_levels(equation)
    if not levels or not equation.outvars:
        return None
    factors = Factors()
    operands = factors.of_each(equation.invars)
    results = factors.of_each(equation.outvars)
    leading = results[0][:levels]
    whole: list[Dimension] = []
    for dimensions in (*operands, *results):
        whole += dimensions[levels:]
    for dimensions in results:
        dimensions[:levels] = leading
    for atom, dimensions in zip(equation.invars, operands, strict=True):
        for d, size in enumerate(shape_of(atom)[:levels]):
            # All elements share an operand of size one.
            if size == shape_of(equation.outvars[0])[d]:
                dimensions[d] = leading[d]
    return factors.rule(operands, results, whole=whole)


def decomposition_rule(equation: JaxprEqn) -> Rule:
    """Leading dimensions count matrices; each matrix is needed as a whole.

    What is solved for may be divided into its vectors.
    """
    # [i r c] -> [i r], [i r c], with `r` and `c` needed as a whole
    # [i r r], [i r c] -> [i r c], with `r` needed as a whole
    factors = Factors()
    first = shape_of(equation.invars[0])
    own_rank = 2
    if equation.primitive.name in OF_VECTORS:
        own_rank = 1
    count = len(first) - own_rank
    leading = factors.of(first[:count])
    whole: list[Dimension] = []

    def dimensions(shape: tuple[int, ...]) -> list[Dimension]:
        carried: list[Dimension] = []
        if shape[:count] == first[:count]:
            carried = leading
        own = factors.of(shape[len(carried) :])
        whole.extend(own)
        return carried + own

    operands = [dimensions(shape_of(atom)) for atom in equation.invars]
    results = [dimensions(shape_of(var)) for var in equation.outvars]
    if equation.primitive.name in SOLVES:
        place = -1 if equation.params.get("left_side", True) else -2
        vectors = operands[-1][place]
        whole = [dim for dim in whole if dim not in (vectors, results[0][place])]
        results[0][place] = vectors
    return factors.rule(operands, results, whole=whole, blocked=whole)
