"""Whatever `jax.jit` accepts can be planned and constrained."""

import equinox as eqx
import jax
import jax.experimental.checkify
import jax.experimental.pallas
import jax.experimental.sparse
import jax.export
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
import optax
import pytest
from grids import few_of
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.ode import odeint
from sharding_helpers import array, mesh_of, real_mesh

import redcoast as rc

MESHES = ((1, 1, 8), (2, 2, 2), (1, 8, 1))
WEIGHTS, BATCH = {"a": array(8, 16)}, array(16, 8)


def check(fn, model, batch, key=None):
    """Plans a function and traces it constrained: the same results in kind and shape."""
    expected = eqx.filter_eval_shape(fn, model, batch, key)
    for shape in MESHES:
        plan = rc.plan_shardings(model, real_mesh(*shape), fn=fn, args=(batch, key))
        assert str(plan)
        actual = eqx.filter_eval_shape(plan.constrain(fn), model, batch, key)
        assert jax.tree.structure(actual) == jax.tree.structure(expected)
        assert jax.tree.leaves(actual) == jax.tree.leaves(expected)


def size(x):
    return jnp.mean(jnp.square(jnp.abs(x)))


def spd(x):
    return x @ x.T + 4 * jnp.eye(16)


def in_place(x):
    ref = jax.new_ref(x)
    step = lambda c, _: (c, ref.__setitem__(..., ref[...] + 1))
    lax.scan(step, 0, None, length=3)
    return ref[...]


def kernel(x_ref, y_ref):
    y_ref[...] = x_ref[...] * 2


batched = jax.custom_batching.custom_vmap(jnp.sin)
batched.def_vmap(lambda axis_size, in_batched, x: (jnp.sin(x), True))
EXPORTED = jax.export.export(jax.jit(lambda x: x * 2))(array(16, 16))
solve = jnp.linalg.solve
named = lambda fn: lambda x: jax.vmap(fn, axis_name="i")(x)
vmapped = lambda fn: lambda x: jax.vmap(fn)(x)
not_large = lambda x: eqx.error_if(x, jnp.any(x > 1e9), "large")

# Of an array of shape (16, 16), the result of a matrix product.
FUNCTIONS = {
    "checkify": lambda x: jax.experimental.checkify.checkify(jnp.log)(x)[1],
    "cg": lambda x: jsp.sparse.linalg.cg(lambda v: spd(x) @ v, x[0], maxiter=3)[0],
    "ode": lambda x: odeint(lambda y, t: -y, x[0], jnp.linspace(0.0, 1.0, 3)),
    "gmres": lambda x: jsp.sparse.linalg.gmres(lambda v: x @ v, x[0], maxiter=2, restart=2)[0],
    "custom root": lambda x: lax.custom_root(
        lambda z: 2 * z - x, x, lambda f, z: z - f(z) / 2, lambda g, y: y / 2
    ),
    "vectorize": jnp.vectorize(lambda x: jnp.cumsum(x), signature="(n)->(n)"),
    "odd reduction": lambda x: lax.reduce(x, np.float32(0), lambda a, b: a * 2 + b, (1,)),
    "platform": lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos),
    "named call": jax.named_call(jnp.sin, name="sine"),
    "linear call": lambda x: jax.custom_derivatives.linear_call(
        lambda r, v: v * r, lambda r, v: v * r, 2.0, x
    ),
    "custom gradient": jax.custom_gradient(lambda x: (jnp.sin(x), lambda g: g * 2)),
    "custom vmap": vmapped(batched),
    "pallas": jax.experimental.pallas.pallas_call(kernel, out_shape=array(16, 16), interpret=True),
    "exported": EXPORTED.call,
    "sparse": lambda x: jax.experimental.sparse.BCOO.fromdense(jnp.eye(16), nse=16) @ x,
    "in place": in_place,
    "error_if": not_large,
    "breakpoint of gradients": eqx.debug.backward_nan,
    "not inlined": eqx.internal.noinline(jnp.sin),
    "not batched": eqx.internal.nonbatchable,
    "any over vmap": vmapped(lambda x: jnp.where(eqx.internal.unvmap_any(x > 0), x, 0.0)),
    "print": lambda x: (jax.debug.print("{}", x), x)[1],
    "callback": lambda x: jax.pure_callback(np.sin, x, x),
    "callback by row": vmapped(lambda x: jax.pure_callback(np.sin, x, x, vmap_method="sequential")),
    "ordered callback": lambda x: (
        jax.experimental.io_callback(print, None, x[0], ordered=True),
        x,
    )[1],
    "inspect": lambda x: (jax.debug.inspect_array_sharding(x, callback=print), x)[1],
    "pmap": lambda x: jax.pmap(jnp.sin)(x[:1]),
    "pmean": named(lambda x: x - lax.pmean(x, "i")),
    "pmax": named(lambda x: x - lax.pmax(x, "i")),
    "all_gather": named(lambda x: lax.all_gather(x, "i")),
    "all_to_all": named(lambda x: lax.all_to_all(x, "i", 0, 0)),
    "ppermute": named(lambda x: lax.ppermute(x, "i", [(i, (i + 1) % 16) for i in range(16)])),
    "psum_scatter": named(lambda x: lax.psum_scatter(x, "i")),
    "axis_index": named(lambda x: x * lax.axis_index("i").astype(x.dtype)),
    "switch by row": vmapped(lambda x: lax.switch(jnp.argmax(x) % 2, [jnp.sin, jnp.cos], x)),
    "no iterations": lambda x: lax.scan(lambda c, _: (c + 1, c), x, None, length=0),
    "keys carried": lambda x: lax.scan(
        lambda k, _: (jax.random.split(k)[0], jax.random.normal(k, (2,))),
        jax.random.key(0),
        None,
        length=3,
    )[1],
    "batched map": lambda x: lax.map(jnp.sin, x, batch_size=4),
    "barrier": lambda x: lax.optimization_barrier({"x": x, "y": (x, 2)}),
    "fft": lambda x: jnp.abs(jnp.fft.fft2(x)),
    "irfft": lambda x: jnp.fft.irfft(jnp.fft.rfft(x)),
    "stft": lambda x: jnp.abs(jsp.signal.stft(jnp.ravel(x), nperseg=16)[2]),
    "inverse": lambda x: jnp.linalg.inv(spd(x)),
    "log determinant": lambda x: jnp.linalg.slogdet(spd(x)),
    "schur": lambda x: lax.linalg.schur(x),
    "eig": lambda x: jnp.abs(jnp.linalg.eig(x)[0]),
    "expm": jsp.linalg.expm,
    "sqrtm": lambda x: jnp.abs(jsp.linalg.sqrtm(spd(x))),
    "lstsq": lambda x: jnp.linalg.lstsq(x[:, :4], x[:, 5])[0],
    "tridiagonal": lambda x: lax.linalg.tridiagonal(spd(x)),
    "triangular": lambda x: jsp.linalg.solve_triangular(spd(x), x, lower=True),
    "cholesky update": lambda x: lax.linalg.cholesky_update(spd(x), x[0]),
    "symmetric product": lambda x: lax.linalg.symmetric_product(x, x),
    "solves by row": vmapped(lambda x: solve(jnp.diag(x), x)),
    "patches": lambda x: lax.conv_general_dilated_patches(x[None, None], (2, 2), (1, 1), "SAME"),
    "local conv": lambda x: lax.conv_general_dilated_local(
        x[None, None], jnp.ones((3, 4, 15, 15)), (1, 1), "VALID", (2, 2)
    ),
    "kernels by row": vmapped(lambda x: jnp.convolve(x, x[:3])),
    "pooling twice derived": jax.hessian(lambda x: jnp.max(x[:2, :2]) ** 2),
    "small integers": lambda x: lax.dot(*(x.astype(jnp.int8),) * 2, preferred_element_type="int32"),
    "float8": lambda x: x.astype(jnp.float8_e4m3fn).astype(jnp.float32),
    "bfloat16": lambda x: x.astype(jnp.bfloat16) @ x.astype(jnp.bfloat16).T,
    "complex": lambda x: lax.complex(x, x) @ lax.complex(x, x),
    "bits": lambda x: (x.view(jnp.int32), jnp.packbits(x > 0)),
    "many axes": lambda x: jnp.einsum("abc,adc->abd", *(x.reshape(4, 4, 16),) * 2),
    "diagonal": lambda x: jnp.einsum("aa->a", x),
    "grouped heads": lambda x: jax.nn.dot_product_attention(
        x.reshape(2, 4, 4, 8), *(x.reshape(2, 4, 4, 8)[:, :, :2],) * 2, is_causal=True
    ),
    "scatters": lambda x: x.at[0].mul(2.0).at[1].min(0.0).at[2].power(2.0).at[3].apply(jnp.sin),
    "out of range": lambda x: x.at[jnp.array([1, 99])].get(mode="fill", fill_value=0.0),
    "one position": lambda x: x[jnp.argmax(x[0]), jnp.arange(16)[::-1]],
    "sizes as data": lambda x: jnp.repeat(x, jnp.arange(16) % 2, 0, total_repeat_length=5),
    "statistics": lambda x: (jnp.median(x, 1), jnp.quantile(x, 0.3, 0), jnp.cov(x)),
    "sets": lambda x: (jnp.unique(x, size=4), jnp.nonzero(x, size=5), jnp.isin(x, x[0])),
    "permutation": lambda x: jax.random.permutation(jax.random.key(0), x, independent=True),
    "categorical": lambda x: jax.random.categorical(jax.random.key(0), x),
    "poisson": lambda x: jax.random.poisson(jax.random.key(0), jnp.abs(x)),
    "resize": lambda x: jax.image.resize(x, (8, 8), "linear"),
    "segments": lambda x: jax.ops.segment_max(x, jnp.arange(16) % 4, num_segments=4),
    "ctc": lambda x: optax.ctc_loss(
        x[None], jnp.zeros((1, 16)), jnp.ones((1, 4), "int32"), jnp.zeros((1, 4))
    ),
    "no rows": lambda x: x[:0] @ x,
    "empty": lambda x: jnp.concatenate([x[:0], x]),
    "scalars": lambda x: (x[0, 0], 3, jnp.float32(2), "text", None, np.ones(2)),
    "nothing": lambda x: None,
    "policy": jax.checkpoint(
        lambda x: checkpoint_name(jnp.sin(x), "h") * 2,
        policy=jax.checkpoint_policies.save_only_these_names("h"),
    ),
}


@pytest.mark.parametrize("name", few_of(FUNCTIONS, *list(FUNCTIONS)[::12]))
def test_any_operation(name):
    check(lambda p, x, key: FUNCTIONS[name](x @ p["a"]), WEIGHTS, BATCH)


def test_loops_that_end_at_other_times_in_each_row():
    loop = lambda x: lax.while_loop(lambda x: x[0] < 3, lambda x: x + 1, x)
    check(lambda p, x, key: jax.vmap(loop)(x @ p["a"]), WEIGHTS, BATCH)


class Stateful(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, key):
        self.linear = eqx.nn.Linear(8, 16, key=key)
        self.norm = eqx.nn.BatchNorm(16, axis_name="batch", mode="batch")


def with_state(model, x, key):
    net, state = model
    apply = lambda x, state: net.norm(net.linear(x), state)
    y, state = jax.vmap(apply, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
    return size(y), {"mean": jnp.mean(y)}, (net, state)


KEY, KEYS = jax.eval_shape(lambda: (jax.random.key(0), jax.random.split(jax.random.key(0), 16)))
linear = lambda p, x, key: size(x @ p["a"])
noisy = lambda x, key: x * jax.random.bernoulli(key, shape=x.shape).astype(x.dtype)
PROGRAMS = {
    "no rows": (linear, WEIGHTS, array(0, 8)),
    "no columns": (
        lambda p, x, key: size(x @ p["a"] @ p["b"]),
        {"a": array(8, 0), "b": array(0, 8)},
        BATCH,
    ),
    "scalars": (lambda p, x, key: p * x, array(), array()),
    "ones": (linear, {"a": array(1, 1)}, array(1, 1)),
    "no batch": (lambda p, x, key: size(p["a"]), WEIGHTS, None),
    "no arrays": (
        lambda p, x, key: size(p["f"](x)),
        {"f": jax.nn.relu, "n": 3, "none": None},
        BATCH,
    ),
    "an array": (lambda p, x, key: size(x @ p), array(8, 16), BATCH),
    "NumPy": (linear, {"a": np.ones((8, 16), np.float32)}, np.ones((16, 8), np.float32)),
    "NumPy scalars": (lambda p, x, key: size(x * p["a"]), {"a": np.float32(2)}, BATCH),
    "Python numbers": (lambda p, x, key: size(x * p["a"]) * x.shape[0], {"a": 2.0}, BATCH),
    "integers": (
        lambda p, x, key: size(x @ p["a"].astype("float32")),
        {"a": jax.ShapeDtypeStruct((8, 16), jnp.int32)},
        BATCH,
    ),
    "masks": (
        lambda p, x, key: size(x @ jnp.where(p["m"], p["a"], 0.0)),
        {"a": array(8, 16), "m": jax.ShapeDtypeStruct((8, 16), bool)},
        BATCH,
    ),
    "complex": (
        linear,
        {"a": jax.ShapeDtypeStruct((8, 16), jnp.complex64)},
        jax.ShapeDtypeStruct((16, 8), jnp.complex64),
    ),
    "float8": (
        lambda p, x, key: size(x @ p["a"].astype(jnp.float32)),
        {"a": jax.ShapeDtypeStruct((8, 16), jnp.float8_e4m3fn)},
        BATCH,
    ),
    "a key": (lambda p, x, key: size(noisy(x @ p["a"], key)), WEIGHTS, BATCH, KEY),
    "an old key": (
        lambda p, x, key: size(noisy(x @ p["a"], key)),
        WEIGHTS,
        BATCH,
        jax.ShapeDtypeStruct((2,), jnp.uint32),
    ),
    "keys in the batch": (
        lambda p, x, key: size(jax.vmap(noisy)(x["x"] @ p["a"], x["k"])),
        WEIGHTS,
        {"x": BATCH, "k": KEYS},
    ),
    "keys in the model": (
        lambda p, x, key: size(noisy(x @ p["a"], p["k"])),
        {"a": array(8, 16), "k": KEY},
        BATCH,
    ),
    "text in the batch": (
        lambda p, x, key: size(x["x"] @ p["a"]),
        WEIGHTS,
        {"x": BATCH, "name": "text"},
    ),
    "given back": (lambda p, x, key: (p, x, key), WEIGHTS, BATCH, KEY),
    "no result": (lambda p, x, key: None, WEIGHTS, BATCH),
    "a constant": (lambda p, x, key: 3.0, WEIGHTS, BATCH),
    "not differentiable": (lambda p, x, key: jnp.sum(jnp.argmax(x @ p["a"], 1)), WEIGHTS, BATCH),
    "state": (with_state, eqx.filter_eval_shape(eqx.nn.make_with_state(Stateful), KEY), BATCH),
    "one array twice": (lambda p, x, key: size(x @ p[0] + x @ p[1]), [WEIGHTS["a"]] * 2, BATCH),
}


@pytest.mark.parametrize("name", few_of(PROGRAMS, *list(PROGRAMS)[::2]))
def test_any_model_and_batch(name):
    check(*PROGRAMS[name])


def test_arrays_of_an_outer_transformation():
    def outer(w, x):
        inner = lambda p, x, key: size(x @ p["a"] @ w)
        args = (x, None)
        plan = rc.plan_shardings(WEIGHTS, mesh_of(2, 2, 2), fn=inner, args=args)
        assert len(plan.report.arrays) == 1
        return inner({"a": jnp.ones((8, 16))}, *args)

    jax.eval_shape(jax.vmap(jax.grad(outer), in_axes=(0, None)), array(3, 16, 4), BATCH)
