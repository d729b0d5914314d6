"""Operations that make arrays, and those on keys and matrices."""

from jax.extend.core import JaxprEqn

from ._rule import Dimension, Factors, Rule, shape_of, without

DECOMPOSITIONS = frozenset(
    """
    cholesky cholesky_update eig eigh hessenberg householder_product lu
    lu_pivots_to_permutation qr geqrf geqp3 ormqr schur svd triangular_solve tridiagonal
    tridiagonal_solve
    """.split()  # noqa: SIM905
)
# The first operand of these is a vector for each matrix.
OF_VECTORS = frozenset(["lu_pivots_to_permutation", "tridiagonal_solve"])
# Equinox's reductions over all rows of a `vmap`. They say whether something is needed by any row,
# and rows do not depend on the answer of other rows.
OF_ANY_ROW = frozenset(["unvmap_all", "unvmap_any", "unvmap_max"])
# These have no dimensions to shard, or no results.
FRESH = frozenset(
    """
    iota rng_uniform rng_bit_generator debug_callback debug_print axis_index empty create_token
    partition_id platform_index inspect_sharding unvmap_all unvmap_any unvmap_max
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


def decomposition_rule(equation: JaxprEqn) -> Rule:
    """Leading dimensions count matrices; each matrix is needed as a whole."""
    # [i r c] -> [i r], [i r c], with `r` and `c` needed as a whole
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
    return factors.rule(operands, results, whole=whole, blocked=whole)
