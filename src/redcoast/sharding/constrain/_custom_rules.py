"""Constrains functions with custom derivatives, together with their derivative rules.

A rule is not part of the jaxpr. It is traced when it is called, and constrained by the shardings of
its inputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import JaxprEqn
from jax.interpreters import ad
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
        # So that the rule learns which inputs are differentiated: it may refuse others, as those of
        # Equinox do.
        run.defvjp(*_vjp_rules(original, specs, run_local), symbolic_zeros=True)
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

    def forward(*primals: Any) -> tuple[list[Any], Any]:
        perturbed = [primal.perturbed for primal in primals]
        push = lambda *inputs: _partial_vjp(original, perturbed, inputs)
        leaves, found, structure = run_local(push, specs, *(primal.value for primal in primals))
        residual_specs[:] = found
        return structure.unflatten(leaves)

    def backward(pull: Any, cotangents: list[Any]) -> tuple[Any, ...]:
        zeros = [isinstance(x, SymbolicZero) for x in cotangents]
        nonzero = [x for x, zero in zip(cotangents, zeros, strict=True) if not zero]
        leaves, structure = jax.tree.flatten((nonzero, pull))

        def pull_back(*leaves: Any) -> list[Any]:
            nonzero, pull = structure.unflatten(leaves)
            # Of a result that is not used, the rule gets a symbolic zero too: it may need to know.
            given = iter(nonzero)
            pairs = zip(cotangents, zeros, strict=True)
            full = [ad.Zero(x.aval) if zero else next(given) for x, zero in pairs]
            return [None if is_float0(x) else x for x in pull(full)]

        of_results = zip(residual_specs, zeros, strict=False)
        specs = [spec for spec, zero in of_results if not zero] + residual_specs[len(zeros) :]
        found, _, out = run_local(pull_back, specs, *leaves)
        return tuple(out.unflatten(found))

    return forward, backward


def _partial_vjp(fn: Fn, perturbed: Sequence[bool], inputs: Sequence[Any]) -> tuple[list[Any], Any]:
    """The results of a function, and a PyTree that maps their cotangents to those of its inputs,
    which are None where an input is not perturbed."""

    def of_perturbed(*chosen: Any) -> list[Any]:
        waiting = iter(chosen)
        return fn(*(next(waiting) if yes else x for yes, x in zip(perturbed, inputs, strict=True)))

    chosen = (x for yes, x in zip(perturbed, inputs, strict=True) if yes)
    results, pull = jax.vjp(of_perturbed, *chosen)
    return results, jax.tree_util.Partial(_pull_back, _Flags(tuple(perturbed)), pull)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Flags:
    values: tuple[bool, ...]


def _pull_back(perturbed: _Flags, pull: Fn, cotangents: list[Any]) -> list[Any]:
    found = iter(pull(cotangents))
    return [next(found) if yes else None for yes in perturbed.values]


def _is_exact(x: Any) -> bool:
    return not jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def is_float0(x: Any) -> bool:
    """Whether this is the derivative of an integer array."""
    return getattr(x, "dtype", None) == jax.dtypes.float0
