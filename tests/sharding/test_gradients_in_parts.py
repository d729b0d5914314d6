"""Gradients of arrays that some of the devices of the batch store in parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharding_helpers import array, real_mesh

import redcoast as rc
from redcoast.core._jaxpr import iter_equations, struct_of

SHAPE = (64, 256)
MODEL = {"up": array(*SHAPE), "down": array(*SHAPE[::-1])}
BATCH = array(32, 64)


def loss_fn(model, batch, key):
    return jnp.mean((jnp.tanh(batch @ model["up"]) @ model["down"]) ** 2)


def constrained(sizes):
    mesh = real_mesh(*sizes)
    plan = rc.plan_shardings(MODEL, mesh, fn=loss_fn, args=(BATCH, None))
    return plan, plan.constrain(loss_fn)


@pytest.mark.parametrize(("sizes", "wholes"), [((2, 4, 1), 1), ((1, 8, 1), 2)])
def test_a_gradient_is_constrained_to_the_parts_that_are_stored(sizes, wholes):
    """Compilers for accelerators all-reduce one that is constrained as a whole over all devices:
    of 4.2 MB on data 2 x fsdp 4 each sends 7.3 MB, and 4.2 MB for the parts."""
    plan, fn = constrained(sizes)
    specs: list[P] = []
    for equation in iter_equations(jax.make_jaxpr(jax.grad(fn))(MODEL, BATCH, None)):
        is_constraint = equation.primitive.name == "sharding_constraint"
        if is_constraint and struct_of(equation.outvars[0]).shape == SHAPE:
            specs.append(equation.params["sharding"].spec)
    assert specs.count(P(None, None)) == wholes  # the gather, and the cotangent or not
    assert set(specs) == {P(None, None), plan.shardings["up"].spec}


def test_such_gradients_are_those_of_one_device_under_transformations():
    plan, fn = constrained((2, 4, 1))
    rng = np.random.default_rng(0)
    draw = lambda x: jnp.asarray(rng.normal(size=x.shape) / 8, x.dtype)
    model, direction = jax.tree.map(draw, (MODEL, MODEL))
    batches = draw(array(2, *BATCH.shape))

    def curvatures(fn, model, batches):
        """For each batch, the gradient and its derivative in a direction."""
        of_batch = lambda batch: jax.jvp(
            lambda model: jax.grad(fn)(model, batch, None), (model,), (direction,)
        )
        return jax.vmap(of_batch)(batches)

    placed = jax.device_put(model, plan.shardings)
    rows = NamedSharding(plan.mesh, P(None, ("data", "fsdp")))
    actual = jax.jit(lambda *args: curvatures(fn, *args))(placed, jax.device_put(batches, rows))
    expected = jax.jit(lambda *args: curvatures(loss_fn, *args))(model, batches)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)
    assert max(plan.verify(loss_fn, model, batches[0], None).values()) < 1e-5
