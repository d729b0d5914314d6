"""Constrains functions with custom derivatives, together with their derivative rules.

A rule is not part of the jaxpr. It is traced when it is called, and constrained by the shardings of
its inputs.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import JaxprEqn
from jax.interpreters import ad
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from ...core._control_flow import CallKind
from ...core._jaxpr import bind_again, struct_of
from ...core._tracing import traced_over
from ..program._trace import Arrays

Fn = Callable[..., Any]
PullBack = Callable[[Arrays], Arrays]  # maps cotangents of results to those of operands
# `run_local(fn, specs, *inputs)` constrains `fn` by the specs of its inputs. It returns the leaves
# of `fn(*inputs)`, their specs, and their structure.
RunLocal = Callable[..., tuple[Arrays, list[P], Any]]


def run_custom(
    equation: JaxprEqn,
    kind: CallKind,
    body: Fn,
    inputs: Sequence[object],
    specs: Sequence[P],
    run_local: RunLocal,
) -> Arrays:
    """Runs a function with custom derivatives, with `body` as its constrained implementation.

    `kind` says which derivative it replaces. `specs` are the shardings of its inputs.
    """

    def original(*xs: object) -> Arrays:
        return bind_again(equation, xs)

    if kind is CallKind.CUSTOM_JVP:
        run = jax.custom_jvp(body)
        run.defjvp(_jvp_rule(original, specs, run_local))
    else:
        run = jax.custom_vjp(body)
        # So that the rule learns which inputs are differentiated: it may refuse others, as those of
        # Equinox do.
        results = list(map(struct_of, equation.outvars))
        run.defvjp(*_vjp_rules(original, results, specs, run_local), symbolic_zeros=True)
    return list(run(*inputs))


def _jvp_rule(original: Fn, specs: Sequence[P], run_local: RunLocal) -> Fn:
    def rule(primals: Sequence[object], tangents: Sequence[object]) -> tuple[Arrays, Arrays]:
        inexact = list(map(_is_inexact, primals))

        def push(*inputs: object) -> tuple[Arrays, Arrays]:
            primals_in, tangents_in = inputs[: len(inexact)], inputs[len(inexact) :]
            all_tangents = replace_chosen(tangents, inexact, tangents_in)
            out, out_tangents = jax.jvp(original, primals_in, tuple(all_tangents))
            # Tangents of integers are no arrays of JAX.
            out_tangents = list(out_tangents)
            for place, primal in enumerate(out):
                if not _is_inexact(primal):
                    out_tangents[place] = None
            return out, out_tangents

        # Integers have no tangent, so that only the others are constrained.
        moving = list(itertools.compress(tangents, inexact))
        moving_specs = list(itertools.compress(specs, inexact))
        leaves, _, structure = run_local(push, [*specs, *moving_specs], *primals, *moving)
        out, out_tangents = structure.unflatten(leaves)
        for place, tangent in enumerate(out_tangents):
            if tangent is None:
                out_tangents[place] = zero_tangent(out[place])
        return out, out_tangents

    return rule


def with_mesh_in_rule(equation: JaxprEqn, mesh: Mesh | AbstractMesh, inputs: Arrays) -> Arrays:
    """Runs a `custom_jvp` as it is. Its rule, which may be traced later, refers to a mesh."""
    run = jax.custom_jvp(lambda *xs: bind_again(equation, xs))

    def rule(primals: Sequence[object], tangents: Sequence[object]) -> tuple[Arrays, Arrays]:
        moving = [not isinstance(tangent, SymbolicZero) for tangent in tangents]
        with traced_over(mesh):
            return partial_jvp(equation, moving, primals, itertools.compress(tangents, moving))

    run.defjvp(rule, symbolic_zeros=True)
    return list(run(*inputs))


def replace_chosen(items: Sequence[object], chosen: Sequence[bool], by: Iterable[object]) -> Arrays:
    """The items, of which the chosen ones are replaced in order."""
    replaced = list(items)
    places = itertools.compress(range(len(items)), chosen)
    for place, item in zip(places, by, strict=True):
        replaced[place] = item
    return replaced


def zero_tangent(x: Any) -> np.ndarray:
    """The tangent of an integer array."""
    return np.zeros(jnp.shape(x), jax.dtypes.float0)


def run_or(
    local: Fn, whole: Fn, refusals: tuple[type[Exception], ...], inputs: Sequence[object]
) -> Arrays:
    """Runs `local`, or `whole` where the derivative of `local` raises one of `refusals`.

    What is differentiated is only known when it is.
    """

    def forward(*primals: Any) -> tuple[Arrays, PullBack]:
        perturbed = [primal.perturbed for primal in primals]
        inputs = [primal.value for primal in primals]
        try:
            return differentiate(local, perturbed, inputs)
        except refusals:
            return partial_vjp(whole, perturbed, inputs)

    def backward(pull: PullBack, cotangents: Arrays) -> tuple[Any, ...]:
        used = [not isinstance(x, SymbolicZero) for x in cotangents]
        structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in cotangents]
        nonzero = list(itertools.compress(cotangents, used))
        return tuple(pull_back(pull, structs, used, nonzero))

    run = jax.custom_vjp(local)
    run.defvjp(forward, backward, symbolic_zeros=True)
    return list(run(*inputs))


def _vjp_rules(
    original: Fn, results: Sequence[jax.ShapeDtypeStruct], specs: Sequence[P], run_local: RunLocal
) -> tuple[Fn, Fn]:
    residual_specs: list[P] = []  # of the results and residuals of the forward pass

    def forward(*primals: Any) -> tuple[Arrays, Fn]:
        perturbed = [primal.perturbed for primal in primals]
        inputs = [primal.value for primal in primals]

        def push(*inputs: object) -> tuple[Arrays, Fn]:
            return partial_vjp(original, perturbed, inputs)

        leaves, leaf_specs, structure = run_local(push, specs, *inputs)
        # The backward pass is traced later, with inputs that are sharded like these.
        residual_specs[:] = leaf_specs
        return structure.unflatten(leaves)

    def backward(pull: Fn, cotangents: Arrays) -> tuple[Any, ...]:
        used = [not isinstance(x, SymbolicZero) for x in cotangents]
        nonzero = list(itertools.compress(cotangents, used))
        leaves, structure = jax.tree.flatten((nonzero, pull))

        def pull_used(*leaves: object) -> Arrays:
            nonzero, pull = structure.unflatten(leaves)
            return pull_back(pull, results, used, nonzero)

        # The leaves of the forward pass are the results, and then the residuals in `pull`.
        result_specs, pull_specs = residual_specs[: len(used)], residual_specs[len(used) :]
        used_specs = list(itertools.compress(result_specs, used))
        out_leaves, _, out_structure = run_local(pull_used, [*used_specs, *pull_specs], *leaves)
        return tuple(out_structure.unflatten(out_leaves))

    return forward, backward


def partial_jvp(
    equation: JaxprEqn,
    moving: Sequence[bool],
    primals: Sequence[object],
    tangents: Iterable[object],
) -> tuple[Arrays, Arrays]:
    """The results of an equation and their tangents, from those of the operands that move."""

    def of_moving(*chosen: object) -> Arrays:
        return bind_again(equation, replace_chosen(primals, moving, chosen))

    return jax.jvp(of_moving, tuple(itertools.compress(primals, moving)), tuple(tangents))


def partial_vjp(fn: Fn, perturbed: Sequence[bool], inputs: Sequence[object]) -> tuple[Arrays, Fn]:
    """The results of a function, and a PyTree that maps their cotangents to those of its inputs,
    which are None where an input is not perturbed."""

    def of_perturbed(*chosen: object) -> Arrays:
        return fn(*replace_chosen(inputs, perturbed, chosen))

    results, pull = jax.vjp(of_perturbed, *itertools.compress(inputs, perturbed))
    return results, jax.tree_util.Partial(_PullBack(tuple(perturbed)), pull)


def differentiate(
    fn: Fn, perturbed: Sequence[bool], inputs: Sequence[object]
) -> tuple[Arrays, PullBack]:
    """`partial_vjp`, which raises the errors of the backward pass too."""
    results, pull = partial_vjp(fn, perturbed, inputs)
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results]
    used = list(map(_is_inexact, results))
    pull_used = lambda pull, cotangents: pull_back(pull, structs, used, cotangents)
    jax.eval_shape(pull_used, pull, list(itertools.compress(structs, used)))
    return results, pull


def pull_back(
    pull: PullBack,
    results: Sequence[jax.ShapeDtypeStruct],
    used: Sequence[bool],
    cotangents: Iterable[object],
) -> Arrays:
    """The cotangents of operands, or None, from those of the results that are used."""
    # Of a result that is not used, a rule gets a symbolic zero: it may need to know.
    zeros: list[object] = []
    for result in results:
        zeros.append(ad.Zero(ShapedArray(result.shape, result.dtype).to_tangent_aval()))
    pulled = pull(replace_chosen(zeros, used, cotangents))
    arrays: Arrays = []
    for x in pulled:
        if is_float0(x):  # of an integer
            x = None
        arrays.append(x)
    return arrays


# Not a closure: JAX compares the functions in PyTrees.
@dataclass(frozen=True)
class _PullBack:
    perturbed: tuple[bool, ...]

    def __call__(self, pull: Fn, cotangents: Arrays) -> Arrays:
        return replace_chosen([None] * len(self.perturbed), self.perturbed, pull(cotangents))


def _is_inexact(x: object) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def is_float0(x: object) -> bool:
    """Whether this is the derivative of an integer array."""
    return getattr(x, "dtype", None) == jax.dtypes.float0
