import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problem import batch_of, make_model, predict_fn

import redcoast as rc


def test_equals_the_function_itself():
    model, batch = make_model(), batch_of(12)
    actual = eqx.filter_jit(rc.predict)(model, batch, predict_fn=predict_fn)
    np.testing.assert_array_equal(actual, predict_fn(model, batch, None))


def test_the_model_is_in_inference_mode():
    model = eqx.nn.Sequential([eqx.nn.Linear(16, 8, key=jax.random.key(0)), eqx.nn.Dropout(0.9)])
    batch = batch_of(4)
    apply = lambda m, b, k: jax.vmap(lambda x: m(x, key=k))(b["x"])
    actual = rc.predict(model, batch, predict_fn=apply)
    np.testing.assert_allclose(actual, jax.vmap(model.layers[0])(batch["x"]), rtol=1e-6)


def test_the_key_is_passed_to_predict_fn():
    draw = lambda m, b, k: jax.random.normal(k, (4,))
    batch, key = batch_of(4), jax.random.key(7)
    np.testing.assert_array_equal(
        rc.predict(None, batch, key, predict_fn=draw), jax.random.normal(key, (4,))
    )
    assert np.isfinite(rc.predict(None, batch, predict_fn=draw)).all()


@pytest.mark.thorough
def test_in_half_precision():
    apply = lambda m, b, k: jax.vmap(m)(b["x"])
    batch = batch_of(4)
    actual = rc.predict(make_model(), batch, predict_fn=apply, compute_dtype=jnp.bfloat16)
    assert actual.dtype == jnp.bfloat16
    exact = apply(make_model(), batch, None)
    np.testing.assert_allclose(actual.astype(jnp.float32), exact, atol=0.05)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda m, b, k: jnp.zeros(()), r"shape \(\)"),
        (lambda m, b, k: {"a": {"b": jnp.zeros((3, 4))}}, r"\(3, 4\) at a/b for a batch of 4"),
        (lambda m, b, k: {}, "no array"),
    ],
)
def test_predictions_have_a_batch_dimension(wrong, words):
    with pytest.raises(ValueError, match=words):
        rc.predict(make_model(), batch_of(4), predict_fn=wrong)


def test_composes_with_jit_vmap_and_scan():
    model = {"w": jax.random.normal(jax.random.key(0), (16, 8))}
    apply = lambda m, b, k: b["x"] @ m["w"] + jax.random.normal(k, (4, 8))
    batch, keys = batch_of(4), jax.random.split(jax.random.key(1), 3)
    ours = lambda key: rc.predict(model, batch, key, predict_fn=apply)
    expected = np.stack([ours(key) for key in keys])
    np.testing.assert_allclose(np.stack([jax.jit(ours)(key) for key in keys]), expected, rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(ours)(keys), expected, rtol=1e-5, atol=1e-6)
    _, scanned = jax.lax.scan(lambda c, key: (c, ours(key)), None, keys)
    np.testing.assert_allclose(scanned, expected, rtol=1e-5, atol=1e-6)
