"""The table of what operations do with dimensions, against the rules of the installed XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flow_helpers import integers
from jax import lax
from xla_rules import written, xla_rules

from redcoast.core._control_flow import primitive_name
from redcoast.core._jaxpr import iter_equations
from redcoast.sharding.operations import rule_of

NHWC = ("NHWC", "HWIO", "NHWC")


def conv(**options):
    return lambda x, w: lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=NHWC, **options
    )


def pool(x):
    return lax.reduce_window(x, -np.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


IN_BOUNDS = lax.GatherScatterMode.PROMISE_IN_BOUNDS
ADD = lax.ScatterDimensionNumbers((1,), (0,), (0,))


def add_rows(x, i, y):
    return lax.scatter_add(x, i, y, ADD, mode=IN_BOUNDS)


def set_rows(x, i, y):
    return lax.scatter(x, i, y, ADD, mode=IN_BOUNDS)


def rows_at(x, i, sizes):
    numbers = lax.GatherDimensionNumbers((1,), (0,), (0,))
    return lax.gather(x, i, numbers, sizes, mode=IN_BOUNDS)


def windows(x):
    return lax.reduce_window(x, np.float32(0), lax.add, (1, 2), (1, 2), "VALID")


MATRICES = [(4, 6, 6)]
UPDATES = [(10, 6), integers(4, 1), (4, 6)]
# The primitive, the operation of XLA, a function with one equation of it, and its arguments.
SAME = [
    ("abs", "abs", jnp.abs, [(4, 6)]),
    ("add", "add", lax.add, [(4, 6), (4, 6)]),
    ("select_n", "select", lambda c, x, y: lax.select_n(c > 0, x, y), [(4, 6)] * 3),
    (
        "broadcast_in_dim",
        "broadcast_in_dim",
        lambda x: lax.broadcast_in_dim(x, (4, 8, 6), (0, 2)),
        [(4, 6)],
    ),
    ("transpose", "transpose", lambda x: lax.transpose(x, (2, 0, 1)), [(4, 6, 8)]),
    ("reshape", "reshape", lambda x: lax.reshape(x, (24, 8)), [(4, 6, 8)]),
    ("reshape", "reshape", lambda x: lax.reshape(x, (4, 6, 8)), [(24, 8)]),
    ("reshape", "reshape", lambda x: lax.reshape(x, (64, 64)), [(8, 16, 32)]),
    ("reshape", "reshape", lambda x: lax.reshape(x, (2, 1, 4, 6)), [(8, 6)]),
    ("rev", "reverse", lambda x: lax.rev(x, (1,)), [(4, 6)]),
    ("slice", "slice", lambda x: lax.slice(x, (0, 1), (4, 5)), [(4, 6)]),
    ("pad", "pad", lambda x: lax.pad(x, np.float32(0), ((0, 0, 0), (1, 1, 0))), [(4, 6)]),
    ("sort", "sort", lambda x: lax.sort(x, dimension=1), [(4, 6)]),
    ("sort", "sort", lambda x, y: lax.sort((x, y), dimension=0), [(4, 6), (4, 6)]),
    ("concatenate", "concatenate", lambda x, y: lax.concatenate([x, y], 1), [(4, 6), (4, 6)]),
    (
        "dynamic_slice",
        "dynamic_slice",
        lambda x, i: lax.dynamic_slice(x, (np.int32(0), i), (4, 2)),
        [(4, 6), integers()],
    ),
    (
        "dot_general",
        "dot_general",
        lambda x, y: lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,)))),
        [(4, 6, 8), (4, 8, 10)],
    ),
    ("reduce_sum", "reduce", lambda x: jnp.sum(x, 1), [(4, 6, 8)]),
    ("reduce_max", "reduce", lambda x: jnp.max(x, (0, 2)), [(4, 6, 8)]),
    ("reduce_window_max", "reduce_window", pool, [(2, 8, 8, 4)]),
    ("reduce_window_sum", "reduce_window", windows, [(4, 6)]),
    ("gather", "gather", lambda x, i: rows_at(x, i, (1, 6)), [(10, 6), integers(4, 1)]),
    ("gather", "gather", lambda x, i: rows_at(x, i, (1, 3)), [(10, 6), integers(4, 1)]),
    ("gather", "gather", lambda x, i: jnp.take_along_axis(x, i, 1), [(4, 6), integers(4, 2)]),
    ("scatter-add", "scatter", add_rows, UPDATES),
    ("scatter", "scatter", set_rows, UPDATES),
    ("fft", "fft", lambda x: jnp.fft.fft(lax.complex(x, x)), [(4, 6)]),
    ("cumsum", "reduce_window", lambda x: lax.cumsum(x, axis=1), [(4, 6)]),
]
# Where the table differs from an XLA: its rule, those of the versions of XLA, and the reason.
DIFFERENT = [
    (
        (
            "dynamic_update_slice",
            "dynamic_update_slice",
            lambda x, y, i: lax.dynamic_update_slice(x, y, (np.int32(0), i)),
            [(4, 6), (4, 2), integers()],
        ),
        "a b, a c -> a b need_replication=c permutation=b",
        ["a b, a c -> a b need_replication=c", "a b, a c -> a b permutation=bc"],
        "The oldest XLA carries what is written, and newer ones move the update there.",
    ),
    (
        ("conv_general_dilated", "convolution", conv(), [(2, 8, 8, 4), (3, 3, 4, 6)]),
        "a b c d, e f d g -> a b c g need_replication=ef permutation=bc reduction=d",
        [
            "a b c d, . . d e -> a b c e permutation=bc reduction=d",
            "a b c d, e f d g -> a b c g permutation=bcef reduction=d",
        ],
        "XLA leaves out the space of a kernel, or moves it.",
    ),
    (
        ("cholesky", "custom_call", lambda x: lax.linalg.cholesky_p.bind(x), MATRICES),
        "a b c -> a d e need_replication=bcde",
        ["a b c -> a d e, a"],
        "XLA gives the dimensions of matrices a factor each and does not say that they are whole.",
    ),
    (
        ("triangular_solve", "custom_call", lax.linalg.triangular_solve, MATRICES * 2),
        "a b c, a d e -> a d f need_replication=bcef",
        ["a b c, a d e -> a f g"],
        "XLA does not say that matrices are whole, and that each vector is solved for alone.",
    ),
    (
        ("argmax", "reduce", lambda x: lax.argmax(x, 1, np.int32), [(4, 6)]),
        "a b -> a reduction=b",
        ["a b, a b -> a, a reduction=b"],
        "XLA reduces the numbers of the elements beside them.",
    ),
    (
        ("split", "slice", lambda x: lax.split(x, [2, 4], 1), [(4, 6)]),
        "a b -> a b, a b permutation=b",
        ["a b -> a b permutation=b"],
        "XLA slices once for each part.",
    ),
    (
        ("reshape", "reshape", lambda x: lax.reshape(x, (4, 6)), [(6, 4)]),
        "ab c -> ad e need_replication=bcde",
        ["ab cd -> ae fd", "ab cd -> ab ed need_replication=ce permutation=b"],
        "Faster factors are shared by XLA too. A dimension is only split along its slowest.",
    ),
    (
        (
            "select_and_scatter_add",
            "select_and_scatter",
            jax.grad(lambda x: pool(x).sum()),
            [(2, 8, 8, 4)],
        ),
        "a b c d, a b c d -> a b c d permutation=bc",
        ["a b c d, a e f d -> a b c d need_replication=ef permutation=bc"],
        "XLA gives the space of the windows factors of its own.",
    ),
    (
        ("top_k", "top_k", lambda x: lax.top_k(x, 2), [(4, 6)]),
        "a b -> a b, a b need_replication=b",
        [None],
        "XLA has no rule.",
    ),
]


def both_rules(primitive, operation, fn, shapes):
    """The table's rule for the first equation of a primitive, and XLA's for its operation."""
    as_aval = lambda x: jax.ShapeDtypeStruct(x, jnp.float32) if isinstance(x, tuple) else x
    avals = list(map(as_aval, shapes))
    equations = iter_equations(jax.make_jaxpr(fn)(*avals).jaxpr)
    equation = next(x for x in equations if primitive_name(x) == primitive)
    rule = rule_of(equation)
    assert rule is not None
    kinds = {
        "reduction": rule.reduced,
        "permutation": rule.moved,
        "need_replication": rule.whole,
    }
    table = written(rule.operands, rule.results, dict(enumerate(rule.sizes)), kinds)
    return table, dict(reversed(xla_rules(fn, *avals))).get(operation)


@pytest.mark.parametrize("case", SAME, ids=[f"{i}-{case[0]}" for i, case in enumerate(SAME)])
def test_a_rule_is_the_rule_of_xla(case):
    table, xla = both_rules(*case)
    assert table == xla


@pytest.mark.parametrize(
    ("case", "ours", "theirs", "reason"), DIFFERENT, ids=[case[0][0] for case in DIFFERENT]
)
def test_rules_that_differ_from_those_of_xla(case, ours, theirs, reason):
    """A rule that no longer differs belongs to the others."""
    table, xla = both_rules(*case)
    assert any(rule != ours for rule in theirs), reason
    assert table == ours
    assert xla in theirs, reason


# A function with one equation, its arguments, the result of which dimensions are repeated, and
# whether its elements are copies.
PROPERTIES = {
    "broadcast_in_dim": (
        lambda x: lax.broadcast_in_dim(x, (3, 4, 6), (1, 2)),
        (1, 6),
        {0, 1},
        True,
    ),
    "iota": (lambda x: lax.broadcasted_iota(jnp.int32, (4, 6), 1), (), {0}, False),
    "tile": (lambda x: jnp.tile(x, (3, 2)), (1, 6), {0}, True),
    "transpose": (jnp.transpose, (4, 6), set(), True),
    "convert_element_type": (lambda x: x.astype(jnp.int32), (4, 6), set(), True),
    "neg": (lax.neg, (4, 6), set(), False),
}


@pytest.mark.parametrize("primitive", PROPERTIES)
def test_what_xla_does_not_say_of_results_is_that_of_their_values(primitive):
    """Rows are compared with each other, and elements with those of the operand."""
    fn, shape, repeated, copies = PROPERTIES[primitive]
    x = jnp.arange(1, 1 + np.prod(shape, dtype=int), dtype=jnp.float32).reshape(shape)
    equations = iter_equations(jax.make_jaxpr(fn)(x).jaxpr)
    rule = next(rule_of(e) for e in equations if primitive_name(e) == primitive)
    assert rule is not None
    result = np.asarray(fn(x))
    marked = {d for d, dim in enumerate(rule.results[0]) if rule.repeated.issuperset(dim)}
    equal = {d for d in range(result.ndim) if np.ptp(result, axis=d).max() == 0}
    assert marked == equal == repeated
    assert rule.copies == copies == (set(result.flat) <= set(np.asarray(x).flat))


@pytest.mark.parametrize(
    ("fn", "dtype", "linear"),
    [
        (lambda x: x.astype(jnp.int32), jnp.float32, False),
        (lambda x: x.astype(jnp.bfloat16), jnp.float32, True),
        (lambda x: lax.div(x, lax.full_like(x, 2)), jnp.int32, False),
        (lambda x: lax.div(x, lax.full_like(x, 2)), jnp.float32, True),
    ],
)
def test_what_rounds_to_integers_is_not_linear(fn, dtype, linear):
    """A pipeline would otherwise round the sum of each microbatch."""
    equation = jax.make_jaxpr(fn)(jax.ShapeDtypeStruct((4,), dtype)).jaxpr.eqns[-1]
    rule = rule_of(equation)
    assert rule is not None
    assert bool(rule.linear) == linear


KINDS = {
    "is_product": (lambda x: x @ x, lambda x: jnp.sum(x * x)),
    "is_lookup": (lambda x: x[jnp.array([1, 0])], lambda x: x.at[0].set(1.0)),
    # The parts of a split are several results.
    "is_slice": (lambda x: lax.slice(x, (0, 0), (2, 4)), lambda x: lax.split(x, (1, 3))),
    "is_concatenation": (lambda x: lax.concatenate([x, x], 0), lambda x: jnp.sort(x)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_operations_follow_from_their_rules(kind):
    """Readers of the table ask for these in place of the names of primitives."""
    for fn, expected in zip(KINDS[kind], (True, False), strict=True):
        is_kind = False
        for equation in iter_equations(jax.make_jaxpr(fn)(jnp.ones((4, 4)))):
            rule = rule_of(equation)
            is_kind |= rule is not None and getattr(rule, kind)
        assert is_kind == expected
