"""What holds for every decoder, and a slow NumPy to compare its arithmetic with."""

import dataclasses
import functools as ft
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from random_models import cast, random_model, to_device

import redcoast as rc

VOCAB = 13
TOKENS = to_device(np.random.default_rng(0).integers(0, VOCAB, (2, 7)))


def make(model_class, config, **changes):
    return random_model(model_class, dataclasses.replace(config, **changes))


# What runs once need not run fast.
jit = ft.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def initial(model_class, config):
    # Keys of this kind take less to compile.
    return jit(lambda key: model_class(config, key=key))(jax.random.key(0, impl="unsafe_rbg"))


@jit
def logits_of(model, tokens, **options):
    return model(tokens, **options)


@jit
def gradient_of(model, tokens):
    return jax.grad(lambda model: jnp.mean(jnp.sin(model(tokens))))(model)


@jit
def decode(model, tokens, cache, mask=None):
    hidden, cache = model.decode(tokens, cache, mask=mask)
    return model.unembed(hidden), cache


@jit
def take(cache, rows):
    return cache.take(rows)


def finite(tree):
    return all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(tree))


def close(a, b, tolerance=1e-5):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=tolerance)


# What the tests of each family call.


def check_padding(model, **options):
    """One row padded on the left and one on the right are as they are without."""
    rows = np.asarray(TOKENS)
    tokens = np.stack([np.pad(rows[0], (4, 0)), np.pad(rows[1], (0, 4))])
    real = np.stack([np.arange(11) >= 4, np.arange(11) < 7])
    mask = to_device(real.astype(np.int32))
    logits = np.asarray(logits_of(model, to_device(tokens), mask=mask, **options))
    alone = np.asarray(logits_of(model, TOKENS, **options))
    close(logits[0, 4:], alone[0])
    close(logits[1, :7], alone[1])
    assert finite(logits)
    # Nor do they depend on what stands there.
    other = to_device(np.where(real, tokens, 5))
    np.testing.assert_array_equal(
        logits[real], np.asarray(logits_of(model, other, mask=mask, **options))[real]
    )


def check_segments(model, width=7):
    """The beginnings of two rows, packed into one, are as they are apart."""
    rows = np.asarray(TOKENS)
    packed = to_device(np.concatenate([rows[0, :3], rows[1, : width - 3]])[None])
    segments = to_device((np.arange(width) >= 3).astype(np.int32)[None])
    logits = np.asarray(logits_of(model, packed, segments=segments))
    apart = np.asarray(logits_of(model, TOKENS))
    close(logits[0, :3], apart[0, :3])
    close(logits[0, 3:], apart[1, : width - 3])


def check_cache(model, cache, **options):
    """A padded prompt and then one token after the other give what all at once do; and so do
    rows taken in another order."""
    expected = np.asarray(logits_of(model, TOKENS, **options))
    tokens = np.asarray(TOKENS)
    prompt = to_device(np.pad(tokens[:, :4], ((0, 0), (2, 0))))
    mask = to_device(np.pad(np.ones((2, 4), bool), ((0, 0), (2, 0))))
    first, cache = decode(model, prompt, cache, mask)
    actual = [np.asarray(first)[:, 2:]]
    for at in (4, 5):
        logits, cache = decode(model, to_device(tokens[:, at : at + 1]), cache)
        actual.append(np.asarray(logits))
    close(np.concatenate(actual, axis=1), expected[:, :6])
    rows = np.array([1, 0])
    swapped, _ = decode(model, to_device(tokens[rows, 6:]), take(cache, to_device(rows)))
    close(swapped[:, 0], expected[rows, 6])


def check_dropout(model, rates, **options):
    """Each rate alone changes results, differently for each key, and only with one."""
    plain = logits_of(
        make(type(model), model.config, **dict.fromkeys(rates, 0.9)), TOKENS, **options
    )
    off = dict.fromkeys(rates, 0.0)
    for rate in (None, *rates):
        other = make(type(model), model.config, **(off if rate is None else off | {rate: 0.5}))
        keys = (jax.random.key(seed, impl="unsafe_rbg") for seed in (0, 1))
        a, b = (np.asarray(logits_of(other, TOKENS, key=key, **options)) for key in keys)
        changed = [bool(np.abs(x - y).max() > 1e-4) for x, y in ((a, np.asarray(plain)), (a, b))]
        assert changed == [rate is not None] * 2, rate
        assert finite(a)


def check_remat(model):
    """Both kinds save less, and what is computed again gives the same gradient."""
    saved = []
    for remat in ("none", "dots", "full"):
        other = make(type(model), model.config, remat=remat)
        _, pullback = eqx.filter_eval_shape(eqx.filter_vjp, lambda m: m(TOKENS), other)
        saved.append(sum(x.size for x in jax.tree.leaves(pullback) if hasattr(x, "size")))
    assert saved[2] < saved[1] < saved[0]
    both = (gradient_of(model, TOKENS), gradient_of(other, TOKENS))
    for expected, got in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-7)


def check_half_precision(model):
    """bfloat16 and float16 stay what they are, and near float32; gradients are finite."""
    for dtype, tolerance in ((jnp.bfloat16, 0.04), (jnp.float16, 0.006)):
        half = cast(model, dtype)
        logits = logits_of(half, TOKENS)
        exact = np.asarray(logits_of(cast(half, jnp.float32), TOKENS))
        assert logits.dtype == dtype
        error = np.abs(np.asarray(logits, np.float32) - exact).max()
        assert error < tolerance * np.abs(exact).max()
    gradient = gradient_of(half, TOKENS)
    assert {x.dtype for x in jax.tree.leaves(gradient)} == {np.dtype(dtype)}
    assert finite(gradient)


def check_plan(model, **options):
    """Over data 2 x model 4 nearly all of the model is split over `model`, and its loss is that of
    one device."""
    tokens = to_device(np.tile(np.asarray(TOKENS), (2, 1)))

    def loss_fn(model, tokens, options):
        return jnp.mean(jnp.sin(model(tokens, **options)))

    mesh = rc.make_mesh(data=2, model=4)
    plan = rc.plan_shardings(model, mesh, fn=loss_fn, args=(tokens, options))
    leaves, places = jax.tree.leaves(model), jax.tree.leaves(plan.shardings)
    split = sum(x.size for x, s in zip(leaves, places, strict=True) if "model" in str(s.spec))
    assert split >= 0.9 * sum(x.size for x in leaves)
    loss = jit(loss_fn)(model, tokens, options)
    model = jax.device_put(model, plan.shardings)
    planned = jit(plan.constrain(loss_fn))(model, tokens, options)
    assert abs(float(loss) - float(planned)) < 1e-5


# One sequence in float64, a matrix of its tokens by their features.


def in_numpy(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def one_layer(layers, index):
    return jax.tree.map(lambda x: x[index], layers)


def slow_norm(x, scale=1.0, shift=0.0, eps=1e-5):
    deviation = np.sqrt(((x - x.mean(1, keepdims=True)) ** 2).mean(1, keepdims=True) + eps)
    return (x - x.mean(1, keepdims=True)) / deviation * scale + shift


def slow_attention(q, k, v, *, scale, causal=True):
    """Each query alone, head by head; all have the shape (seq, heads, head_dim)."""
    out = np.zeros_like(q)
    for head in range(q.shape[1]):
        for at in range(len(q)):
            seen = slice(at + 1) if causal else slice(None)
            weights = np.exp(k[seen, head] @ q[at, head] * scale)
            out[at, head] = weights @ v[seen, head] / weights.sum()
    return out


def slow_gelu_tanh(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def slow_gelu(x):
    return x / 2 * (1 + np.vectorize(math.erf)(x / np.sqrt(2)))
