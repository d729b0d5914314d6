"""Loops and decompositions that act on each example alone run without communication."""

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from grids import few_of
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.interpreters import ad

import redcoast as rc
from redcoast.core._jaxpr import iter_equations, struct_of
from redcoast.dryrun.hlo import collectives

ROWS, WIDTH = 16, 8
KEYS = jr.split(jr.key(0), 4)
# Rows of different scales, so that loops run another number of iterations for each.
SCALES = jnp.geomspace(0.2, 4.0, ROWS)[:, None]
BATCH = jr.normal(KEYS[0], (ROWS, WIDTH)) * SCALES
PARAMS = {
    "inside": jr.normal(KEYS[1], (WIDTH, WIDTH)) / 8,
    "outside": jr.normal(KEYS[2], (WIDTH, WIDTH * WIDTH)) / 4,
}
REPLICATED = [{"data": 8}]
MESHES = [*REPLICATED, {"data": 2, "model": 4}, {"fsdp": 8}, {"data": 2, "fsdp": 2, "model": 2}]


@pytest.fixture
def float64(monkeypatch):
    """Makes arrays of float64. Solutions of equations differ by as much as these magnify rounding,
    in float32 by more than a fault may."""
    with jax.enable_x64(True):
        widen = lambda x: x.astype(jnp.float64)
        monkeypatch.setitem(globals(), "BATCH", widen(BATCH))
        monkeypatch.setitem(globals(), "PARAMS", jax.tree.map(widen, PARAMS))
        yield


def mean_over_rows(one):
    """The loss of a function of a row and its number, with what it needs of the parameters."""

    def loss_fn(params, batch, key):
        keys = jr.split(jr.key(1), batch.shape[0])
        results = jax.vmap(lambda x, key: one(params, x, key))(batch, keys)
        return jnp.mean(results**2)

    return loss_fn


def iterate(fn, x, limit=40):
    """Applies `fn` until the result changes little."""
    going = lambda state: (jnp.max(jnp.abs(state[0] - state[1])) > 1e-4) & (state[2] < limit)
    step = lambda state: (fn(state[0]), state[0], state[2] + 1)
    return jax.lax.while_loop(going, step, (fn(x), x, 0))[0]


def forward_loop(params, x, key):
    z = jax.lax.stop_gradient(iterate(lambda z: jax.nn.relu(params["inside"] @ z + x), x))
    return z @ params["outside"]


def rejection(params, x, key):
    def step(state):
        key, _, n = state
        key, draw = jr.split(key)
        return key, jr.normal(draw, (WIDTH,)), n + 1

    going = lambda state: (jnp.sum(state[1]) < jnp.sum(x) / 4) & (state[2] < 40)
    z = jax.lax.while_loop(going, step, (key, jnp.full(WIDTH, -1.0), 0))[1]
    return (x + z) @ params["outside"]


@jax.custom_vjp
def fixed_point(weight, x):
    return iterate(lambda z: jnp.tanh(weight @ z + x), jnp.zeros(WIDTH))


def fixed_point_forward(weight, x):
    z = fixed_point(weight, x)
    return z, (weight, x, z)


def fixed_point_backward(saved, cotangent):
    weight, x, z = saved
    _, pull = jax.vjp(lambda w, x, z: jnp.tanh(w @ z + x), weight, x, z)
    return pull(iterate(lambda v: cotangent + pull(v)[2], cotangent))[:2]


fixed_point.defvjp(fixed_point_forward, fixed_point_backward)


def implicit(params, x, key):
    return fixed_point(params["inside"], x) @ params["outside"]


def equinox_loop(kind):
    """A loop with a reverse-mode derivative, as those of diffrax."""

    def one(params, x, key):
        going = lambda state: (jnp.sum(state[0] ** 2) > 0.5) & (state[1] < 12)
        step = lambda state: (jnp.tanh(params["inside"] @ state[0]) * 1.5, state[1] + 1)
        z, n = eqxi.while_loop(going, step, (x, jnp.array(0)), max_steps=12, kind=kind)
        return (z + n) @ params["outside"]

    return one


def counted_below(z):
    return jnp.searchsorted(jnp.arange(1.0, 4.0), z) / 8


def shared_times(params, x, key):
    """Steps at times that are the same for all rows, which are checked and kept."""

    def step(state):
        z, times, n = state
        time = eqx.error_if(n * 0.1, n > 9, "It is too late.")
        z = jnp.tanh(params["inside"] @ z) + time
        return z, times.at[n].set(time), n + 1

    z, times, _ = eqxi.while_loop(
        lambda state: state[2] < 6,
        step,
        (x, jnp.zeros(6), jnp.array(0)),
        max_steps=6,
        kind="checkpointed",
        buffers=lambda state: state[1],
    )
    return (z * jnp.mean(times)) @ params["outside"]


def with_error(params, x, key):
    def step(z):
        z = eqx.error_if(z, jnp.isnan(z).any(), "NaN")
        return jnp.tanh(params["inside"] @ z + x)

    return jax.lax.stop_gradient(iterate(step, x)) @ params["outside"]


def undifferentiated(params, x, key):
    """Functions that refuse to be differentiated, as in the step size controllers of diffrax."""
    step = lambda z: jnp.tanh(eqxi.nondifferentiable(jax.lax.stop_gradient(z)) + x)
    return iterate(step, jax.lax.stop_gradient(x)) @ params["outside"]


def remat_in_scan(params, x, key):
    def layer(h, weight):
        h = h + iterate(lambda z: jax.nn.silu(weight @ z), jax.lax.stop_gradient(h), limit=5)
        return jnp.fft.irfft(jnp.fft.rfft(h) * 0.5, n=WIDTH) + weight @ h, None

    weights = jnp.stack([params["inside"], jax.lax.stop_gradient(params["inside"].T)])
    stopped = jax.lax.stop_gradient(weights)
    h, _ = jax.lax.scan(lambda h, w: jax.checkpoint(layer)(h, w), x, stopped)
    return (h @ params["inside"]) @ params["outside"]


def positive(params, x):
    a = (x @ params["outside"]).reshape(WIDTH, WIDTH)
    return a @ a.T + jnp.diag(jnp.arange(1.0, WIDTH + 1))


def gaussian_process(params, x, key):
    factor = jnp.linalg.cholesky(positive(params, x))
    return jax.scipy.linalg.solve_triangular(factor, x, lower=True)


def reused(params, x, key):
    """What a branch for all rows makes is carried by a loop of each, as the Jacobians of diffrax's
    implicit solvers are."""

    def step(state):
        z, n = state
        start = jax.lax.cond(
            eqxi.unvmap_any(n < 2), lambda: jnp.ones(WIDTH), lambda: jnp.full(WIDTH, 1.0)
        )
        going = lambda inner: (inner[1] < 3) & (jnp.max(jnp.abs(inner[0])) > 1e-3)
        again = lambda inner: (jnp.tanh(params["inside"] @ inner[0] + z), inner[1] + 1)
        inner, _ = jax.lax.while_loop(going, again, (start, 0))
        return eqxi.nondifferentiable_backward(inner), n + 1

    going = lambda state: (jnp.max(jnp.abs(state[0])) > 0.4) & (state[1] < 6)
    return jax.lax.stop_gradient(jax.lax.while_loop(going, step, (x, 0))[0]) @ params["outside"]


def double(x):
    """A kernel, which `vmap` runs once for each row."""

    def kernel(x_ref, out_ref):
        out_ref[...] = jnp.tanh(x_ref[...]) * 2

    struct = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, out_shape=struct, interpret=True)(x)


def multiply(matrix, weight):
    """A kernel for blocks of rows of each matrix and one weight."""

    def kernel(matrix_ref, weight_ref, out_ref):
        out_ref[...] = matrix_ref[...] @ weight_ref[...]

    rows = pl.BlockSpec((WIDTH // 2, WIDTH), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        grid=(2,),
        in_specs=[rows, pl.BlockSpec((WIDTH, WIDTH), lambda i: (0, 0))],
        out_specs=rows,
        out_shape=jax.ShapeDtypeStruct((WIDTH, WIDTH), matrix.dtype),
        interpret=True,
    )(matrix, weight)


LOOPS = {
    "while_loop": forward_loop,
    "rejection sampling": rejection,
    "custom_vjp": implicit,
    "checkpointed": equinox_loop("checkpointed"),
    "bounded": equinox_loop("bounded"),
    "shared times": shared_times,
    "error_if": with_error,
    "nondifferentiable": undifferentiated,
    "remat in scan": remat_in_scan,
    "gamma": lambda params, x, key: jr.gamma(key, jnp.abs(x @ params["inside"]) + 1),
    "reused": reused,
    "kernel": lambda params, x, key: (
        jax.lax.stop_gradient(iterate(lambda z: double(z) / 3, x)) @ params["outside"]
    ),
    # On the newest JAX, `searchsorted` has derivative rules of its own.
    "searchsorted": lambda params, x, key: (
        jax.lax.stop_gradient(iterate(lambda z: z / 2 + counted_below(z), x)) @ params["outside"]
    ),
    "cg": lambda params, x, key: jax.scipy.sparse.linalg.cg(positive(params, x), x, tol=1e-6)[0],
}
ALONE = {
    "fft": lambda params, x, key: jnp.abs(jnp.fft.rfft(x @ params["outside"])),
    "cholesky": gaussian_process,
    "qr": lambda params, x, key: jnp.linalg.qr(positive(params, x))[1],
    "svd": lambda params, x, key: jnp.linalg.svd(positive(params, x), compute_uv=False),
    "eigh": lambda params, x, key: jnp.linalg.eigh(positive(params, x))[0],
    "solve": lambda params, x, key: jnp.linalg.solve(positive(params, x), x),
    "top_k": lambda params, x, key: jax.lax.top_k(x @ params["outside"], 4)[0],
    "sort": lambda params, x, key: jnp.sort(x @ params["outside"])[:5],
    "one matrix": lambda params, x, key: jnp.linalg.solve(positive(params, BATCH[0]), x),
    "one factor": lambda params, x, key: jax.scipy.linalg.solve_triangular(
        jnp.linalg.cholesky(positive(params, BATCH[0])), x, lower=True
    ),
    "kernel": lambda params, x, key: (
        multiply(jax.lax.stop_gradient(positive(params, x)), jnp.eye(WIDTH)) @ params["inside"]
    ),
    "columns": lambda params, x, key: x @ jnp.linalg.inv(positive(params, x)),
    "igamma": lambda params, x, key: (
        jax.scipy.special.gammainc(jnp.abs(x) + 1, x**2 + 1) @ params["outside"]
    ),
}


def compiled_step(loss_fn, plan):
    """The compiled loss with its gradients, and its collectives."""
    rows = jax.NamedSharding(plan.mesh, jax.P(("data", "fsdp")))
    whole = jax.NamedSharding(plan.mesh, jax.P())
    step = jax.jit(
        jax.value_and_grad(plan.constrain(loss_fn)), out_shardings=(whole, plan.shardings)
    )
    place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    params = jax.tree.map(place, PARAMS, plan.shardings)
    compiled = step.lower(params, place(BATCH, rows), None).compile()
    placed = jax.device_put(PARAMS, plan.shardings), jax.device_put(BATCH, rows)
    return lambda: compiled(*placed, None), collectives(compiled.as_text(), plan.mesh)


def in_loops(found):
    return [one for one in found if one.count > 1 or not one.exact]


def assert_like_one_device(step, loss_fn, tolerance=1e-6):
    loss, grads = step()
    expected_loss, expected = jax.jit(jax.value_and_grad(loss_fn))(PARAMS, BATCH, None)
    np.testing.assert_allclose(loss, expected_loss, rtol=tolerance)
    largest = max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(expected))
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(one) / largest, other / largest, atol=tolerance)


def assert_waits_for_no_rows(fn, sizes, overrides=()):
    """A step with a function of each row has no collective over rows in a loop, and one result."""
    loss_fn, mesh = mean_over_rows(fn), rc.make_mesh(**sizes)
    plan = rc.plan_shardings(PARAMS, mesh, fn=loss_fn, args=(BATCH, None), overrides=overrides)
    step, sent = compiled_step(loss_fn, plan)
    over_rows = [x for x in in_loops(sent) if {"data", "fsdp"}.intersection(x.axes)]
    assert over_rows == []
    assert_like_one_device(step, loss_fn)


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", few_of(MESHES, *REPLICATED))
@pytest.mark.parametrize("name", few_of(LOOPS, "while_loop"))
def test_no_device_waits_for_the_rows_of_another(name, sizes):
    assert_waits_for_no_rows(LOOPS[name], sizes)


@pytest.mark.parametrize("sizes", few_of(MESHES, *REPLICATED))
@pytest.mark.parametrize("name", few_of(ALONE, "fft"))
@pytest.mark.usefixtures("float64")
def test_operations_on_each_row_gather_no_rows(name, sizes):
    loss_fn, mesh = mean_over_rows(ALONE[name]), rc.make_mesh(**sizes)
    plan = rc.plan_shardings(PARAMS, mesh, fn=loss_fn, args=(BATCH, None))
    step, found = compiled_step(loss_fn, plan)
    assert not [one for one in in_loops(found) if {"data", "fsdp"}.intersection(one.axes)]
    # Gradients and losses are summed, and parameters are gathered.
    gathered = [one for one in found if one.kind in ("all-gather", "all-to-all")]
    assert sizes.get("fsdp") or not gathered
    assert_like_one_device(step, loss_fn, 1e-13)


@pytest.mark.thorough
def test_sums_over_rows_leave_a_loop_once():
    def loss_fn(params, batch, key):
        weight = jax.lax.stop_gradient(params["inside"])

        def step(state):
            n, total, x = state
            x = jnp.tanh(x @ weight)
            return n + 1, total + x.T @ x, x

        start = (0, jnp.zeros((WIDTH, WIDTH)), batch)
        _, total, x = jax.lax.while_loop(lambda state: state[0] < 5, step, start)
        return jnp.mean((total + x.sum()) * params["inside"])

    plan = rc.plan_shardings(PARAMS, rc.make_mesh(), fn=loss_fn, args=(BATCH, None))
    step, found = compiled_step(loss_fn, plan)
    assert not in_loops(found)
    assert_like_one_device(step, loss_fn)


MIXING = {
    "draws from one key": lambda params, batch, key: jnp.mean(
        jax.lax.while_loop(
            lambda state: state[0] < 3 + params["inside"][0, 0].astype(int),
            lambda state: (state[0] + 1, state[1] + jr.gamma(jr.key(3), batch**2 + 1)),
            (0, jnp.zeros_like(batch)),
        )[1]
        @ jax.lax.stop_gradient(params["inside"])
        + batch @ params["inside"]
    ),
    "fft along rows": lambda params, batch, key: jnp.mean(
        jnp.abs(jnp.fft.fft(batch @ params["inside"], axis=0)) ** 2
    ),
    "until all rows have converged on average": lambda params, batch, key: jnp.mean(
        jax.lax.while_loop(lambda z: jnp.mean(z**2) > 0.1, lambda z: z * 0.7, batch)
        @ params["inside"]
    ),
    "rows one after the other": lambda params, batch, key: jnp.mean(
        jax.lax.scan(
            lambda h, x: (iterate(lambda z: jnp.tanh(z + x), h), None),
            jnp.zeros(WIDTH),
            jax.lax.stop_gradient(batch),
        )[0]
        @ params["inside"]
    ),
    "a moving average": lambda params, batch, key: jnp.mean(
        jax.lax.scan(lambda h, x: (0.5 * h + x, None), jnp.zeros(WIDTH), batch)[0]
        @ params["inside"]
    ),
    "sums so far": lambda params, batch, key: jnp.mean(
        jax.lax.scan(lambda h, x: (h + x, h * x), jnp.zeros(WIDTH), batch)[1] @ params["inside"]
    ),
    "a sum of sums": lambda params, batch, key: jnp.mean(
        jax.lax.scan(lambda h, x: ((h[0] + x, h[1] + h[0]), None), (batch[0], batch[1]), batch)[0][
            1
        ]
        @ params["inside"]
    ),
    "each row and all rows": lambda params, batch, key: jnp.mean(
        jax.lax.map(lambda x: jnp.tanh(x @ batch.T) @ batch, batch) @ params["inside"]
    ),
    "neighbours": lambda params, batch, key: jnp.mean(
        iterate(lambda z: jnp.tanh((z + jnp.roll(z, 1, 0)) / 2), jax.lax.stop_gradient(batch))
        @ params["inside"]
    ),
    "ranks": lambda params, batch, key: jnp.mean(jnp.sort(batch @ params["inside"], 0)[:3] ** 2),
}


@pytest.mark.parametrize("name", few_of(MIXING, "until all rows have converged on average"))
@pytest.mark.usefixtures("float64")
def test_what_mixes_rows_gives_the_results_of_one_device(name):
    loss_fn = MIXING[name]
    plan = rc.plan_shardings(PARAMS, rc.make_mesh(), fn=loss_fn, args=(BATCH, None))
    step, found = compiled_step(loss_fn, plan)
    assert found
    assert_like_one_device(step, loss_fn, 1e-13)


def checked(x):
    return eqx.error_if(x, jnp.isnan(x).any(), "NaN")


def linear_solve(matrix, vector):
    """Equinox's kind of primitive, as `lineax.linear_solve` is: a loop that it hides under `vmap`,
    with derivative rules of its own, and an error that it raises."""
    return solve_p.bind(matrix, vector)[0]


def solve_impl(matrix, vector):
    scale = jnp.sum(jnp.abs(matrix))
    step = lambda state: (state[0] + (vector - matrix @ state[0]) / scale, state[1] + 1)
    going = lambda state: (state[1] < 60) & (jnp.max(jnp.abs(vector)) > state[1] / 15)
    result, _ = jax.lax.while_loop(going, step, (jnp.zeros_like(vector), 0))
    return [checked(result)]


def solve_jvp(primals, tangents):
    (matrix, _), (of_matrix, of_vector) = primals, tangents
    (result,) = solve_p.bind(*primals)
    zero = jnp.zeros_like(result)
    change = zero if type(of_vector) is ad.Zero else of_vector
    if type(of_matrix) is not ad.Zero:
        change = change - of_matrix @ result
    return [result], solve_p.bind(matrix, change)


def solve_transpose(cotangents, matrix, vector):
    return [None, *solve_p.bind(matrix.T, *cotangents)]


solve_p = eqxi.create_vprim(
    "test_solve", solve_impl, lambda matrix, vector: [vector], solve_jvp, solve_transpose
)
HIDDEN = {
    "solve": lambda params, x, key: linear_solve(positive(params, x), x),
    "in a scan": lambda params, x, key: jax.lax.scan(
        lambda h, _: (jnp.tanh(linear_solve(positive(params, h), x)), None), x, None, length=2
    )[0],
    "of a shared matrix": lambda params, x, key: linear_solve(positive(params, BATCH[0]), x),
    "remat": lambda params, x, key: jax.checkpoint(linear_solve)(positive(params, x), x),
    "in a checked scan": lambda params, x, key: jax.lax.scan(
        lambda h, _: (checked(linear_solve(positive(params, h), x)), None), x, None, length=2
    )[0],
    "one by one": lambda params, x, key: jax.lax.map(
        lambda v: linear_solve(positive(params, v), x), x[None]
    )[0],
}


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", few_of(MESHES, {"data": 2, "model": 4}))
@pytest.mark.parametrize("name", few_of(HIDDEN, "solve"))
def test_loops_that_are_hidden_until_lowered_wait_for_no_rows(name, sizes):
    assert_waits_for_no_rows(HIDDEN[name], sizes)


def scan_with_errors(params, x, key):
    layer = lambda z, _: (checked(jnp.tanh(params["inside"] @ z + x)), None)
    return jax.lax.scan(layer, x, None, length=4)[0] @ params["outside"]


def loop_on_host(params, x, key):
    call = lambda z: jax.pure_callback(np.tanh, z, z, vmap_method="sequential")
    return iterate(lambda z: call(params["inside"] @ z + x), x)


WITH_SHARDED_WEIGHTS = {
    "error_if in a loop": with_error,
    "error_if in a scan": scan_with_errors,
    "callback": lambda params, x, key: (
        loop_on_host(*jax.lax.stop_gradient((params, x)), key) @ params["outside"]
    ),
    "hidden": HIDDEN["in a checked scan"],
}


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", few_of(MESHES[1::2], {"data": 2, "model": 4}))
@pytest.mark.parametrize("name", few_of(WITH_SHARDED_WEIGHTS, "error_if in a scan"))
def test_loops_with_sharded_weights_and_calls_of_the_host_wait_for_no_rows(name, sizes):
    overrides = [("inside", jax.P("model", None))]
    assert_waits_for_no_rows(WITH_SHARDED_WEIGHTS[name], sizes, overrides)


@pytest.mark.thorough
def test_second_derivatives_of_what_is_hidden():
    loss_fn = mean_over_rows(HIDDEN["solve"])
    plan = rc.plan_shardings(PARAMS, rc.make_mesh(), fn=loss_fn, args=(BATCH, None))
    tangent = jax.tree.map(jnp.ones_like, PARAMS)

    def curvature(fn):
        gradient = jax.grad(lambda params: fn(params, BATCH, None))
        return jax.jit(lambda params: jax.jvp(gradient, (params,), (tangent,))[1])

    found, expected = curvature(plan.constrain(loss_fn))(PARAMS), curvature(loss_fn)(PARAMS)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * float(jnp.abs(other).max()))


def of_batch(matrices, *, adds_place=False, of_pairs=False):
    """A kernel for all rows, whose grid counts them."""

    def kernel(matrix_ref, other_ref, out_ref):
        place = pl.program_id(0).astype(jnp.float32) if adds_place else 0.0
        out_ref[...] = matrix_ref[...] * 2 + other_ref[...] + place

    row = pl.BlockSpec((1, WIDTH, WIDTH), lambda i: (i, 0, 0))
    other = pl.BlockSpec((1, WIDTH, WIDTH), lambda i: (i // 2 if of_pairs else i, 0, 0))
    return pl.pallas_call(
        kernel,
        grid=(ROWS,),
        in_specs=[row, other],
        out_specs=row,
        out_shape=jax.ShapeDtypeStruct(matrices.shape, matrices.dtype),
        interpret=True,
    )(matrices, matrices)


def kernel_loss(**options):
    def loss_fn(params, batch, key):
        matrices = jax.lax.stop_gradient(jax.vmap(lambda x: positive(params, x))(batch))
        return jnp.mean((of_batch(matrices, **options) @ params["inside"]) ** 2)

    return loss_fn


KERNELS = {
    "of each row": (kernel_loss(), True),
    "that knows the place of a row": (kernel_loss(adds_place=True), False),
    "of pairs of rows": (kernel_loss(of_pairs=True), False),
}


@pytest.mark.parametrize("name", few_of(KERNELS, "of pairs of rows"))
def test_kernels_run_in_shard_map_and_those_of_each_row_gather_nothing(name):
    """On TPUs, JAX lowers no kernel outside of `jax.shard_map`."""
    loss_fn, is_local = KERNELS[name]
    plan = rc.plan_shardings(PARAMS, rc.make_mesh(), fn=loss_fn, args=(BATCH, None))
    jaxpr = jax.make_jaxpr(plan.constrain(loss_fn))(PARAMS, BATCH, None)
    manual = [x for x in iter_equations(jaxpr) if x.primitive.name == "shard_map"]
    inside = [x for one in manual for x in iter_equations(one.params["jaxpr"])]
    assert "pallas_call" in {x.primitive.name for x in inside}
    step, found = compiled_step(loss_fn, plan)
    assert not in_loops(found)
    assert is_local == (not [one for one in found if one.kind == "all-gather"])
    assert_like_one_device(step, loss_fn)


CALLED = []


def count_call(x):
    CALLED.append(x.shape)
    return np.sin(x)


def mapped(one, **options):
    return lambda params, batch, key: jnp.mean(
        jax.lax.map(lambda x: one(params, x), batch, **options) ** 2
    )


def vmapped(one):
    return lambda params, batch, key: jnp.mean(jax.vmap(lambda x: one(params, x))(batch) ** 2)


def sequential(params, x):
    z = jax.lax.stop_gradient(x @ params["inside"])
    struct = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(count_call, struct, z, vmap_method="sequential") @ params["outside"]


def impure(params, x):
    z = jax.lax.stop_gradient(x @ params["inside"])
    return io_callback(count_call, jax.ShapeDtypeStruct(x.shape, x.dtype), z) @ params["outside"]


def summed(params, batch, key):
    def step(carry, x):
        total, count, scale = carry
        return (total + jnp.sum((x @ params["inside"]) ** 2 * scale), count + 1, scale), None

    start = jnp.float32(1.0), 0, params["outside"][0, 0] + 2
    (total, count, _), _ = jax.lax.scan(step, start, batch)
    return total / count


def added_and_subtracted(params, batch, key):
    def step(total, x):
        y = jnp.tanh(x @ params["inside"]) @ params["outside"]
        return total + jnp.sum(y**2) - jnp.mean(y) + jnp.max(y), None

    return jax.lax.scan(step, jnp.float32(1.0), batch)[0] / ROWS


def on_host(fn, z, **options):
    struct = jax.ShapeDtypeStruct(z.shape, z.dtype)
    return jax.pure_callback(fn, struct, jax.lax.stop_gradient(z), **options)


def at_once(method):
    """The host gets all rows in one call, which it treats one by one."""

    def one(params, x):
        z = on_host(lambda z: np.sort(z, -1), x @ params["inside"], vmap_method=method)
        return z @ params["outside"]

    return one


def by_heads(params, x):
    """The inner `vmap` goes along columns."""
    host = lambda z: on_host(lambda z: np.cumsum(z, -1), z, vmap_method="broadcast_all")
    heads = (x @ params["inside"]).reshape(2, 4)
    return jax.vmap(host, 1, 1)(heads).ravel() @ params["outside"]


ONE_BY_ONE = {
    "map": mapped(lambda params, x: jnp.tanh(x @ params["inside"]) @ params["outside"]),
    "in batches": mapped(lambda params, x: x @ params["outside"], batch_size=2),
    "with a loop": mapped(lambda params, x: forward_loop(params, x, None)),
    "a decomposition": mapped(lambda params, x: gaussian_process(params, x, None)),
    "a rule": mapped(lambda params, x: implicit(params, x, None)),
    "in few batches": mapped(lambda params, x: x @ params["outside"], batch_size=8),
    "a loop, in few batches": mapped(lambda params, x: forward_loop(params, x, None), batch_size=8),
    "a rule, in batches": mapped(lambda params, x: implicit(params, x, None), batch_size=2),
    "a rule, in few batches": mapped(lambda params, x: implicit(params, x, None), batch_size=8),
    "sum": summed,
    "sum of several terms": added_and_subtracted,
    "pure_callback": vmapped(sequential),
    "io_callback": vmapped(impure),
    "expand_dims": vmapped(at_once("expand_dims")),
    "broadcast_all": vmapped(at_once("broadcast_all")),
    "heads": vmapped(by_heads),
}


@pytest.mark.parametrize("sizes", few_of(MESHES, *REPLICATED))
@pytest.mark.parametrize("name", few_of(ONE_BY_ONE, "io_callback"))
def test_rows_that_are_computed_one_by_one_are_those_of_each_device(name, sizes):
    loss_fn, mesh = ONE_BY_ONE[name], rc.make_mesh(**sizes)
    plan = rc.plan_shardings(PARAMS, mesh, fn=loss_fn, args=(BATCH, None))
    assert not plan.report.program.repeated
    step, found = compiled_step(loss_fn, plan)
    # Tensor-parallel devices have the same rows, and would each call the host for them.
    if name != "io_callback" or "model" not in sizes:
        batch_axes = {"data", "fsdp"}
        assert not [one for one in in_loops(found) if batch_axes.intersection(one.axes)]
    CALLED.clear()
    assert_like_one_device(step, loss_fn)


@pytest.mark.few("4")
@pytest.mark.parametrize("batch_size", [8, 4])
def test_traffic_of_a_map_in_fewer_batches_than_devices(batch_size):
    """Rows are sent to the devices that compute them, once before and once after the loop. If
    neither the number of batches nor `batch_size` is a multiple of the number of devices, all rows
    are gathered before it."""
    loss_fn = mapped(lambda params, x: x @ params["outside"], batch_size=batch_size)
    plan = rc.plan_shardings(PARAMS, rc.make_mesh(), fn=loss_fn, args=(BATCH, None))
    _, collectives = compiled_step(loss_fn, plan)
    assert not in_loops(collectives)
    planned = sum(traffic.bytes for traffic in plan.report.program.traffic)
    sent = sum(collective.sent_bytes * collective.count for collective in collectives)
    assert planned == pytest.approx(sent, rel=0.1)


@pytest.mark.thorough
def test_a_map_of_rows_that_do_not_divide_sends_nothing():
    """Every device has all rows, so that nothing is gathered."""
    loss_fn = mapped(lambda params, x: x @ params["outside"], batch_size=8)
    batch = jnp.concatenate([BATCH, BATCH[:4]])  # two batches and a remainder
    plan = rc.plan_shardings(PARAMS, rc.make_mesh(), fn=loss_fn, args=(batch, None))
    assert sum(traffic.bytes for traffic in plan.report.program.traffic) == 0
    step = jax.jit(jax.value_and_grad(plan.constrain(loss_fn)))
    compiled = step.lower(jax.device_put(PARAMS, plan.shardings), batch, None).compile()
    assert not collectives(compiled.as_text(), plan.mesh)


def of_all_rows(params, batch, key):
    """`vmap` of a function of the entire batch, whose result all rows share."""
    gram = lambda z: np.asarray(z) @ np.asarray(z).T

    def one(x):
        struct = jax.ShapeDtypeStruct((ROWS, ROWS), x.dtype)
        shared = jax.pure_callback(gram, struct, batch, vmap_method="expand_dims")
        return jnp.sum(shared) * x @ params["inside"]

    return jnp.mean(jax.vmap(one)(batch) ** 2)


def centred(params, batch, key):
    """`vmap` over columns of a function that gets all rows."""
    host = lambda z: on_host(
        lambda z: np.asarray(z) - np.mean(z, -1, keepdims=True), z, vmap_method="expand_dims"
    )
    return jnp.mean(jax.vmap(host, 1, 1)(batch @ params["inside"]) @ params["inside"])


@pytest.mark.few("of_all_rows")
@pytest.mark.parametrize("loss_fn", [of_all_rows, centred])
def test_the_host_gets_all_rows_where_it_may_combine_them(loss_fn):
    plan = rc.plan_shardings(PARAMS, rc.make_mesh(), fn=loss_fn, args=(BATCH, None))
    assert len(plan.report.program.gathered_whole) == 1
    step, _ = compiled_step(loss_fn, plan)
    assert_like_one_device(step, loss_fn)


def test_ordered_calls_of_the_host_keep_their_order():
    def one(params, x):
        call = lambda x: CALLED.append(x[0].item()) or x
        z = jax.lax.stop_gradient(x @ params["inside"])
        return io_callback(call, jax.ShapeDtypeStruct(x.shape, x.dtype), z, ordered=True)

    loss_fn = mapped(one)
    plan = rc.plan_shardings(PARAMS, rc.make_mesh(), fn=loss_fn, args=(BATCH, None))
    jaxpr = jax.make_jaxpr(plan.constrain(loss_fn))(PARAMS, BATCH, None)
    assert "shard_map" not in {x.primitive.name for x in iter_equations(jaxpr)}


def test_each_row_calls_the_host_once():
    plan = rc.plan_shardings(
        PARAMS, rc.make_mesh(), fn=ONE_BY_ONE["io_callback"], args=(BATCH, None)
    )
    step, _ = compiled_step(ONE_BY_ONE["io_callback"], plan)
    CALLED.clear()
    jax.block_until_ready(step())
    assert CALLED == [(WIDTH,)] * ROWS


@pytest.mark.parametrize(
    ("loss_fn", "reason"),
    [
        (MIXING["until all rows have converged on average"], "`gt` is applied to a sum over rows"),
        (mean_over_rows(LOOPS["while_loop"]), None),
        (MIXING["neighbours"], "`slice` is applied along rows"),
        (MIXING["rows one after the other"], None),
    ],
)
def test_the_plan_says_where_devices_wait_for_each_other(loss_fn, reason):
    plan = rc.plan_shardings(PARAMS, rc.make_mesh(), fn=loss_fn, args=(BATCH, None))
    sentences = plan.report.program.waiting
    assert len(sentences) == (reason is not None)
    for sentence in sentences:
        assert sentence.startswith("test_local_regions.py:")
        assert reason in sentence
        assert sentence[:60] in " ".join(plan.table().split())


def test_results_of_a_call_of_the_host_have_one_rank():
    """JAX refuses others if it lowers for TPUs, where all have one sharding."""

    def one(params, x, key):
        def step(state):
            z, n = eqx.error_if(state, jnp.isnan(state[0]).any(), "NaN")
            return jnp.tanh(params["inside"] @ z), n + 1

        going = lambda state: (jnp.max(jnp.abs(state[0])) > 0.1) & (state[1] < 9)
        return jax.lax.stop_gradient(jax.lax.while_loop(going, step, (x, 0))[0])

    loss_fn = mean_over_rows(one)
    plan = rc.plan_shardings(PARAMS, rc.make_mesh(), fn=loss_fn, args=(BATCH, None))
    equations = iter_equations(jax.make_jaxpr(plan.constrain(loss_fn))(PARAMS, BATCH, None))
    calls = [equation for equation in equations if equation.primitive.name == "pure_callback"]
    ranks = [{len(struct_of(var).shape) for var in equation.outvars} for equation in calls]
    assert sorted(map(len, ranks)) == [1] * len(calls)
    assert calls


def test_the_plan_has_the_gradient_of_a_matrix_that_all_rows_share():
    matrix = lambda params: params["inside"] + 4 * jnp.eye(WIDTH)
    loss_fn = mean_over_rows(lambda params, x, key: jnp.linalg.solve(matrix(params), x))
    plan = rc.plan_shardings(PARAMS, rc.make_mesh(), fn=loss_fn, args=(BATCH, None))
    _, found = compiled_step(loss_fn, plan)
    planned = sum(traffic.bytes for traffic in plan.report.program.traffic)
    assert planned == pytest.approx(sum(one.sent_bytes * one.count for one in found), rel=0.1)


@pytest.mark.thorough
def test_forward_mode():
    def loss_fn(params, batch, key):
        one = lambda x: iterate(lambda z: jax.nn.relu(params["inside"] @ z + x), x)
        return jnp.mean(jax.vmap(one)(batch) ** 2)

    plan = rc.plan_shardings(PARAMS, rc.make_mesh(), fn=loss_fn, args=(BATCH, None))
    tangent = jax.tree.map(jnp.ones_like, PARAMS)
    push = lambda fn: jax.jit(
        lambda params: jax.jvp(lambda params: fn(params, BATCH, None), (params,), (tangent,))
    )
    found, expected = push(plan.constrain(loss_fn))(PARAMS), push(loss_fn)(PARAMS)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("explicit", [False, True])
def test_prediction(explicit):
    mesh = rc.make_mesh()
    predict = lambda params, batch: jax.vmap(lambda x: forward_loop(params, x, None))(batch)
    plan = rc.plan_shardings(PARAMS, mesh, fn=predict, args=(BATCH,))
    if explicit:
        types = (jax.sharding.AxisType.Explicit,) * len(mesh.axis_names)
        mesh = jax.make_mesh(tuple(mesh.shape.values()), mesh.axis_names, axis_types=types)
    rows = jax.device_put(BATCH, jax.NamedSharding(mesh, jax.P("data")))
    params = jax.device_put(PARAMS, jax.NamedSharding(mesh, jax.P()))
    compiled = jax.jit(plan.constrain(predict)).lower(params, rows).compile()
    assert not collectives(compiled.as_text(), mesh)
    np.testing.assert_allclose(
        np.asarray(compiled(params, rows)), predict(PARAMS, BATCH), rtol=1e-5, atol=1e-6
    )


@pytest.mark.integration
def test_fit_evaluate_and_predict():
    loss_fn = mean_over_rows(LOOPS["checkpointed"])
    examples = list(np.asarray(BATCH))

    def run(mesh):
        result = rc.fit(
            jax.tree.map(jnp.copy, PARAMS),
            optax.sgd(1e-2),
            examples,
            loss_fn=loss_fn,
            batch_size=ROWS,
            steps=3,
            key=jr.key(0),
            mesh=mesh,
        )
        return result.model

    one, eight = run(rc.make_mesh(devices=jax.devices()[:1])), run(rc.make_mesh())
    for found, expected in zip(jax.tree.leaves(eight), jax.tree.leaves(one), strict=True):
        np.testing.assert_allclose(np.asarray(found), np.asarray(expected), atol=1e-5)
