"""Which dimensions an operation splits together, and what has to be sent if they are split."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flow_helpers import costs, integers, keys, links, unknown
from jax import lax

NHWC = ("NHWC", "HWIO", "NHWC")


def conv(**options):
    return lambda x, w: lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=NHWC, **options
    )


def pool(x):
    return lax.reduce_window(x, -np.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def window_pair(x, y):
    add = lambda a, b: (a[0] + b[0], a[1] * b[1])
    zeros = (np.float32(0), np.float32(0))
    return lax.reduce_window((x, y), zeros, add, (1, 2), (1, 2), "VALID")


vmapped = lambda fn, axes=0: jax.vmap(fn, in_axes=axes, axis_name="i")
SHIFT = jnp.int32(0)

LINKS = {
    # Elementwise.
    "relu": (jax.nn.relu, [(4, 6)], "ab->ab"),
    "add": (jnp.add, [(4, 6), (4, 6)], "ab,ab->ab"),
    "size one": (jnp.add, [(4, 6), (1, 6)], "ab,.b->ab"),
    "scalar": (jnp.multiply, [(4, 6), ()], "ab,->ab"),
    "where": (lambda x, y: jnp.where(x > 0, x, y), [(4, 6), (4, 6)], "ab,ab->ab"),
    "select by scalar": (
        lambda c, x, y: lax.select_n(c > 0, x, y),
        [(), (4, 6), (4, 6)],
        ",ab,ab->ab",
    ),
    "clip": (lambda x: jnp.clip(x, 0.0, 1.0), [(4, 6)], "ab->ab"),
    "astype": (lambda x: x.astype(jnp.bfloat16), [(4, 6)], "ab->ab"),
    "bitcast": (lambda x: lax.bitcast_convert_type(x, jnp.uint8), [(4, 6)], "ab->abc"),
    "barrier": (lambda *x: lax.optimization_barrier(x), [(4, 6), (4, 6)], "ab,cd->ab,cd"),
    "gamma": (lambda a, k: jax.random.gamma(k, a), [(4, 6), keys()], "ab,->ab"),
    # Contractions.
    "dot": (jnp.dot, [(4, 6), (6, 8)], "ab,bc->ac"),
    "batched dot": (jnp.matmul, [(4, 6, 8), (4, 8, 10)], "abc,acd->abd"),
    "outer": (jnp.outer, [(4,), (6,)], "a,b->ab"),
    "einsum": (
        lambda x, y, z: jnp.einsum("bsd,dhk,hkm->bsm", x, y, z),
        [(2, 4, 6), (6, 2, 8), (2, 8, 10)],
        "abc,cde,def->abf",
    ),
    "attention": (
        jax.nn.dot_product_attention,
        [(2, 4, 6, 8), (2, 10, 6, 8), (2, 10, 6, 8)],
        "abcd,aecd,aecf->abcf",
    ),
    "ragged dot": (lax.ragged_dot, [(8, 4), (2, 4, 6), integers(2)], "ab,#bc,#->ac"),
    "conv": (conv(), [(2, 8, 8, 4), (2, 2, 4, 6)], "a##b,##bc->a##c"),
    "dilated": (conv(rhs_dilation=(2, 2)), [(2, 8, 8, 4), (2, 2, 4, 6)], "a##b,##bc->a##c"),
    "transposed": (
        lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME"),
        [(2, 8, 8, 4), (2, 2, 4, 6)],
        "a##b,##bc->a##c",
    ),
    "depthwise": (conv(feature_group_count=4), [(2, 8, 8, 4), (2, 2, 1, 8)], "a##b,##.b->a##b"),
    "grouped": (conv(feature_group_count=2), [(2, 8, 8, 4), (2, 2, 2, 6)], "a##b,###b->a##b"),
    # Reductions.
    "sum": (lambda x: jnp.sum(x, 1), [(4, 6, 8)], "abc->ac"),
    "max": (lambda x: jnp.max(x, (0, 2)), [(4, 6, 8)], "abc->b"),
    "argmax": (lambda x: jnp.argmax(x, 1), [(4, 6, 8)], "abc->ac"),
    "reduce": (
        lambda x: lax.reduce(x, np.float32(0), lambda a, b: a * b + a, (1,)),
        [(4, 6)],
        "ab->a",
    ),
    "logsumexp": (lambda x: jax.nn.logsumexp(x, 1), [(4, 6)], "ab->a"),
    "softmax": (jax.nn.softmax, [(4, 6)], "ab->ab"),
    "var": (lambda x: jnp.var(x, 1), [(4, 6)], "ab->a"),
    "nanmean": (lambda x: jnp.nanmean(x, 1), [(4, 6)], "ab->a"),
    "psum": (vmapped(lambda x: x - lax.psum(x, "i")), [(4, 6)], "ab->ab"),
    "psum alone": (vmapped(lambda x: lax.psum(x, "i")), [(4, 6)], "ab->cb"),
    # Shapes.
    "transpose": (lambda x: jnp.transpose(x, (2, 0, 1)), [(4, 6, 8)], "abc->cab"),
    "merge": (lambda x: x.reshape(24, 8), [(4, 6, 8)], "abc->ac"),
    "part": (lambda x: x.reshape(4, 6, 8), [(24, 8)], "ab->acb"),
    "ones": (lambda x: x.reshape(4, 1, 6, 1), [(1, 4, 6)], ".ab->a.b."),
    "regroup": (lambda x: x.reshape(16, 3), [(8, 6)], "ab->a."),
    "squeeze": (lambda x: x[:, 0], [(4, 1, 6)], "a.b->ab"),
    "new axis": (lambda x: x[:, None], [(4, 6)], "ab->a.b"),
    "broadcast": (lambda x: jnp.broadcast_to(x, (4, 8, 6)), [(4, 1, 6)], "a.b->acb"),
    "slice": (lambda x: x[:2], [(4, 6)], "ab->cb"),
    "dynamic slice": (
        lambda x, i: lax.dynamic_slice(x, (i, SHIFT), (2, 6)),
        [(4, 6), integers()],
        "ab,->cb",
    ),
    "dynamic update slice": (
        lambda x, y, i: lax.dynamic_update_slice(x, y, (i, SHIFT)),
        [(4, 6), (2, 6), integers()],
        "ab,cb,->ab",
    ),
    "pad": (lambda x: jnp.pad(x, ((0, 0), (1, 1))), [(4, 6)], "ab->ac"),
    "concatenate": (lambda *x: jnp.concatenate(x, 1), [(4, 6), (4, 8)], "ab,ac->ad"),
    "stack": (lambda *x: jnp.stack(x, 1), [(4, 6), (4, 6)], "ab,ab->acb"),
    "unstack": (jnp.unstack, [(2, 6)], "ab->b,b"),
    "split": (lambda x: jnp.split(x, 3, 1), [(4, 6)], "ab->ac,ad,ae"),
    "roll": (lambda x: jnp.roll(x, 1, 1), [(4, 6)], "ab->ac"),
    "tile": (lambda x: jnp.tile(x, (1, 2)), [(4, 6)], "ab->ac"),
    "repeat": (lambda x: jnp.repeat(x, 2, 1), [(4, 6)], "ab->ab"),
    "flip": (lambda x: jnp.flip(x, 1), [(4, 6)], "ab->ac"),
    "fused halves": (jax.nn.glu, [(4, 8)], "ab->ac"),
    # Order.
    "sort": (lambda x: jnp.sort(x, 0), [(4, 6)], "ab->cb"),
    "sort by key": (lambda *x: lax.sort(x), [(4, 6), (4, 6)], "ab,ab->ac,ac"),
    "argsort": (jnp.argsort, [(4, 6)], "ab->ac"),
    "top_k": (lambda x: lax.top_k(x, 2), [(4, 6)], "ab->ac,ac"),
    "cumsum": (lambda x: jnp.cumsum(x, 1), [(4, 6)], "ab->ac"),
    "associative scan": (lambda x: lax.associative_scan(jnp.add, x), [(4, 6)], "ab->cb"),
    "searchsorted": (jnp.searchsorted, [(8,), (4,)], "a,b->b"),
    "histogram": (lambda x: jnp.histogram(x, 4)[0], [(8,)], "a->b"),
    "unique": (lambda x: jnp.unique(x, size=4), [(8,)], "a->b"),
    "interp": (jnp.interp, [(4, 6), (8,), (8,)], "ab,c,d->ab"),
    # Windows.
    "pool": (pool, [(2, 4, 4, 6)], "a##b->a##b"),
    "pool backward": (jax.grad(lambda x: jnp.sum(pool(x))), [(2, 4, 4, 6)], "a##b->a##b"),
    "pool forward": (
        lambda x, t: jax.jvp(pool, (x,), (t,))[1],
        [(2, 4, 4, 6), (2, 4, 4, 6)],
        "a##b,a##b->a##b",
    ),
    "pair of windows": (window_pair, [(4, 8), (4, 8)], "a#,a#->a#,a#"),
    # Fresh values.
    "iota": (lambda x: x + lax.broadcasted_iota(jnp.float32, (4, 6), 0), [(4, 6)], "ab->ab"),
    "normal": (lambda k: jax.random.normal(k, (4, 6)), [keys()], "->ab"),
    "dropout": (lambda x, k: eqx.nn.Dropout()(x, key=k), [(4, 6), keys()], "ab,->ab"),
    "one hot": (lambda i: jax.nn.one_hot(i, 8), [integers(4)], "a->ab"),
    # Indices.
    "embedding": (lambda x, i: x[i], [(8, 6), integers(2, 4)], "ab,cd->cdb"),
    "take": (lambda x, i: jnp.take(x, i, 1), [(4, 6), integers(4)], "ab,c->ac"),
    "take along": (
        lambda x, i: jnp.take_along_axis(x, i, 1),
        [(4, 6), integers(4, 2)],
        "ab,ac->ac",
    ),
    "index by row": (vmapped(lambda x, i: x[i]), [(4, 6, 8), integers(4)], "abc,a->ac"),
    "window by row": (
        vmapped(lambda x, i: lax.dynamic_slice(x, (i,), (2,))),
        [(4, 6), integers(4)],
        "ab,a->ac",
    ),
    "scatter add": (
        lambda x, i, y: x.at[i].add(y),
        [(8, 6), integers(4), (4, 6)],
        "ab,c,cb->ab",
    ),
    "set columns": (
        lambda x, i, y: x.at[:, i].set(y),
        [(8, 6), integers(2), (8, 2)],
        "ab,c,ac->ab",
    ),
    "scatter by row": (
        vmapped(lambda x, i, y: x.at[i].add(y)),
        [(4, 8), integers(4, 2), (4, 2)],
        "ab,ac,ac->ab",
    ),
    "segments": (lambda x, i: jax.ops.segment_sum(x, i, 4), [(8, 6), integers(8)], "ab,a->cb"),
    # Transforms and decompositions.
    "fft": (lambda x: jnp.fft.fft(x, axis=1), [(4, 6, 8)], "a#b->a#b"),
    "cholesky": (jnp.linalg.cholesky, [(4, 6, 6)], "a##->a##"),
    "svd": (
        lambda x: jnp.linalg.svd(x, full_matrices=False),
        [(4, 6, 8)],
        "a##->a##,a#,a##",
    ),
    "eigh": (lambda x: tuple(jnp.linalg.eigh(x)), [(4, 6, 6)], "a##->a#,a##"),
    "qr": (lambda x: tuple(jnp.linalg.qr(x)), [(4, 8, 6)], "a##->a##,a##"),
    "lu": (lambda x: lax.linalg.lu(x)[2], [(4, 6, 6)], "a##->a#"),
    "tridiagonal": (
        lax.linalg.tridiagonal_solve,
        [(6,), (6,), (6,), (6, 4)],
        "#,#,#,#a->#a",
    ),
    "solve": (vmapped(jnp.linalg.solve), [(4, 6, 6), (4, 6)], "a##,ab->a#"),
    "conjugate gradient": (
        lambda a, b: jax.scipy.sparse.linalg.cg(lambda v: a @ v, b, maxiter=3)[0],
        [(6, 6), (6,)],
        "aa,a->a",
    ),
}


@pytest.mark.parametrize("name", LINKS)
def test_dimensions_that_are_split_together(name):
    fn, shapes, expected = LINKS[name]
    assert links(fn, *shapes) == expected


@pytest.mark.parametrize(
    ("fn", "shapes", "n", "expected"),
    [
        # A class holds over as many devices as all that it links can be split over.
        (lambda x: x.reshape(16, 3), [(8, 6)], 8, "a.->a."),
        (lambda x: x.reshape(12, 4), [(8, 6)], 4, "a.->ab"),
        (lambda x, w: (x @ w).reshape(4, 12, 4), [(4, 6), (6, 48)], 8, "..,.a->..."),
        (conv(feature_group_count=2), [(4, 8, 8, 8), (2, 2, 4, 8)], 4, "a##b,..#c->a##c"),
    ],
)
def test_links_hold_where_sizes_divide(fn, shapes, n, expected):
    assert links(fn, *shapes, n=n) == expected


COSTS = {
    "dot": (jnp.dot, [(4, 6), (6, 8)], {"sum b": 32, "back a": 48, "back c": 24}),
    "stopped": (
        lambda x, w: lax.stop_gradient(x) @ w,
        [(4, 6), (6, 8)],
        {"sum b": 32, "back a": 48},
    ),
    "integers": (lambda x, w: x @ w, [integers(4, 6), integers(6, 8)], {"sum b": 32}),
    "conv": (
        conv(),
        [(2, 8, 8, 4), (2, 2, 4, 6)],
        {"sum b": 768, "back a": 96, "back c": 512},
    ),
    "depthwise": (conv(feature_group_count=4), [(2, 8, 8, 4), (2, 2, 1, 8)], {"back a": 32}),
    "sum": (lambda x: jnp.sum(x, 1), [(4, 6, 8)], {"sum b": 32}),
    "psum": (vmapped(lambda x: lax.psum(x, "i")), [(4, 6)], {"sum a": 6, "back c": 6}),
    "bias": (jnp.add, [(4, 6), (1, 6)], {"back a": 6}),
    "broadcast": (lambda x: jnp.broadcast_to(x, (4, 6)), [(1, 6)], {"back b": 6}),
    "embedding": (
        lambda x, i: x[i],
        [(8, 6), integers(2, 4)],
        {"sum a": 48, "back c": 48, "back d": 48},
    ),
    "scatter": (
        lambda x, i, y: x.at[i].add(y),
        [(8, 6), integers(4), (4, 6)],
        {"sum c": 48, "back a": 24},  # the updates' cotangent is looked up in parts
    ),
    "slice": (lambda x: x[:2], [(4, 6)], {"gather a": 24, "regather c": 12}),
    "split": (
        lambda x: jnp.split(x, 3, 1),
        [(4, 6)],
        {"gather b": 24, "regather c": 8, "regather d": 8, "regather e": 8},
    ),
    "concatenate": (
        lambda *x: jnp.concatenate(x, 1),
        [(4, 6), (4, 8)],
        {"gather b": 24, "gather c": 32, "regather d": 56},
    ),
    "sort by key": (
        lambda *x: lax.sort(x),
        [(4, 6), (4, 6)],
        {"gather b": 48, "regather c": 48},
    ),
    "cumsum": (lambda x: jnp.cumsum(x, 1), [(4, 6)], {"gather b": 24, "regather c": 24}),
    "minor of a merge": (lambda x: x.reshape(4, 24), [(4, 4, 6)], {"gather c": 96}),
    "remat": (
        jax.checkpoint(lambda x, w: jnp.tanh(x @ w)),
        [(4, 6), (6, 8)],
        {"sum b": 64, "back a": 48, "back c": 24},
    ),
    "loop": (
        lambda x, w: lax.scan(lambda c, _: (c @ w, None), x, None, length=3)[0],
        [(4, 6), (6, 6)],
        {"sum b": 3 * 24, "back a": 36, "back b": 3 * 24},
    ),
    "callback": (
        lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct((4, 6), jnp.float32), x),
        [(4, 6)],
        {"gather a": 24, "gather b": 24},  # all devices get the result, and it has no gradient
    ),
}


@pytest.mark.parametrize("name", COSTS)
def test_what_is_sent_if_a_dimension_is_split(name):
    fn, shapes, expected = COSTS[name]
    assert costs(fn, *shapes) == expected


def test_what_is_not_understood_is_counted():
    assert unknown(lambda x: jax.pure_callback(np.sin, x, x), (4,)) == {"pure_callback": 1}
    assert unknown(lambda x: jnp.sin(jnp.linalg.solve(x, x)), (4, 4)) == {}
