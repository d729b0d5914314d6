"""What of a program is needed for some of its results, or again for its derivatives."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, jaxprs_in_params

CHECKPOINTS = frozenset(["checkpoint", "remat", "remat2"])
# Derivatives of these need none of the numbers that they are given, but for indices and masks.
_LINEAR = frozenset(
    """
    add add_any broadcast_in_dim complex concatenate conj convert_element_type copy copy_p cumsum
    device_put dynamic_slice dynamic_update_slice expand_dims gather imag name neg
    optimization_barrier pad psum psum_invariant pvary real reduce_precision reduce_sum reshape rev
    scatter-add scatter_add select_n sharding_constraint slice split squeeze stack stop_gradient
    sub tile transpose unstack
    """.split()  # noqa: SIM905
)
# Derivatives of these need an operand where a gradient flows into the other one.
_PRODUCTS = frozenset(["conv_general_dilated", "dot_general", "mul", "ragged_dot"])
_CUSTOM = frozenset(["custom_jvp_call", "custom_vjp_call"])


@dataclass(frozen=True)
class Region:
    """A part of a program, or all of it, as one of the programs inside of it sees it.

    `wanted` says which results are needed. Of a rematerialised region these are those that are
    needed once more; with `derived`, so are the numbers that its derivatives need, unless a region
    further inside provides for them. What the region's `policy` keeps is not computed again.
    """

    wanted: tuple[bool, ...]
    derived: bool = False
    policy: Any = None

    def keeps(self, equation: JaxprEqn) -> bool:
        if self.policy is None:
            return False
        avals = [atom.aval for atom in equation.invars]
        found = self.policy(equation.primitive, *avals, **equation.params)
        return found is not False and type(found).__name__ != "RecomputeType"


@dataclass(frozen=True)
class Needed:
    """What of a program is needed, or computed again.

    `places` are those of equations, `inner` the programs that each of them calls, as they see the
    region, and `inputs` says which inputs of the program are needed for it.
    """

    places: frozenset[int]
    inner: dict[int, dict[Jaxpr, Region]]
    inputs: tuple[bool, ...]


def find_needed(jaxpr: Jaxpr, region: Region, grads: Sequence[bool]) -> Needed:
    """What of a program a region needs; `grads` says into which inputs gradients flow."""
    varying = _varying(jaxpr, grads) if region.derived else set()
    needed = {
        atom
        for atom, wanted in zip(jaxpr.outvars, region.wanted, strict=True)
        if wanted and not isinstance(atom, Literal)
    }
    places, inner = set(), {}
    for place, equation in reversed(list(enumerate(jaxpr.eqns))):
        moves = [not isinstance(atom, Literal) and atom in varying for atom in equation.invars]
        derived = region.derived and any(var in varying for var in equation.outvars)
        if derived and not _forgets(equation):
            needed.update(equation.outvars)
        outs = tuple(var in needed and not region.keeps(equation) for var in equation.outvars)
        seen = Region(outs, derived, region.policy)
        inner[place], operands = _called(equation, seen, moves)
        if any(outs):
            places.add(place)
        if derived:
            operands = [a or b for a, b in zip(operands, _derived(equation, moves), strict=True)]
        needed.update(
            atom
            for atom, need in zip(equation.invars, operands, strict=True)
            if need and not isinstance(atom, Literal)
        )
    return Needed(frozenset(places), inner, tuple(var in needed for var in jaxpr.invars))


def _varying(jaxpr: Jaxpr, grads: Sequence[bool]) -> set[Any]:
    """The variables into which a gradient flows."""
    found = {var for var, grad in zip(jaxpr.invars, grads, strict=True) if grad}
    for equation in jaxpr.eqns:
        inputs = (atom for atom in equation.invars if not isinstance(atom, Literal))
        if equation.primitive.name != "stop_gradient" and not found.isdisjoint(inputs):
            found.update(var for var in equation.outvars if _is_inexact(var))
    return found


def _is_inexact(atom: Any) -> bool:
    return jnp.issubdtype(getattr(atom.aval, "dtype", jnp.int32), jnp.inexact)


def _forgets(equation: JaxprEqn) -> bool:
    """Whether no derivative needs its results."""
    name = equation.primitive.name
    calls = name not in _CUSTOM and next(iter(jaxprs_in_params(equation.params)), None) is not None
    return name in _LINEAR or name in _PRODUCTS or calls


def _derived(equation: JaxprEqn, moves: Sequence[bool]) -> list[bool]:
    """Which operands the derivative of an equation needs, where it calls no program for it."""
    name = equation.primitive.name
    if name in _LINEAR:
        return [not _is_inexact(atom) for atom in equation.invars]
    if name in _PRODUCTS:
        return [any(moves[:i]) or any(moves[i + 1 :]) for i in range(len(moves))]
    calls = _forgets(equation) and name not in CHECKPOINTS
    return [not calls] * len(moves)


def _called(
    equation: JaxprEqn, region: Region, moves: Sequence[bool]
) -> tuple[dict[Jaxpr, Region], list[bool]]:
    """The programs that an equation calls, as they see the region, and its operands needed."""
    name, params = equation.primitive.name, equation.params
    programs = list(jaxprs_in_params(params))
    every = [any(region.wanted) or (region.derived and bool(programs))] * len(moves)
    if name == "scan":
        body = programs[0]
        seen, found = _loop(body, region, params["num_carry"], params["num_consts"], moves)
        return {body: seen}, list(found.inputs)
    if name == "cond":
        seen = dict.fromkeys(programs, region)
        each = [find_needed(one, region, moves[1:]) for one in programs]
        needed = [any(each) for each in zip(*(one.inputs for one in each), strict=True)]
        return seen, [any(needed) or any(region.wanted) or region.derived, *needed]
    if len(programs) == 1 and len(programs[0].invars) == len(moves) and name not in _CUSTOM:
        # A region further inside keeps its operands, and provides for its derivatives.
        if name in CHECKPOINTS:
            region = replace(region, derived=False)
        return {programs[0]: region}, list(find_needed(programs[0], region, moves).inputs)
    # All of it, or nothing.
    whole = lambda one: Region((any(region.wanted),) * len(one.outvars), region.derived, None)
    return {one: whole(one) for one in programs}, every


def _loop(
    body: Jaxpr, region: Region, carries: int, consts: int, moves: Sequence[bool]
) -> tuple[Region, Needed]:
    """What is wanted of a carry's results is what is wanted of it in the next iteration, too."""
    split = consts + carries
    grads = [*moves[:consts], *[any(moves)] * carries, *moves[split:]]
    while True:
        found = find_needed(body, region, grads)
        asked = (*found.inputs[consts:split], *[False] * (len(region.wanted) - carries))
        wanted = tuple(a or b for a, b in zip(region.wanted, asked, strict=True))
        if wanted == region.wanted:
            return region, found
        region = replace(region, wanted=wanted)
