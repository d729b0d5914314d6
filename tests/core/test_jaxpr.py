"""Reading and evaluating jaxprs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import redcoast as rc
from redcoast.core._frames import own_line
from redcoast.core._jaxpr import bind_again, evaluate_jaxpr, iter_equations, multiply_adds

X = jnp.arange(3.0)


def test_evaluate_computes_the_function_and_forgets_what_is_not_needed():
    def fn(x):
        y = jnp.sin(x) * 2.0
        return y + x, 1.0

    jaxpr = jax.make_jaxpr(fn)(X).jaxpr
    env = {jaxpr.invars[0]: X}
    actual = evaluate_jaxpr(
        jaxpr, env, lambda _, equation, operands: bind_again(equation, operands)
    )
    for a, b in zip(actual, fn(X), strict=True):
        np.testing.assert_array_equal(a, b)
    assert list(env) == jaxpr.outvars[:1]


def test_evaluate_with_other_values():
    """The number of operations that each output depends on."""
    jaxpr = jax.make_jaxpr(lambda x: (jnp.sin(jnp.cos(x)) + 1.0, x))(X).jaxpr
    depth = lambda _, equation, operands: [max(operands) + 1] * len(equation.outvars)
    assert evaluate_jaxpr(jaxpr, {jaxpr.invars[0]: 0}, depth, lambda literal: 0) == [3, 0]


def test_equations_inside_others():
    inner = lambda c, x: (jnp.sin(c) + x, None)
    fn = lambda x: jax.lax.scan(inner, x, jnp.stack([x, x]))[0]
    jaxpr = jax.make_jaxpr(fn)(X).jaxpr
    names = lambda **skip: {one.primitive.name for one in iter_equations(jaxpr, **skip)}
    assert {"scan", "sin"} <= names()
    assert "sin" not in names(skip=lambda equation: equation.primitive.name == "scan")


@pytest.mark.parametrize(
    ("fn", "shapes", "count"),
    [
        (jnp.dot, [(4, 5), (5, 6)], 4 * 5 * 6),
        (lambda x, k: jnp.convolve(x, k, mode="valid"), [(8,), (3,)], 6 * 3),
        (jnp.add, [(4,), (4,)], None),
    ],
)
def test_multiply_adds(fn, shapes, count):
    jaxpr = jax.make_jaxpr(fn)(*map(jnp.ones, shapes)).jaxpr
    actual = [multiply_adds(one) for one in iter_equations(jaxpr)]
    assert next((one for one in actual if one is not None), None) == count


def test_equations_of_a_compiled_function_have_the_line_of_its_call():
    """As `jnp.take`, whose own equations have frames of JAX alone."""

    def look_up(table, rows):
        return jnp.take(table, rows, axis=0)

    table, rows = np.ones((64, 8), np.float32), np.zeros(8, np.int32)
    plan = rc.plan_shardings(table, rc.make_mesh(), fn=look_up, args=(rows,))
    (call,) = jax.make_jaxpr(look_up)(table, rows).eqns
    constrained = jax.make_jaxpr(plan.constrain(look_up))(table, rows)
    (gather,) = [x for x in iter_equations(constrained) if x.primitive.name == "gather"]
    line = own_line(call.source_info.traceback)
    assert line.startswith("test_jaxpr.py:")
    assert own_line(gather.source_info.traceback) == line
