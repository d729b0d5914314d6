"""Arrays that a function closes over are counted, listed and computed split."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sharding_helpers import real_mesh

import redcoast as rc

WIDTH = 512
TEACHER = eqx.nn.MLP(16, 16, WIDTH, depth=2, key=jax.random.key(0))
BYTES = sum(x.nbytes for x in jax.tree.leaves(eqx.filter(TEACHER, eqx.is_array)))
STUDENT = eqx.nn.MLP(16, 16, 16, depth=1, key=jax.random.key(1))
# Three examples divide over nothing, so that only what is computed with can be split.
FEW = np.random.default_rng(0).normal(size=(3, 16)).astype(np.float32)
MESH = rc.make_mesh(model=8)


def distance(student, teacher, batch):
    return jnp.mean((jax.vmap(student)(batch) - jax.vmap(teacher)(batch)) ** 2)


def closing(model, batch, key):
    return distance(model, TEACHER, batch)


@jax.jit
def taught(batch):
    return jax.vmap(TEACHER)(batch)


def closing_inside(model, batch, key):
    """The teacher stands in a compiled function, and in a loop."""
    _, outputs = jax.lax.scan(lambda c, x: (c, taught(x[None])[0]), 0, batch)
    return jnp.mean((jax.vmap(model)(batch) - outputs) ** 2) + jnp.mean(taught(batch) ** 2)


def planned(fn, mesh=MESH, batch=FEW):
    return rc.plan_shardings(STUDENT, mesh, fn=fn, args=(batch, None))


@pytest.mark.parametrize("fn", [closing, closing_inside])
def test_they_are_listed_once_and_counted_in_memory(fn):
    plan = planned(fn)
    (actual,) = plan.report.program.closed_over
    assert (actual.shape, actual.dtype) == ((WIDTH, WIDTH), "float32")
    assert actual.bytes == 4 * WIDTH**2
    assert plan.report.program.memory.closed_over == BYTES
    assert plan.report.program.memory.total > BYTES
    text = " ".join(plan.table().split())
    assert "closes over an array of 1.05 MB: float32[512,512] (1.05 MB" in text
    assert "trainable" in text


def test_an_array_in_the_model_is_none_of_them():
    both = {"student": STUDENT, "teacher": TEACHER}
    fn = lambda model, batch, key: distance(model["student"], model["teacher"], batch)
    frozen = {"student": eqx.is_inexact_array, "teacher": False}
    plan = rc.plan_shardings(both, MESH, fn=fn, args=(FEW, None), trainable=frozen)
    assert plan.report.program.closed_over == ()
    assert plan.report.program.memory.closed_over == 0
    assert "closes over" not in plan.table()


def test_small_ones_are_counted_only():
    mask = np.ones((16, 16), np.float32)
    fn = lambda model, batch, key: jnp.mean(jax.vmap(model)(batch) @ mask)
    plan = planned(fn)
    assert plan.report.program.closed_over == ()
    assert plan.report.program.memory.closed_over == mask.nbytes


@pytest.mark.thorough
@pytest.mark.parametrize("fn", [closing, closing_inside])
def test_they_are_computed_split(fn):
    """By each device its part, in the plan and in the program, with the gradients of one device."""
    plan = planned(fn)
    assert plan.report.program.closed_over[0].axes == ("model",)
    counted = plan.report.program.arithmetic
    assert counted.per_device < 0.3 * counted.flops
    grads = lambda fn: jax.jit(lambda a, b: eqx.filter_grad(fn)(eqx.combine(a, STUDENT), b, None))
    arrays = eqx.filter(STUDENT, eqx.is_array)
    inputs = jax.device_put(arrays, plan.shardings), FEW
    compiled = lambda fn: grads(fn).lower(*inputs).compile()
    flops = lambda fn: (compiled(fn).cost_analysis() or {})["flops"]
    assert flops(plan.constrain(fn)) < 0.5 * flops(fn)
    plan.verify(fn, STUDENT, FEW, tolerance=1e-5)


@pytest.mark.thorough
def test_the_plan_of_another_function_is_no_hindrance():
    """`constrain` takes functions that close over other arrays, or none."""
    plan = planned(closing)
    predict = lambda model, batch, key: jax.vmap(model)(batch)
    other = lambda model, batch, key: taught(predict(model, batch, key))
    for fn in (predict, other):
        actual = eqx.filter_jit(plan.constrain(fn))(STUDENT, FEW, None)
        np.testing.assert_allclose(actual, fn(STUDENT, FEW, None), rtol=1e-5, atol=1e-6)


def test_in_a_saved_plan(tmp_path):
    plan = planned(closing)
    rc.save_plan(plan, tmp_path / "plan.json")
    read = rc.load_plan(tmp_path / "plan.json", STUDENT, MESH)
    assert read.compute == plan.compute
    assert hash(read.constrain(closing)) == hash(plan.constrain(closing))


@pytest.mark.thorough
def test_a_teacher_in_the_model_trains_the_same_student():
    """What the plan says to do instead, on a mesh, against the loss that closes over it."""
    rows = list(np.random.default_rng(1).normal(size=(32, 16)).astype(np.float32))
    mesh = real_mesh(2, 1, 4)

    def trained(loss_fn, model, **options):
        fit = rc.fit(
            model,
            optax.sgd(0.1),
            rows,
            collate_fn=np.stack,
            loss_fn=loss_fn,
            batch_size=16,
            steps=2,
            mesh=mesh,
            log=False,
            **options,
        )
        return fit.model

    expected = trained(closing, STUDENT)
    both = {"student": STUDENT, "teacher": TEACHER}
    loss_fn = lambda model, batch, key: distance(model["student"], model["teacher"], batch)
    actual = trained(loss_fn, both, trainable={"student": True, "teacher": False})
    pairs = (jax.tree.leaves(eqx.filter(x, eqx.is_array)) for x in (expected, actual["student"]))
    for one, other in zip(*pairs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert not actual["teacher"].layers[1].weight.sharding.is_fully_replicated
