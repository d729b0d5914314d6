"""Functions with derivatives of their own, whose rules are constrained as well.

The rules are functions that are known only when they are called, so each is traced then, and
followed from how its inputs are split.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params
from jax.sharding import PartitionSpec as P

from ...core._jaxpr import bind_again

CUSTOM = frozenset(["custom_jvp_call", "custom_vjp_call"])

# `local(fn, specs, *inputs)`: the leaves of `fn(*inputs)`, with what it computes constrained; the
# specs of the leaves, and their structure.
Local = Callable[..., tuple[list[Any], list[P], Any]]


def is_worth_it(jaxpr: Jaxpr, pinned: frozenset[str]) -> bool:
    """Whether anything inside would be constrained; most of these functions are activations."""
    return any(
        equation.primitive.name in pinned
        or any(is_worth_it(inner, pinned) for inner in jaxprs_in_params(equation.params))
        for equation in jaxpr.eqns
    )


def run_custom(
    equation: JaxprEqn,
    body: Callable[..., list[Any]],
    given: Sequence[Any],
    specs: Sequence[P],
    local: Local,
) -> list[Any]:
    """The function's results; `body` computes them, constrained, and `specs` are its inputs'."""
    original = lambda *inputs: bind_again(equation, inputs)
    if equation.primitive.name == "custom_jvp_call":
        run = jax.custom_jvp(lambda *inputs: list(body(*inputs)))
        run.defjvp(_jvp_rule(original, specs, local))
        return list(run(*given))
    run = jax.custom_vjp(lambda *inputs: list(body(*inputs)))
    run.defvjp(*_vjp_rules(original, specs, local))
    return list(run(*given))


def _jvp_rule(
    original: Callable[..., list[Any]], specs: Sequence[P], local: Local
) -> Callable[..., Any]:
    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        exact = [_is_exact(x) for x in primals]

        def push(*inputs: Any) -> tuple[list[Any], list[Any]]:
            ahead = iter(inputs[len(primals) :])
            moved = tuple(z if e else next(ahead) for z, e in zip(tangents, exact, strict=True))
            out, out_tangents = jax.jvp(original, inputs[: len(primals)], moved)
            return out, [
                None if _is_exact(x) else t for x, t in zip(out, out_tangents, strict=True)
            ]

        inexact = [(t, s) for t, s, e in zip(tangents, specs, exact, strict=True) if not e]
        inputs = [*primals, *(t for t, _ in inexact)]
        leaves, _, structure = local(push, [*specs, *(s for _, s in inexact)], *inputs)
        out, out_tangents = structure.unflatten(leaves)
        return out, [_zero(x) if t is None else t for x, t in zip(out, out_tangents, strict=True)]

    return rule


def _vjp_rules(
    original: Callable[..., list[Any]], specs: Sequence[P], local: Local
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    kept: list[P] = []

    def forward(*inputs: Any) -> tuple[list[Any], Any]:
        leaves, found, structure = local(lambda *xs: jax.vjp(original, *xs), specs, *inputs)
        kept[:] = found
        out, pull = structure.unflatten(leaves)
        return out, pull

    def backward(pull: Any, cotangents: list[Any]) -> tuple[Any, ...]:
        leaves, structure = jax.tree.flatten((cotangents, pull))

        def pull_back(*leaves: Any) -> list[Any]:
            cotangents, pull = structure.unflatten(leaves)
            return [None if is_float0(x) else x for x in pull(cotangents)]

        found, _, out = local(pull_back, kept, *leaves)
        return tuple(out.unflatten(found))

    return forward, backward


def _is_exact(x: Any) -> bool:
    return not jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def is_float0(x: Any) -> bool:
    """Whether this is the derivative of an array of integers."""
    return getattr(x, "dtype", None) == jax.dtypes.float0


def _zero(x: Any) -> Any:
    """The tangent of an array of integers."""
    return np.zeros(jnp.shape(x), jax.dtypes.float0)
