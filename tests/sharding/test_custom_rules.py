"""Derivative rules are traced as JAX does: for what is differentiated, with symbolic zeros."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_derivatives import SymbolicZero

import redcoast as rc
from redcoast.dryrun.hlo import collectives

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


@pytest.mark.thorough
def test_rules_learn_what_is_differentiated_and_which_results_are_used():
    # A function that cannot be constrained would warn.
    plan = rc.plan_shardings(WEIGHT, rc.make_mesh(fsdp=2, model=2), fn=loss_fn, args=(BATCH, None))
    place = lambda x: jax.device_put(x, jax.NamedSharding(plan.mesh, jax.P(("data", "fsdp"))))
    step = jax.jit(jax.value_and_grad(plan.constrain(loss_fn)))
    results = step(jax.device_put(WEIGHT, plan.shardings), place(BATCH), None)
    check_equal(results, jax.value_and_grad(loss_fn)(WEIGHT, BATCH, None))


def check_equal(results, expected):
    for x, y in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-5, atol=1e-6)


def in_scan(rule):
    """A loss with a function in the rematerialised iterations of a scan."""

    def loss_fn(params, batch, key):
        @jax.checkpoint
        def step(h, x):
            return h + jnp.tanh(rule(params["weight"], x)[0]), None

        return jnp.mean(jax.lax.scan(step, batch, jnp.tanh(jnp.stack([batch] * 3)))[0] ** 2)

    return loss_fn


def in_batches(rule):
    """A loss with a function for each example, in fewer batches than there are devices."""

    def loss_fn(params, batch, key):
        of_example = lambda x: rule(params["weight"], jnp.tanh(x)[None])[0][0]
        return jnp.mean(jax.lax.map(of_example, batch, batch_size=8) ** 2)

    return loss_fn


@pytest.mark.few("in_scan")
@pytest.mark.parametrize("around", [in_scan, in_batches])
def test_strict_rules_in_a_loop_are_those_of_each_device(around):
    """What is differentiated is known when the loop is: gradients are summed once, after it."""
    loss_fn, mesh = around(strict), rc.make_mesh()
    plan = rc.plan_shardings(WEIGHT, mesh, fn=loss_fn, args=(BATCH, None))
    assert not plan.report.program.waiting
    rows = jax.device_put(BATCH, jax.NamedSharding(mesh, jax.P("data")))
    step = jax.jit(jax.value_and_grad(plan.constrain(loss_fn))).lower(WEIGHT, rows, None).compile()
    assert all(sent.count == 1 for sent in collectives(step.as_text(), mesh))
    check_equal(step(WEIGHT, rows, None), jax.value_and_grad(loss_fn)(WEIGHT, BATCH, None))


def with_rule(pull):
    """A product whose derivative rule maps its cotangent by `pull` first."""
    product = jax.custom_vjp(lambda weight, x: (x @ weight, jnp.sum(x)))

    def backward(residuals, cotangents):
        weight, x = residuals
        of_product = pull(cotangents[0])
        return x.T @ of_product, of_product @ weight.T

    product.defvjp(lambda weight, x: (product(weight, x), (weight, x)), backward)
    return product


@pytest.mark.thorough
def test_the_plan_names_a_rule_that_combines_examples():
    loss_fn = in_scan(with_rule(lambda x: x - jnp.mean(x, axis=0, keepdims=True)))
    plan = rc.plan_shardings(WEIGHT, rc.make_mesh(), fn=loss_fn, args=(BATCH, None))
    (sentence,) = plan.report.program.waiting
    assert "devices sum gradients in every iteration, because `sub` is applied to a sum" in sentence
    plan.verify(loss_fn, WEIGHT, BATCH, tolerance=1e-5)


@jax.custom_jvp
def scaled_tanh(x, scale):
    return scale * jnp.tanh(x)


def scaled_tanh_rule(primals, tangents):
    (x, scale), (of_x, of_scale) = primals, tangents
    if not isinstance(of_scale, SymbolicZero):
        raise ValueError("There is no derivative with respect to `scale`.")
    return scaled_tanh(x, scale), scale * of_x / jnp.cosh(x) ** 2


scaled_tanh.defjvp(scaled_tanh_rule, symbolic_zeros=True)


@pytest.mark.thorough
def test_a_forward_rule_may_refuse_what_is_not_differentiated():
    """It is traced for what is, so that the loop runs on each device."""
    loss_fn = in_scan(lambda weight, x: (scaled_tanh(x @ weight, jnp.float32(2.0)),))
    plan = rc.plan_shardings(WEIGHT, rc.make_mesh(), fn=loss_fn, args=(BATCH, None))
    assert not plan.report.program.waiting
    plan.verify(loss_fn, WEIGHT, BATCH, tolerance=1e-5)


def test_the_plan_names_the_error_of_a_forward_rule():
    function = jax.custom_jvp(jnp.tanh)

    @function.defjvp
    def rule(primals, tangents):
        raise RuntimeError("This rule is not written yet.")

    loss_fn = in_scan(lambda weight, x: (function(x @ weight),))
    plan = rc.plan_shardings(WEIGHT, rc.make_mesh(), fn=loss_fn, args=(BATCH, None))
    (sentence,) = plan.report.program.waiting
    assert "`RuntimeError: This rule is not written yet`" in sentence
    with pytest.raises(RuntimeError, match="not written yet"):
        jax.grad(plan.constrain(loss_fn))(WEIGHT, BATCH, None)


@pytest.mark.few("in_scan")
@pytest.mark.parametrize("around", [in_scan, in_batches])
def test_the_plan_names_the_error_of_a_rule(around):
    """The error itself is raised when the rule is needed, as without a mesh."""

    def wrong(x):
        raise RuntimeError("This rule is not written yet.")

    loss_fn = around(with_rule(wrong))
    plan = rc.plan_shardings(WEIGHT, rc.make_mesh(), fn=loss_fn, args=(BATCH, None))
    (sentence,) = plan.report.program.waiting
    assert "`RuntimeError: This rule is not written yet`" in sentence
    with pytest.raises(RuntimeError, match="not written yet"):
        jax.grad(plan.constrain(loss_fn))(WEIGHT, BATCH, None)


@jax.custom_jvp
def activation(x):
    return jnp.tanh(x)


@activation.defjvp
def activation_rule(primals, tangents):
    y = activation(*primals)
    slope = jax.lax.with_sharding_constraint(1 - y**2, jax.P(("data", "fsdp")))
    return y, slope * tangents[0]


@pytest.mark.thorough
@pytest.mark.few("True")
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
    actual = jax.grad(jax.jit(plan.constrain(loss_fn)))(WEIGHT, BATCH, None)
    with jax.set_mesh(mesh):
        expected = jax.grad(loss_fn)(WEIGHT, BATCH, None)
    np.testing.assert_allclose(actual["weight"], expected["weight"], rtol=1e-5, atol=1e-7)
