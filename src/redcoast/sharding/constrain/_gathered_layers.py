"""Loops over FSDP-sharded layers, which gather a layer again in the backward pass.

A loop keeps what its derivative reads, for all iterations. The derivative of a product reads the
gathered weights, so that each device would keep all layers as they are gathered.
"""

import itertools
from collections.abc import Sequence

import jax
from jax.extend.core import Literal, Var, jaxpr_as_fun

from ...core._control_flow import (
    Call,
    CallKind,
    Scan,
    close_jaxpr,
    consts_of,
    control_flow,
    open_jaxpr,
)
from ...core._jaxpr import iter_equations, struct_of, variables
from ..operations._rule import shape_of
from ..operations._rule_table import LARGE_OPERATIONS
from ..program._remat import Computation, KeepAllBut, gather_of, recomputes_little
from ..program._walk import Scope

# As JAX shows the effects of `jax.debug.print`, which a policy can keep.
_PRINTS = {"Debug", "OrderedDebug"}


def gather_again(scope: Scope, stored: Sequence[bool], shards: int) -> KeepAllBut | None:
    """The policy of the body of a loop for its gathered weights; None if it has none of them.

    `stored` selects the inputs of the body that are sharded in storage. `shards` are those of the
    batch, of which each may have its own copy of a weight.
    """
    # JAX refuses other effects in a `jax.checkpoint`.
    if not _PRINTS.issuperset(map(str, scope.jaxpr.effects)):
        return None
    operations: set[Computation] = set()
    _add_operations_on_weights(scope, stored, shards, operations)
    if not operations:
        return None
    # This policy would keep what a `jax.checkpoint` in the body recomputes.
    for equation in iter_equations(scope.jaxpr):
        flow = control_flow(equation)
        if isinstance(flow, Call) and flow.kind is CallKind.REMAT:
            recomputed = _cheap_operations(flow)
            if recomputed is None:
                return None
            operations |= recomputed
    return KeepAllBut(frozenset(operations))


def _cheap_operations(region: Call) -> set[Computation] | None:
    """The operations of a rematerialised region, and those that its derivative adds.

    None if other operations of the loop, of the same shapes, would cost more to compute again.
    """
    if not recomputes_little(region):
        return None
    jaxpr = open_jaxpr(region.jaxpr)
    run = jaxpr_as_fun(close_jaxpr(jaxpr, consts_of(region.jaxpr)))
    traced = jax.make_jaxpr(lambda *inputs: jax.linearize(run, *inputs)[0])(
        *map(struct_of, jaxpr.invars)
    )
    operations: set[Computation] = set()
    for equation in iter_equations(open_jaxpr(traced)):
        operations.add((equation.primitive.name, tuple(map(shape_of, equation.invars))))
    return operations


def _add_operations_on_weights(
    scope: Scope, stored: Sequence[bool], shards: int, operations: set[Computation]
) -> None:
    """Adds the gathers of weights, and what casts and rearranges them before they are used."""
    weights: set[Var] = set(itertools.compress(scope.jaxpr.invars, stored))
    for weight in weights:
        operations.add(gather_of(shape_of(weight)))
    for index, equation in enumerate(scope.jaxpr.eqns):
        flow, inner = control_flow(equation), scope.inner.get(index, [])
        read = set(variables(equation.invars))
        is_call = isinstance(flow, Call) and not flow.has_derivative
        # Layers in groups are a loop in a loop.
        if inner and (is_call or isinstance(flow, Scan)):
            passed = [not isinstance(x, Literal) and x in weights for x in equation.invars]
            _add_operations_on_weights(inner[0], passed, shards, operations)
            if isinstance(flow, Scan):
                # What a loop closes over is gathered before it, and perhaps copied.
                for weight in weights.intersection(equation.invars[: flow.consts]):
                    shape = shape_of(weight)
                    operations.add(("broadcast_in_dim", (shape,)))
                    operations.add(gather_of((shards, *shape)))
        # A product with other weights takes time, and is kept.
        elif flow is None and equation.primitive.name not in LARGE_OPERATIONS and read <= weights:
            weights.update(equation.outvars)
            operations.add((equation.primitive.name, tuple(map(shape_of, equation.invars))))
