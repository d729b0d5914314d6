"""Neural ordinary differential equations (arXiv:1806.07366), with a scan and a while loop."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .case import Case
from .layers import make_arrays
from .learning import HIDDEN, WIDTH, mlp, mlp_shapes, regression_batch

STEPS = 8


def field(params: PyTree, y: jax.Array) -> jax.Array:
    return jnp.tanh(mlp(params, y))


def runge_kutta(slope: Any, y: PyTree, dt: Any) -> PyTree:
    """A step of the classical fourth-order Runge-Kutta method, on any tree."""

    def move(factor: Any, k: PyTree) -> PyTree:
        return jax.tree.map(lambda y, k: y + factor * k, y, k)

    k1 = slope(y)
    k2 = slope(move(dt / 2, k1))
    k3 = slope(move(dt / 2, k2))
    k4 = slope(move(dt, k3))
    mean = jax.tree.map(lambda a, b, c, d: (a + 2 * b + 2 * c + d) / 6, k1, k2, k3, k4)
    return move(dt, mean)


def solve_by_scan(params: PyTree, y: jax.Array) -> jax.Array:
    step = lambda y, _: (runge_kutta(ft.partial(field, params), y, 1 / STEPS), None)
    return jax.lax.scan(step, y, length=STEPS)[0]


def integrate(slope: Any, y: PyTree) -> PyTree:
    """Integrates from time 0 to 1 in a while loop, whose number of steps is not static."""
    dt = 1 / STEPS
    more = lambda carry: carry[0] < 1 - dt / 2
    step = lambda carry: (carry[0] + dt, runge_kutta(slope, carry[1], dt))
    return jax.lax.while_loop(more, step, (jnp.zeros(()), y))[1]


@jax.custom_vjp
def solve_by_while(params: PyTree, y: jax.Array) -> jax.Array:
    return integrate(ft.partial(field, params), y)


def solve_forward(params: PyTree, y: jax.Array) -> PyTree:
    end = solve_by_while(params, y)
    return end, (params, end)


def solve_backward(saved: PyTree, cotangent: jax.Array) -> PyTree:
    """The adjoint equation, solved backwards together with the state."""
    params, end = saved

    def slope(state: PyTree) -> Any:
        y, adjoint, _ = state
        value, pull = jax.vjp(field, params, y)
        grads, back = pull(adjoint)
        return -value, back, grads

    zeros = jax.tree.map(jnp.zeros_like, params)
    _, adjoint, grads = integrate(slope, (end, cotangent, zeros))
    return grads, adjoint


solve_by_while.defvjp(solve_forward, solve_backward)


def loss(params: PyTree, batch: PyTree, key: jax.Array, *, solve: Any) -> jax.Array:
    return jnp.mean((solve(params, batch["x"]) - batch["y"]) ** 2)


def case(name: str, solve: Any) -> Case:
    init = ft.partial(make_arrays, shapes=mlp_shapes(WIDTH, HIDDEN, WIDTH))
    batch = ft.partial(regression_batch, 256)
    return Case(name, "other", init, ft.partial(loss, solve=solve), batch)


ODES = [case("neural ODE, scan", solve_by_scan), case("neural ODE, while", solve_by_while)]
