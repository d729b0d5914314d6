"""Which equations of a jaxpr are needed: for its results, for the gradient of the first one, and by
rematerialisation, which runs some of them again."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from operator import or_
from typing import Any

import jax.numpy as jnp
from jax.core import AbstractValue, ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive, Var

from ...core._control_flow import (
    Call,
    CallKind,
    Cond,
    Manual,
    Scan,
    control_flow,
    inner_jaxprs,
    open_jaxpr,
    policy_keeps,
    saves,
)
from ...core._jaxpr import is_inexact, iter_equations, variables
from ..operations import fixed_operands, is_linear, rule_of, stops_gradient
from ..operations._rule_table import LARGE_OPERATIONS

# The name of a primitive, and the shapes of its operands.
Computation = tuple[str, tuple[tuple[int, ...], ...]]
# What gathers an array that is sharded in storage. Policies know it by its name.
_CONSTRAINT = Primitive("sharding_constraint")


@dataclass(frozen=True)
class KeepAllBut:
    """A policy of `jax.checkpoint` that keeps the results of all operations but these."""

    recomputed: frozenset[Computation]

    def __call__(self, primitive: Primitive, *operands: AbstractValue, **params: object) -> bool:
        shapes = tuple(getattr(operand, "shape", ()) for operand in operands)
        return (primitive.name, shapes) not in self.recomputed


def gather_of(shape: tuple[int, ...]) -> Computation:
    """The gather of an array with a constraint of its sharding."""
    return _CONSTRAINT.name, (shape,)


def keeps_gathers(region: Call) -> bool:
    """Whether the policy of a rematerialised region keeps the arrays that are gathered in it."""
    policy = region.policy
    return policy is not None and policy_keeps(policy(_CONSTRAINT, ShapedArray((), jnp.float32)))


def recomputes_little(region: Call) -> bool:
    """Whether a rematerialised region keeps nothing, and has neither products nor loops."""
    for equation in iter_equations(open_jaxpr(region.jaxpr)):
        flow = control_flow(equation)
        is_call = isinstance(flow, Call) and flow.kind in (CallKind.PLAIN, CallKind.CUSTOM_JVP)
        if equation.primitive.name in LARGE_OPERATIONS or not (flow is None or is_call):
            return False
        if region.policy is not None and saves(region.policy, equation):
            return False
    return True


@dataclass(frozen=True)
class Region:
    """What one use of a jaxpr needs: its results, or what rematerialisation recomputes of it.

    `wanted` selects the results that are needed. With `derived`, so are the values that its
    derivatives need, except in rematerialised regions inside it. Values that the rematerialisation
    `policy` saves are not recomputed. If it is `differentiated`, only what a gradient flows into is
    needed, so nothing that `stop_gradient` alone reads.
    """

    wanted: tuple[bool, ...]
    derived: bool = False
    policy: Any = None
    differentiated: bool = False

    def keeps(self, equation: JaxprEqn) -> bool:
        """Whether the policy saves the results of an equation."""
        if self.policy is None:
            return False
        if saves(self.policy, equation):
            return True
        # It saves those of a function with a derivative rule by the names that all of them have.
        flow = control_flow(equation)
        if not isinstance(flow, Call) or flow.kind is not CallKind.CUSTOM_JVP:
            return False
        body = open_jaxpr(flow.jaxpr)
        saved: set[Var] = set()
        for inner in body.eqns:
            if inner.primitive.name == "name" and saves(self.policy, inner):
                saved.update(inner.outvars)
        return all(isinstance(atom, Var) and atom in saved for atom in body.outvars)


@dataclass(frozen=True)
class Needed:
    """The equations and inputs of a jaxpr that a region needs.

    `equations` are indices of equations. `inner` has, by the index of an equation, the region of
    each jaxpr that it calls. `inputs` selects the inputs that are needed.
    """

    equations: frozenset[int]
    inner: dict[int, dict[Jaxpr, Region]]
    inputs: tuple[bool, ...]


def find_needed(jaxpr: Jaxpr, region: Region, grads: Sequence[bool]) -> Needed:
    """Finds what a region needs of a jaxpr; `grads` selects inputs into which gradients flow."""
    with_grad: set[Var] = set()  # the variables into which a gradient flows
    if region.derived:
        with_grad.update(compress(jaxpr.invars, grads))
        for equation in jaxpr.eqns:
            inputs = variables(equation.invars)
            if not (stops_gradient(equation) or with_grad.isdisjoint(inputs)):
                with_grad.update(var for var in equation.outvars if is_inexact(var.aval))
    needed = set(variables(compress(jaxpr.outvars, region.wanted)))
    equations: set[int] = set()
    inner: dict[int, dict[Jaxpr, Region]] = {}
    # Backwards: what an equation has to compute is known after all that use its results.
    for index, equation in reversed(list(enumerate(jaxpr.eqns))):
        has_grad = [not isinstance(atom, Literal) and atom in with_grad for atom in equation.invars]
        derived = not with_grad.isdisjoint(equation.outvars)
        of_derivative = [False] * len(has_grad)
        if derived:
            needs_results, of_derivative = _for_derivative(equation, has_grad)
            if needs_results:
                needed.update(equation.outvars)  # as the derivative of `exp` does
        outs = (False,) * len(equation.outvars)  # saved ones need not be computed
        if not region.keeps(equation):
            outs = tuple(var in needed for var in equation.outvars)
        inside = replace(region, wanted=outs, derived=derived)
        inner[index], operands = _called(equation, inside, has_grad)
        if any(outs):
            equations.add(index)
        # Its operands have a value, but no gradient, as those of `argmax`.
        has_tangent = any(is_inexact(var.aval) for var in equation.outvars)
        if region.differentiated and (stops_gradient(equation) or not has_tangent):
            continue
        needed.update(variables(compress(equation.invars, map(or_, operands, of_derivative))))
    return Needed(frozenset(equations), inner, tuple(var in needed for var in jaxpr.invars))


def _for_derivative(equation: JaxprEqn, has_grad: Sequence[bool]) -> tuple[bool, list[bool]]:
    """Whether the derivative of an equation needs its results, and which operands it needs, beside
    what the jaxprs in it need."""
    rule, flow = rule_of(equation), control_flow(equation)
    if rule is not None and is_linear(rule, has_grad):
        return False, fixed_operands(rule, has_grad)
    has_own = isinstance(flow, Call) and flow.has_derivative
    # Its derivative is that of the jaxprs in it.
    is_inside = not has_own and len(inner_jaxprs(equation)) > 0
    is_remat = isinstance(flow, Call) and flow.kind is CallKind.REMAT
    needs_all = not is_inside or is_remat
    return not is_inside, [needs_all] * len(has_grad)


def _called(
    equation: JaxprEqn, region: Region, has_grad: Sequence[bool]
) -> tuple[dict[Jaxpr, Region], list[bool]]:
    """The region of each jaxpr that an equation calls, and which operands of it are needed."""
    match control_flow(equation):
        case Scan() as scan:
            body = open_jaxpr(scan.body)
            body_region, needed_of_body = _scan(scan, body, region, has_grad)
            return {body: body_region}, list(needed_of_body.inputs)
        case Cond() as cond:
            jaxprs = list(map(open_jaxpr, cond.branches))
            needed = [False] * len(has_grad[1:])
            for jaxpr in jaxprs:
                of_branch = find_needed(jaxpr, region, has_grad[1:])
                needed = list(map(or_, needed, of_branch.inputs))
            index = any(needed) or any(region.wanted) or region.derived
            return dict.fromkeys(jaxprs, region), [index, *needed]
        case Call() as call if not call.has_derivative:
            body = open_jaxpr(call.jaxpr)
            # A rematerialised region keeps its operands and recomputes what its derivatives need.
            if call.kind is CallKind.REMAT:
                region = replace(region, derived=False)
            return {body: region}, list(find_needed(body, region, has_grad).inputs)
        case Manual() as manual:
            body = open_jaxpr(manual.body)
            return {body: region}, list(find_needed(body, region, has_grad).inputs)
    # All operands and results are needed, or none.
    wanted = any(region.wanted)
    regions: dict[Jaxpr, Region] = {}
    for jaxpr in inner_jaxprs(equation):
        all_wanted = (wanted,) * len(jaxpr.outvars)
        regions[jaxpr] = replace(region, wanted=all_wanted, policy=None)
    needed = wanted or (region.derived and bool(regions))
    return regions, [needed] * len(has_grad)


def _scan(
    scan: Scan, body: Jaxpr, region: Region, has_grad: Sequence[bool]
) -> tuple[Region, Needed]:
    """The region of the body: what the next iteration needs of the carry is wanted of this one."""
    consts, carry, xs = scan.split(has_grad)
    grads = [*consts, *[any(has_grad)] * len(carry), *xs]
    # What a later iteration needs of the carry, an earlier one has to compute.
    while True:
        needed_of_body = find_needed(body, region, grads)
        _, needed, _ = scan.split(needed_of_body.inputs)
        wanted = (*map(or_, region.wanted, needed), *region.wanted[len(carry) :])
        if wanted == region.wanted:
            return region, needed_of_body
        region = replace(region, wanted=wanted)
