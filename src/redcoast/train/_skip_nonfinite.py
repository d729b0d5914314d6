from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal
from jaxtyping import Array, Bool, PyTree

from ..core._jaxpr import bind_again


def guarded_update(
    update: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    grads: PyTree,
    opt_state: PyTree,
    finite: Bool[Array, ""],
) -> tuple[PyTree, PyTree]:
    """`update(grads, opt_state)`, in which the state only moves on if `finite`.

    The obvious way, to select between the new and the old state afterwards, makes the compiler
    copy the state: what else uses the new moments (the step of the parameters) is fused with their
    computation from the old ones, which must then be kept although they are donated. Here, each
    new value is selected as soon as it is computed, and all that follows uses the selected one, so
    that the state is overwritten in place. The updates differ where `finite` is false, but there
    they are not applied.
    """
    closed, shapes = jax.make_jaxpr(update, return_shape=True)(grads, opt_state)
    old, structure = jax.tree.flatten(opt_state)
    inputs = [*jax.tree.leaves(grads), *old]
    outputs = _evaluate(closed, inputs, old, finite)
    updates_structure = jax.tree.structure(shapes[0])
    if jax.tree.structure(shapes[1]) != structure:
        raise ValueError(
            "The optimizer returned a state of another structure than the one it was given: "
            f"{jax.tree.structure(shapes[1])} instead of {structure}."
        )
    split = len(outputs) - len(old)
    return updates_structure.unflatten(outputs[:split]), structure.unflatten(outputs[split:])


def _evaluate(closed: ClosedJaxpr, inputs: list[Any], old: list[Any], finite: Array) -> list[Any]:
    """Runs a program whose last outputs replace `old`, each only if `finite`."""
    jaxpr = closed.jaxpr
    state_vars = jaxpr.outvars[len(jaxpr.outvars) - len(old) :]
    counts = Counter(var for var in state_vars if not isinstance(var, Literal))
    once = [(v, o) for v, o in zip(state_vars, old, strict=True) if not isinstance(v, Literal)]
    replaces = {v: o for v, o in once if counts[v] == 1}
    values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values |= dict(zip(jaxpr.invars, inputs, strict=True))
    read = lambda var: var.val if isinstance(var, Literal) else values[var]
    selected = set()
    for equation in jaxpr.eqns:
        results = bind_again(equation, list(map(read, equation.invars)))
        for var, value in zip(equation.outvars, results, strict=True):
            if var in replaces:
                value = jnp.where(finite, value, replaces[var])
                selected.add(var)
            values[var] = value
    updates = list(map(read, jaxpr.outvars[: len(jaxpr.outvars) - len(old)]))
    return updates + [
        jnp.where(finite, read(var), before)
        if isinstance(var, Literal) or var not in selected
        else read(var)
        for var, before in zip(state_vars, old, strict=True)
    ]
