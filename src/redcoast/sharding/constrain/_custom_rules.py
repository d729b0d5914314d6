"""Constrains functions with custom derivatives, together with their derivative rules.

A rule is not part of the jaxpr. It is traced when it is called, and constrained by the shardings of
its inputs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
from jax.sharding import PartitionSpec as P

from ...core._control_flow import CallKind
from ...core._jaxpr import bind_again

Fn = Callable[..., Any]
# `run_local(fn, specs, *inputs)` constrains `fn` by the specs of its inputs. It returns the leaves
# of `fn(*inputs)`, their specs, and their structure.
RunLocal = Callable[..., tuple[list[Any], list[P], Any]]


def run_custom(
    equation: JaxprEqn,
    kind: CallKind,
    body: Fn,
    inputs: Sequence[Any],
    specs: Sequence[P],
    run_local: RunLocal,
) -> list[Any]:
    """Runs a function with custom derivatives, with `body` as its constrained implementation.

    `kind` says which derivative it replaces. `specs` are the shardings of its inputs.
    """
    original = lambda *xs: bind_again(equation, xs)
    if kind is CallKind.CUSTOM_JVP:
        run = jax.custom_jvp(body)
        run.defjvp(_jvp_rule(original, specs, run_local))
    else:
        run = jax.custom_vjp(body)
        run.defvjp(*_vjp_rules(original, specs, run_local))
    return list(run(*inputs))


def _jvp_rule(original: Fn, specs: Sequence[P], run_local: RunLocal) -> Fn:
    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        exact = [_is_exact(x) for x in primals]

        def push(*inputs: Any) -> tuple[list[Any], list[Any]]:
            pushed = iter(inputs[len(primals) :])
            given = tuple(z if e else next(pushed) for z, e in zip(tangents, exact, strict=True))
            out, out_tangents = jax.jvp(original, inputs[: len(primals)], given)
            return out, [
                None if _is_exact(x) else t for x, t in zip(out, out_tangents, strict=True)
            ]

        inexact = [(t, s) for t, s, e in zip(tangents, specs, exact, strict=True) if not e]
        inputs = [*primals, *(t for t, _ in inexact)]
        leaves, _, structure = run_local(push, [*specs, *(s for _, s in inexact)], *inputs)
        out, out_tangents = structure.unflatten(leaves)
        zero = lambda x: np.zeros(jnp.shape(x), jax.dtypes.float0)  # of an integer array
        return out, [zero(x) if t is None else t for x, t in zip(out, out_tangents, strict=True)]

    return rule


def _vjp_rules(original: Fn, specs: Sequence[P], run_local: RunLocal) -> tuple[Fn, Fn]:
    residual_specs: list[P] = []  # of the results and residuals of the forward pass

    def forward(*inputs: Any) -> tuple[list[Any], Any]:
        leaves, found, structure = run_local(lambda *xs: jax.vjp(original, *xs), specs, *inputs)
        residual_specs[:] = found
        return structure.unflatten(leaves)

    def backward(pull: Any, cotangents: list[Any]) -> tuple[Any, ...]:
        leaves, structure = jax.tree.flatten((cotangents, pull))

        def pull_back(*leaves: Any) -> list[Any]:
            cotangents, pull = structure.unflatten(leaves)
            return [None if is_float0(x) else x for x in pull(cotangents)]

        found, _, out = run_local(pull_back, residual_specs, *leaves)
        return tuple(out.unflatten(found))

    return forward, backward


def _is_exact(x: Any) -> bool:
    return not jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def is_float0(x: Any) -> bool:
    """Whether this is the derivative of an integer array."""
    return getattr(x, "dtype", None) == jax.dtypes.float0
