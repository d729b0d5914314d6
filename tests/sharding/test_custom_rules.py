"""Derivative rules are traced as JAX does: for what is differentiated, with symbolic zeros."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_derivatives import SymbolicZero

import redcoast as rc

WEIGHT = {"weight": jax.random.normal(jax.random.key(0), (64, 64)) / 8}
BATCH = jax.random.normal(jax.random.key(1), (16, 64))


@jax.custom_vjp
def strict(weight, x):
    """A product, and an auxiliary result, with rules that refuse what they need not know."""
    return x @ weight, jnp.sum(x)


def forward(weight, x):
    if not weight.perturbed or x.perturbed:
        raise TypeError("The rule is for the derivative of the weight alone.")
    return strict(weight.value, x.value), x.value


def backward(x, cotangents):
    product, total = cotangents
    if not isinstance(total, SymbolicZero):
        raise TypeError("The auxiliary result is not used.")
    return x.T @ product, jnp.zeros_like(x)


strict.defvjp(forward, backward, symbolic_zeros=True)


def loss_fn(params, batch, key):
    product, _ = strict(params["weight"], jnp.tanh(batch))
    return jnp.mean(product**2)


def test_rules_learn_what_is_differentiated_and_which_results_are_used():
    # A function that cannot be constrained would warn.
    plan = rc.plan_shardings(WEIGHT, rc.make_mesh(fsdp=2, model=2), fn=loss_fn, args=(BATCH, None))
    place = lambda x: jax.device_put(x, jax.NamedSharding(plan.mesh, jax.P(("data", "fsdp"))))
    step = jax.jit(jax.value_and_grad(plan.constrain(loss_fn)))
    found = step(jax.device_put(WEIGHT, plan.shardings), place(BATCH), None)
    expected = jax.value_and_grad(loss_fn)(WEIGHT, BATCH, None)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-5, atol=1e-6)


@jax.custom_jvp
def activation(x):
    return jnp.tanh(x)


@activation.defjvp
def activation_rule(primals, tangents):
    y = activation(*primals)
    slope = jax.lax.with_sharding_constraint(1 - y**2, jax.P(("data", "fsdp")))
    return y, slope * tangents[0]


@pytest.mark.parametrize("scanned", [False, True])
def test_rules_that_are_traced_later_may_name_axes_of_the_mesh(scanned):
    """`jax.grad` of a compiled function traces them after the plan's function has returned."""

    def loss_fn(params, batch, key):
        layer = lambda x, _: (activation(x @ params["weight"]), None)
        if scanned:
            return jnp.mean(jax.lax.scan(layer, batch, length=3)[0] ** 2)
        return jnp.mean(layer(batch, None)[0] ** 2)

    mesh = rc.make_mesh(fsdp=2, model=2)
    plan = rc.plan_shardings(WEIGHT, mesh, fn=loss_fn, args=(BATCH, None))
    found = jax.grad(jax.jit(plan.constrain(loss_fn)))(WEIGHT, BATCH, None)
    with jax.set_mesh(mesh):
        expected = jax.grad(loss_fn)(WEIGHT, BATCH, None)
    np.testing.assert_allclose(found["weight"], expected["weight"], rtol=1e-5, atol=1e-7)
