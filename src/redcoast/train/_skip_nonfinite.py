"""An update of the optimizer that keeps the old state where the gradients are not finite."""

from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, Var
from jaxtyping import Array, Bool, PyTree

from ..core._control_flow import AnyJaxpr, open_jaxpr
from ..core._jaxpr import bind_again, evaluate_jaxpr, initial_env, variables
from ..core._pytree import Arrays
from ._optimizer import differences


def guarded_update(
    update: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    grads: PyTree,
    opt_state: PyTree,
    finite: Bool[Array, ""],
) -> tuple[PyTree, PyTree]:
    """Calls `update(grads, opt_state)`, and keeps the old state unless `finite`.

    If the new or the old state were selected at the end, XLA would copy the state: it fuses the
    computation of the new moments with their users, such as the parameter update, and then has to
    keep the old moments although they are donated. Here, each new value is selected right after it
    is computed, and later operations use the selected value, so the state is overwritten in place.
    If `finite` is false, the updates have other values, but they are not applied.
    """
    closed, shapes = jax.make_jaxpr(update, return_shape=True)(grads, opt_state)
    old, structure = jax.tree.flatten(opt_state)
    new, new_structure = jax.tree.flatten(shapes[1])
    # A selection would broadcast arrays of other shapes.
    has_same_shapes = list(map(jnp.shape, new)) == list(map(jnp.shape, old))
    if new_structure != structure or not has_same_shapes:
        raise ValueError(
            "Each update of `optimizer` must return a state with the structure and the shapes of "
            f"the one before, but the new state {differences(opt_state, shapes[1])}. Create all of "
            "its arrays in `optimizer.init`."
        )
    outputs = _evaluate(closed, [*jax.tree.leaves(grads), *old], old, finite)
    count = len(outputs) - len(old)
    updates = jax.tree.structure(shapes[0]).unflatten(outputs[:count])
    return updates, structure.unflatten(outputs[count:])


def _evaluate(closed: AnyJaxpr, inputs: Arrays, old: Arrays, finite: Array) -> Arrays:
    """Evaluates a jaxpr whose last outputs replace `old`, each only if `finite`."""
    jaxpr = open_jaxpr(closed)
    first = len(jaxpr.outvars) - len(old)
    state_vars = jaxpr.outvars[first:]
    counts = Counter(variables(state_vars))
    computed: set[Var] = set()
    for equation in jaxpr.eqns:
        computed.update(equation.outvars)
    # A variable that is the new value of exactly one state leaf is selected where it is computed.
    replaces: dict[Var, PyTree] = {}
    for var, before in zip(state_vars, old, strict=True):
        if not isinstance(var, Literal) and counts[var] == 1 and var in computed:
            replaces[var] = before

    def handle(_: int, equation: JaxprEqn, operands: list[PyTree]) -> list[PyTree]:
        results = bind_again(equation, operands)
        for i, var in enumerate(equation.outvars):
            if var in replaces:
                results[i] = jnp.where(finite, results[i], replaces[var])
        return results

    outputs = evaluate_jaxpr(jaxpr, initial_env(closed, inputs), handle)
    for i, (var, before) in enumerate(zip(state_vars, old, strict=True), first):
        # It is a constant, an argument, or stands for several leaves.
        if isinstance(var, Literal) or var not in replaces:
            outputs[i] = jnp.where(finite, outputs[i], before)
    return outputs
