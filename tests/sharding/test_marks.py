"""Nothing is recognised by a name that a user can choose."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import redcoast as rc
from redcoast.core._control_flow import open_jaxpr
from redcoast.core._jaxpr import iter_equations
from redcoast.core._markers import gather_sequence, gathered_dimension, is_most, most_of_rows

X = jnp.arange(12.0).reshape(4, 3)


def equation_of(fn, *args):
    return open_jaxpr(jax.make_jaxpr(fn)(*args)).eqns[-1]


def marks_most(fn, *args):
    return any(map(is_most, iter_equations(jax.make_jaxpr(fn)(*args))))


def test_marks_are_seen_under_vmap_and_change_no_gradient():
    assert gathered_dimension(equation_of(gather_sequence, X)) == 1
    assert gathered_dimension(equation_of(jax.vmap(gather_sequence), X)) == 1
    assert marks_most(most_of_rows, X)
    np.testing.assert_array_equal(jax.jit(gather_sequence)(X), X)
    np.testing.assert_array_equal(most_of_rows(X), jnp.max(X))
    grad = jax.grad(lambda x: jnp.sum(jax.checkpoint(gather_sequence)(x) ** 2))(X)
    np.testing.assert_array_equal(grad, 2 * X)


def gather_sequence_of_mine():
    def gather_sequence(x):
        return jnp.tanh(3.0 * x)

    return jax.jit(gather_sequence)


def most_of_rows_of_mine():
    def most_of_rows(x):
        return jnp.mean(x)

    return jax.jit(most_of_rows)


@pytest.mark.few("most_of_rows")
@pytest.mark.parametrize("fn", [gather_sequence_of_mine(), most_of_rows_of_mine()])
def test_functions_with_the_names_of_marks_are_run(fn):
    assert gathered_dimension(equation_of(fn, X)) is None
    assert not marks_most(fn, X)
    mesh = rc.make_mesh(data=2, model=4)
    model = eqx.nn.MLP(8, 8, 64, 1, key=jax.random.key(0))
    batch = jax.random.normal(jax.random.key(1), (16, 8))
    loss_fn = lambda model, batch, key: jnp.mean(fn(jax.vmap(model)(batch)) ** 2)
    plan = rc.plan_shardings(model, mesh, fn=loss_fn, args=(batch, None))
    errors = plan.verify(loss_fn, model, batch, None)
    assert max(errors.values()) < 1e-5


def test_a_dict_with_the_names_of_a_state_is_a_model():
    model = {"w": jnp.ones((64, 256)), "v": jnp.ones((256, 64))}
    tree = {"model": model, "opt_state": {"m": jnp.ones((64, 256))}}
    mesh = rc.make_mesh(data=2, model=4)

    def loss_fn(tree, batch, key):
        hidden = jax.nn.relu(batch @ (tree["model"]["w"] + tree["opt_state"]["m"]))
        return jnp.mean((hidden @ tree["model"]["v"]) ** 2)

    plan = rc.plan_shardings(tree, mesh, fn=loss_fn, args=(jnp.ones((32, 64)), None))
    specs = jax.tree.map(lambda sharding: sharding.spec, plan.shardings)
    assert specs["opt_state"]["m"] == specs["model"]["w"] == jax.P(None, "model")
    structural = rc.infer_shardings(tree, mesh)
    assert jax.tree.structure(structural) == jax.tree.structure(tree)
