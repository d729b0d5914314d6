"""Models, batches and keys may lie on any devices, and a loss may name axes of the run's mesh."""

import functools as ft
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grids import few_of
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from problem import fit_quietly

import redcoast as rc
from redcoast.sharding.constrain._verify import verify

MESH = rc.make_mesh(model=2)
PLACES = {
    "first device": SingleDeviceSharding(jax.devices()[0]),
    "another device": SingleDeviceSharding(jax.devices()[3]),
    "the mesh": NamedSharding(MESH, P()),
    "a smaller mesh": NamedSharding(rc.make_mesh(devices=jax.devices()[:4]), P()),
}
BATCH = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
EXAMPLES = list(BATCH)
MODEL = eqx.nn.MLP(8, 8, 16, 1, key=jax.random.key(0))
KEY = jax.random.key(1)
TEACHER = eqx.nn.MLP(8, 8, 16, 1, key=jax.random.key(2))


def noisy(model, batch, key):
    noise = jax.random.normal(key, batch.shape)
    return jnp.mean((jax.vmap(model)(batch + 0.1 * noise) - batch) ** 2)


def moved(tree, where):
    place = lambda x: jax.device_put(x, PLACES[where])
    return jax.tree.map(lambda x: place(x) if eqx.is_array(x) else x, tree)


def fit(loss_fn=noisy, model=MODEL, **options):
    return fit_quietly(
        model,
        optax.adam(1e-3),
        EXAMPLES,
        collate_fn=np.stack,
        loss_fn=loss_fn,
        batch_size=16,
        steps=1,
        **{"mesh": MESH, **options},
    )


@pytest.mark.thorough
def test_a_run_verifies_with_its_key_which_is_on_the_mesh():
    """The key of a run is on all devices, and the comparison is with one of them."""
    fit(plan="verify")


@pytest.mark.parametrize("where", few_of(PLACES, "first device"))
@pytest.mark.thorough
def test_verify_takes_model_batch_and_key_from_anywhere(where):
    plan = rc.plan_shardings(MODEL, MESH, fn=noisy, args=(BATCH, KEY))
    inputs = moved(MODEL, where), moved(jnp.asarray(BATCH), where), moved(KEY, where)
    expected = plan.verify(noisy, MODEL, BATCH, KEY, tolerance=1e-5)
    assert plan.verify(noisy, inputs[0], BATCH, KEY) == expected
    assert plan.verify(noisy, MODEL, inputs[1], KEY) == expected
    assert plan.verify(noisy, MODEL, BATCH, inputs[2]) == expected


@pytest.mark.few("the mesh")
@pytest.mark.parametrize("where", ["another device", "the mesh"])
def test_verify_takes_what_the_loss_closes_over_from_anywhere(where):
    teacher = moved(TEACHER, where)
    loss_fn = lambda m, b, k: jnp.mean((jax.vmap(m)(b) - jax.vmap(teacher)(b)) ** 2)
    plan = rc.plan_shardings(MODEL, MESH, fn=loss_fn, args=(BATCH, KEY))
    plan.verify(loss_fn, MODEL, BATCH, KEY, tolerance=1e-5)


@pytest.mark.thorough
def test_verify_still_finds_what_differs():
    """The comparison is not of a program with itself."""
    plan = rc.plan_shardings(MODEL, MESH, fn=noisy, args=(BATCH, KEY))
    planned = plan.constrain(lambda m, b, k: 1.01 * noisy(m, b, k))
    with pytest.raises(ValueError, match=r"loss \(by 0.01\)"):
        verify(planned, noisy, plan.shardings, MESH, MODEL, BATCH, KEY, 1e-5)


def test_verify_of_a_plan_for_an_abstract_mesh_says_so():
    plan = rc.plan_shardings(MODEL, MESH.abstract_mesh, fn=noisy, args=(BATCH, KEY))
    with pytest.raises(ValueError, match="abstract mesh"):
        plan.verify(noisy, MODEL, BATCH, KEY)


@pytest.mark.thorough
@pytest.mark.parametrize("where", few_of(PLACES, "first device"))
def test_keys_from_anywhere(where):
    """A key that was put on devices of its own decides the same run and the same evaluation."""
    key = moved(KEY, where)
    same = lambda call: jax.tree.map(np.testing.assert_array_equal, call(KEY), call(key))
    same(lambda key: jax.tree.leaves(eqx.filter(fit(key=key).model, eqx.is_array)))
    options: dict[str, Any] = {"collate_fn": np.stack, "batch_size": 16, "mesh": MESH}
    evaluate = ft.partial(rc.evaluate, MODEL, EXAMPLES, loss_fn=noisy, **options)
    same(lambda key: evaluate(key=key))
    predict_fn = lambda m, b, k: jax.vmap(m)(b + jax.random.normal(k, b.shape))
    predict = ft.partial(rc.predict_examples, MODEL, EXAMPLES, predict_fn=predict_fn, **options)
    same(lambda key: predict(key=key))


# What a loss may say of its own arrays, by the names of the run's mesh.


def bare(model, batch, key):
    noise = jax.lax.with_sharding_constraint(jax.random.normal(key, batch.shape), P("data"))
    return jnp.mean((jax.vmap(model)(noise) - batch) ** 2)


@jax.custom_vjp
def doubled(x):
    return 2 * x


def _forward(x):
    return jax.lax.with_sharding_constraint(2 * x, P("data")), None


def _backward(_, g):
    h = jax.lax.with_sharding_constraint(g @ jnp.eye(8), P("data", None))
    return (2 * h,)


doubled.defvjp(_forward, _backward)


def bare_inside(model, batch, key):
    """Bare specs in a loop, in a compiled function, and in a derivative of its own."""
    h = doubled(jax.vmap(model)(batch))
    step = lambda c, x: (jax.lax.with_sharding_constraint(c + x, P("model")), None)
    total, _ = jax.lax.scan(step, jnp.zeros(8), h)
    return jax.jit(lambda x: jnp.mean(jax.lax.with_sharding_constraint(x, P(None)) ** 2))(total)


INIT = lambda key: eqx.nn.MLP(8, 8, 16, 1, key=key)
SHAPE = jax.ShapeDtypeStruct((16, 8), jnp.float32)
CALLS = {
    "plan_shardings": lambda fn: rc.plan_shardings(MODEL, MESH, fn=fn, args=(BATCH, KEY)),
    "abstract mesh": lambda fn: rc.plan_shardings(
        MODEL, MESH.abstract_mesh, fn=fn, args=(BATCH, KEY)
    ),
    "infer_shardings": lambda fn: rc.infer_shardings(MODEL, MESH, fn=fn, args=(BATCH, KEY)),
    "fit": lambda fn: fit(fn, accumulate=2, evaluation=rc.Evaluation(EXAMPLES)),
    "fit on one device": lambda fn: fit(fn, mesh=rc.make_mesh(devices=jax.devices()[:1])),
    "fit, verified": lambda fn: fit(bare_inside, plan="verify"),
    "evaluate": lambda fn: rc.evaluate(
        MODEL, EXAMPLES, collate_fn=np.stack, loss_fn=fn, batch_size=16, mesh=MESH
    ),
    "predict_examples": lambda fn: rc.predict_examples(
        MODEL,
        EXAMPLES,
        collate_fn=np.stack,
        predict_fn=lambda m, b, k: b + fn(m, b, k),
        batch_size=16,
        mesh=MESH,
    ),
    "dry_run": lambda fn: rc.dry_run(INIT, fn, SHAPE, optax.sgd(0.1), target="cpu:4"),
    "suggest_mesh": lambda fn: rc.suggest_mesh(
        INIT, fn, SHAPE, optax.sgd(0.1), target="cpu:4", compiled=1
    ),
}


@pytest.mark.parametrize("name", few_of(CALLS, "plan_shardings"))
def test_bare_specs_refer_to_the_mesh_wherever_a_loss_is_traced(name):
    CALLS[name](bare)


@pytest.mark.thorough
@pytest.mark.parametrize("fn", few_of([bare, bare_inside], bare))
def test_bare_specs_in_a_constrained_function(fn):
    """Called as it is, and differentiated inside and outside of `jax.jit`, with the value and
    gradient of one device."""
    plan = rc.plan_shardings(MODEL, MESH, fn=fn, args=(BATCH, KEY))
    plan.verify(fn, MODEL, BATCH, KEY, tolerance=1e-5)
    constrained, gradient = plan.constrain(fn), eqx.filter_value_and_grad
    before = eqx.filter_jit(gradient(constrained))(MODEL, BATCH, KEY)
    after = gradient(eqx.filter_jit(constrained))(MODEL, BATCH, KEY)
    for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert np.isfinite(x).all()
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(constrained(MODEL, BATCH, KEY), before[0], rtol=1e-5)


@pytest.mark.thorough
def test_a_loss_may_name_its_mesh_itself_and_be_verified():
    """A constraint with the run's devices in it means nothing on one device."""
    rows = NamedSharding(MESH, P("data"))

    def loss_fn(model, batch, key):
        return noisy(model, jax.lax.with_sharding_constraint(batch, rows), key)

    plan = rc.plan_shardings(MODEL, MESH, fn=loss_fn, args=(BATCH, KEY))
    plan.verify(loss_fn, MODEL, BATCH, KEY, tolerance=1e-5)


@pytest.mark.thorough
def test_under_an_ambient_mesh():
    with jax.set_mesh(MESH):
        fit(bare, mesh=None, plan="verify")
