"""Loops, branches and calls, read from the equations of any version of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive

from redcoast import UnsupportedJaxVersion
from redcoast.core._control_flow import (
    Call,
    CallKind,
    Cond,
    LinearSolve,
    Manual,
    Scan,
    While,
    consts_of,
    control_flow,
    inner_jaxprs,
    open_jaxpr,
    primitive_name,
    replace_parameters,
    saves,
)
from redcoast.core._jaxpr import bind_again, iter_equations
from redcoast.core._versions import versions_tested

X = jnp.arange(3.0)


def equation_of(fn, *args):
    return open_jaxpr(jax.make_jaxpr(fn)(*args)).eqns[-1]


def scan_of(x, tree):
    body = lambda carry, x: ((carry[0] * tree["a"][0], carry[1] + 1), {"y": x["a"], "z": carry})
    return jax.lax.scan(body, (x, 0), tree, reverse=True, unroll=2)


def test_scan():
    tree = {"a": X, "b": {"c": X, "d": X}}
    equation = equation_of(scan_of, X, tree)
    scan = control_flow(equation)
    assert isinstance(scan, Scan)
    assert (scan.length, scan.reverse, scan.unroll) == (3, True, 2)
    consts, carry, xs = scan.split(equation.invars)
    assert [len(carry), len(xs)] == [2, 3]
    assert len(consts) == scan.consts
    assert len(open_jaxpr(scan.body).invars) == len(equation.invars)


def test_while():
    fn = lambda x, y: jax.lax.while_loop(lambda c: c[0] < y[0], lambda c: c + y + x, x)
    equation = equation_of(fn, X, X)
    loop = control_flow(equation)
    assert isinstance(loop, While)
    assert [len(part) for part in loop.split(equation.invars)] == [1, 2, 1]
    assert len(open_jaxpr(loop.cond).outvars) == 1


def test_cond():
    cond = control_flow(equation_of(lambda i, x: jax.lax.switch(i, [jnp.sin, jnp.cos], x), 1, X))
    assert isinstance(cond, Cond)
    names = [open_jaxpr(branch).eqns[0].primitive.name for branch in cond.branches]
    assert names == ["sin", "cos"]


def test_linear_solve():
    solve = lambda matvec, x: x / matvec(jnp.ones_like(x))
    fn = lambda d, x: jax.lax.custom_linear_solve(lambda y: d * y, x, solve, symmetric=True)
    equation = equation_of(fn, X + 1, X)
    flow = control_flow(equation)
    assert isinstance(flow, LinearSolve)
    assert len(flow.places) == len(open_jaxpr(flow.solve).invars)
    assert flow.places[-1] == len(equation.invars) - 1  # the right side


def test_shard_map():
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = jax.P("a")
    fn = jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec)
    flow = control_flow(equation_of(fn, jnp.ones(8)))
    assert isinstance(flow, Manual)
    assert flow.axes == {"a"}


with_jvp = jax.custom_jvp(jnp.sin)
with_jvp.defjvp(lambda primals, tangents: (jnp.sin(*primals), 2 * tangents[0]))
with_vjp = jax.custom_vjp(jnp.sin)
with_vjp.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (3 * g,))
policy = jax.checkpoint_policies.save_only_these_names("kept")
CALLS = {
    CallKind.PLAIN: jax.jit(jnp.sin),
    CallKind.REMAT: jax.checkpoint(jnp.sin, policy=policy, prevent_cse=False),
    CallKind.CUSTOM_JVP: with_jvp,
    CallKind.CUSTOM_VJP: with_vjp,
}


@pytest.mark.parametrize("kind", CALLS)
def test_calls(kind):
    equation = equation_of(CALLS[kind], X)
    call = control_flow(equation)
    assert isinstance(call, Call)
    assert call.kind is kind
    assert call.has_derivative == (kind in (CallKind.CUSTOM_JVP, CallKind.CUSTOM_VJP))
    assert open_jaxpr(call.jaxpr) in inner_jaxprs(equation)
    assert "sin" in [inner.primitive.name for inner in iter_equations(call.jaxpr)]
    np.testing.assert_array_equal(bind_again(equation, [X])[0], jnp.sin(X))
    if kind is CallKind.REMAT:
        assert (call.policy, call.prevent_cse) == (policy, False)


def test_operations_are_no_control_flow():
    assert control_flow(equation_of(jnp.sin, X)) is None


@pytest.mark.parametrize(
    ("fn", "contained"),
    [
        (lambda x: jnp.searchsorted(x, x), None),
        (
            lambda x: jax.lax.custom_root(
                lambda y: 2 * y - jnp.sin(x),
                x,
                lambda f, guess: guess - f(guess) / 2,
                lambda g, y: y / g(jnp.ones_like(y)),
            ),
            "sub",
        ),
    ],
)
def test_operations_of_libraries_are_read_as_what_they_stand_for(fn, contained):
    equation = equation_of(fn, X)
    call = control_flow(equation)
    assert isinstance(call, Call)
    inner = open_jaxpr(call.jaxpr)
    assert len(inner.invars) == len(equation.invars)
    assert contained in {None, *(one.primitive.name for one in iter_equations(inner))}
    again = control_flow(equation)
    assert isinstance(again, Call)
    assert again.jaxpr is call.jaxpr  # one jaxpr for all readers


def test_names_of_values_are_known_to_policies():
    for name in ("kept", "other"):
        equation = equation_of(lambda x, name=name: checkpoint_name(x, name), X)
        assert primitive_name(equation) == "name"
        assert saves(policy, equation) == (name == "kept")
    assert saves(jax.checkpoint_policies.dots_saveable, equation_of(jnp.dot, X, X))
    assert not saves(jax.checkpoint_policies.dots_saveable, equation_of(jnp.sin, X))


def test_jaxprs_inside_of_equations_are_replaced():
    seen = []
    replace = lambda param: seen.append(param) or param
    equation = replace_parameters(equation_of(CALLS[CallKind.REMAT], X), replace)
    assert any(hasattr(param, "eqns") for param in seen)
    np.testing.assert_array_equal(bind_again(equation, [X])[0], jnp.sin(X))


def test_constants():
    # A large array that a program closes over is a constant.
    jaxpr = jax.make_jaxpr(jax.jit(lambda x: x + X))(X)
    shapes = {np.shape(value) for value in consts_of(jaxpr)}
    assert shapes <= {(3,)}
    assert len(consts_of(jaxpr)) == len(open_jaxpr(jaxpr).constvars)


@pytest.mark.parametrize("name", ["scan", "while", "cond", "checkpoint", "custom_vjp_call"])
def test_unknown_layouts_are_reported_with_versions(name):
    scan = equation_of(lambda x: jax.lax.scan(lambda c, y: (c, y), 1.0, x), X)

    equation = scan.replace(primitive=Primitive(name), params={"of_the_future": 1})
    with pytest.raises(
        UnsupportedJaxVersion, match=rf"`{name}` by the parameters of_the_future"
    ) as caught:
        control_flow(equation)
    message = str(caught.value)
    assert jax.__version__ in message
    assert versions_tested("jax") in message
