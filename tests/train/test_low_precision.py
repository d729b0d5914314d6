"""Products in 8 bits of functions that do not know of them."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import redcoast as rc
from redcoast.core._jaxpr import iter_equations
from redcoast.models import Llama, LlamaConfig

RNG = np.random.default_rng(0)
X = RNG.normal(size=(48, 64)).astype(np.float32)
WEIGHT = RNG.normal(size=(64, 40)).astype(np.float32)
OUT = RNG.normal(size=(48, 40)).astype(np.float32)


def rounded(x, dtype, axis=None):
    """An array as an 8-bit type and its scales hold it, in float64."""
    most = np.float32(127 if dtype == np.int8 else ml_dtypes.finfo(dtype).max)
    scale = np.max(np.abs(x), axis=axis, keepdims=True) / most
    parts = np.clip(x / scale, -most, most)
    if dtype == np.int8:
        parts = np.rint(parts)
    return parts.astype(dtype).astype(np.float64) * np.float64(scale)


def expected(numbers):
    """The product and both gradients, by NumPy and `ml_dtypes`."""
    if numbers == "float8":
        x, w = (rounded(z, ml_dtypes.float8_e4m3fn) for z in (X, WEIGHT))
        g = rounded(OUT, ml_dtypes.float8_e5m2)
        return x @ w, g @ w.T, x.T @ g
    forward = rounded(X, np.int8, axis=1) @ rounded(WEIGHT, np.int8, axis=0)
    backward = rounded(OUT, np.int8, axis=1) @ rounded(WEIGHT, np.int8, axis=1).T
    return forward, backward, np.float64(X).T @ OUT


# The same product, as programs write it: the weight first or last, under `vmap`, and in a batch.
PROGRAMS = {
    "last": lambda w, x: x @ w,
    "first": lambda w, x: (w.T @ x.T).T,
    "vmapped": lambda w, x: jax.vmap(lambda row: w.T @ row)(x),
    "einsum": lambda w, x: jnp.einsum("bsij,ijo->bso", x.reshape(4, 12, 8, 8), w.reshape(8, 8, 40))
    .reshape(48, 40),
    "remat": lambda w, x: jax.checkpoint(lambda w, x: x @ w)(w, x),
    "scan": lambda w, x: jax.lax.scan(lambda c, w: (c, x @ w), 0.0, w[None])[1][0],
    "branch": lambda w, x: jax.lax.cond(x[0, 0] < 9, lambda w: x @ w, lambda w: x @ w * 2, w),
}  # fmt: skip


@pytest.mark.few("einsum-int8", "first-float8")
@pytest.mark.parametrize("numbers", ["float8", "int8"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_products_and_gradients_are_those_of_rounded_numbers(name, numbers):
    fn = rc.low_precision(PROGRAMS[name], numbers, exclude=())

    @jax.jit
    def run(w, x):
        y, pull = jax.vjp(fn, w, x)
        return y, *pull(OUT)

    y, dw, dx = run(WEIGHT, X)
    for ours, ref in zip((y, dx, dw), expected(numbers), strict=True):
        np.testing.assert_allclose(ours, ref, atol=2e-6 * np.abs(ref).max())


@pytest.mark.thorough
def test_experts_are_separate_matrices():
    x, w = RNG.normal(size=(3, 8, 64)), RNG.normal(size=(3, 64, 32))
    x, w = x.astype(np.float32), w.astype(np.float32)
    fn = rc.low_precision(lambda w, x: jnp.einsum("ebi,eio->ebo", x, w), "int8", exclude=())
    y, pull = jax.vjp(fn, w, x)
    dw, dx = pull(y)
    ref = rounded(x, np.int8, axis=2) @ rounded(w, np.int8, axis=1)
    np.testing.assert_allclose(y, ref, atol=1e-4)
    g = np.asarray(y)
    ref = rounded(g, np.int8, axis=2) @ rounded(w, np.int8, axis=2).swapaxes(1, 2)
    np.testing.assert_allclose(dx, ref, rtol=1e-4, atol=1e-2)
    np.testing.assert_allclose(dw, x.swapaxes(1, 2) @ g, rtol=1e-4, atol=1e-2)


CONFIG = LlamaConfig(vocab=96, width=64, layers=2, heads=2, kv_heads=2, hidden=96)
TOKENS = RNG.integers(0, 96, (8, 17)).astype(np.int32)


def loss_fn(model, tokens, key):
    logits = model(tokens[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def in_8_bits(fn, *args):
    """The shapes of the results of products in 8 bits."""
    shapes = []
    for equation in iter_equations(jax.make_jaxpr(fn)(*args)):
        is_small = equation.primitive.name == "dot_general" and all(
            atom.aval.dtype.itemsize == 1 for atom in equation.invars
        )
        if is_small:
            shapes.append(equation.outvars[0].aval.shape)
    return shapes


@pytest.mark.thorough
def test_all_matrices_but_the_head_are_in_8_bits_by_default():
    model = eqx.filter_eval_shape(Llama, CONFIG, key=jax.random.key(0))
    count = lambda **options: len(
        in_8_bits(rc.low_precision(loss_fn, "float8", **options), model, TOKENS, None)
    )
    assert count() == 7  # of the layer that is scanned: no attention, no head
    assert count(exclude=()) == 8
    assert count(exclude="layers/w[qkvo]") == 4
    assert count(exclude=["layers/w[qkvo]", "^head$"]) == 3


def test_attention_and_products_of_the_batch_alone_are_not_changed():
    def fn(w, x):
        y = x @ w
        return y @ (x @ x.T)

    w, x = jnp.ones((64, 64)), jnp.ones((64, 64))
    assert in_8_bits(rc.low_precision(fn, "int8", exclude=()), w, x) == [(64, 64)]


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [{"data": 8}, {"data": 2, "fsdp": 2, "model": 2}])
@pytest.mark.parametrize("numbers", ["float8", "int8"])
def test_a_step_on_a_mesh_is_that_on_one_device(numbers, sizes):
    """Scales are of the whole arrays, on any mesh."""
    params = {"up": RNG.normal(size=(64, 128)), "down": RNG.normal(size=(128, 64))}
    params = jax.tree.map(lambda x: np.float32(x / 8), params)
    fn = lambda p, x, key: jnp.mean((jax.nn.relu(x @ p["up"]) @ p["down"] - x) ** 2)
    low = rc.low_precision(fn, numbers, exclude=())
    mesh = rc.make_mesh(**sizes)
    plan = rc.plan_shardings(params, mesh, fn=low, args=(X, None))
    sharded = jax.device_put(params, plan.shardings)
    loss, grads = jax.jit(jax.value_and_grad(plan.constrain(low)))(sharded, X, None)
    alone, ref = jax.jit(jax.value_and_grad(low))(params, X, None)
    exact = jax.grad(fn)(params, X, None)
    np.testing.assert_allclose(loss, alone, rtol=1e-4)
    for name in params:
        # A number that is rounded the other way changes little; another scale would change more.
        error = np.linalg.norm(ref[name] - exact[name])
        assert np.linalg.norm(grads[name] - ref[name]) < 0.1 * error


@pytest.mark.thorough
def test_an_ensemble_has_scales_for_each_member():
    """`vmap` of the function is the function of each row."""
    fn = lambda w, x: jnp.mean((x @ w) ** 2)
    low = rc.low_precision(fn, "float8", exclude=())
    scales = np.array([1, 1e4], np.float32).reshape(2, 1, 1)
    weights = WEIGHT * scales
    both = jax.vmap(jax.grad(low), in_axes=(0, None))(weights, X)
    for member, w in zip(both, weights, strict=True):
        np.testing.assert_allclose(member, jax.grad(low)(w, X), rtol=1e-5)


@pytest.mark.thorough
def test_what_is_not_finite_stays_so_and_zeros_are_zeros():
    low = rc.low_precision(lambda w, x: x @ w, "float8", exclude=())
    assert not np.isfinite(low(WEIGHT, X * np.float32(np.inf))).any()
    assert not np.isfinite(low(WEIGHT, np.where(X > 3, np.nan, X))).all()
    assert not np.any(low(WEIGHT, np.zeros_like(X)))
    tiny = low(WEIGHT, X * np.float32(1e-38))
    assert np.isfinite(tiny).all()


def test_a_frozen_matrix_has_no_gradient_product():
    low = rc.low_precision(lambda w, x: jnp.sum(x @ w), "float8", exclude=())
    assert len(in_8_bits(jax.grad(low, argnums=1), WEIGHT, X)) == 2
    assert len(in_8_bits(jax.grad(low, argnums=(0, 1)), WEIGHT, X)) == 3


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_results_and_gradients_keep_their_dtype(dtype):
    w, x = jnp.asarray(WEIGHT, dtype), jnp.asarray(X, dtype)
    low = rc.low_precision(lambda w, x: x @ w, "float8", exclude=())
    y, pull = jax.vjp(low, w, x)
    dw, dx = pull(jnp.asarray(OUT, dtype))
    assert y.dtype == dw.dtype == dx.dtype == dtype
    ref, _, _ = expected("float8")  # of numbers that are not rounded to 16 bits first
    assert np.linalg.norm(np.float32(y) - ref) < 0.03 * np.linalg.norm(ref)


def test_fit_trains_with_it():
    params = {"up": jnp.asarray(WEIGHT / 8), "down": jnp.asarray(WEIGHT.T / 8)}
    fn = lambda p, x, key: jnp.mean((jax.nn.relu(x @ p["up"]) @ p["down"] - x) ** 2)
    low = rc.low_precision(fn, "float8")
    assert low == rc.low_precision(fn, "float8")
    losses = []
    log = lambda metrics, step: losses.append(float(metrics["loss"]))
    options = {"collate_fn": np.stack, "batch_size": 48, "steps": 3, "log": log}
    rc.fit(params, optax.adam(1e-2), list(X), loss_fn=low, **options)
    assert losses[-1] < losses[0]


@pytest.mark.integration
@pytest.mark.parametrize(("numbers", "bound"), [("float8", 0.08), ("int8", 0.03)])
def test_two_hundred_steps_are_close_to_those_in_float32(numbers, bound):
    """The loss of each step, smoothed over ten steps, differs by less than this share."""
    config = LlamaConfig(vocab=64, width=64, layers=4, heads=4, kv_heads=2, hidden=128)
    rng = np.random.default_rng(1)
    # Sequences in which a token mostly follows from the two before it.
    table = rng.integers(0, 64, (64, 64))
    rows = rng.integers(0, 64, (512, 33)).astype(np.int32)
    for place in range(2, 33):
        follows = rng.random(512) < 0.9
        rows[:, place] = np.where(
            follows, table[rows[:, place - 2] % 4, rows[:, place - 1]], rows[:, place]
        )

    def losses(fn):
        values = []
        log = lambda metrics, step: values.append(float(metrics["loss"]))
        mesh = rc.make_mesh(devices=jax.devices()[:1])
        options = {"batch_size": 16, "steps": 200, "log": log, "key": jax.random.key(1)}
        options |= {"mesh": mesh}
        model = Llama(config, key=jax.random.key(0))
        rc.fit(model, optax.adam(3e-3), list(rows), loss_fn=fn, collate_fn=np.stack, **options)
        return np.convolve(values, np.ones(10) / 10, "valid")

    ref, low = losses(loss_fn), losses(rc.low_precision(loss_fn, numbers))
    print(numbers, ref[-1], low[-1], np.abs(low / ref - 1).max())
    assert ref[-1] < 0.6 * ref[0]
    assert np.abs(low / ref - 1).max() < bound
