"""Arrays that a plan keeps in the memory of the host, such as the state of an optimizer.

Compilers copy such arrays to the device as early as they can, some of them before the backward
pass, when most memory is in use, and copy all of them back at the end. What an update computes
element by element with stacks of layers is therefore a loop here, in which one layer after another
is copied to the device, updated and copied back.
"""

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.tree_util import KeyPath
from jaxtyping import Array, PyTree

from ..core._control_flow import Call, CallKind, control_flow, open_jaxpr
from ..core._jaxpr import (
    bind_again,
    evaluate_equations,
    evaluate_inlined,
    evaluate_jaxpr,
    initial_env,
    struct_of,
    variables,
)
from ..core._pytree import abstract_array
from ..core._stored_specs import spec_of

# Stacks of more are no layers, but rows of a table.
_MOST_LAYERS = 256
# Elements of a layer of at least two dimensions. TPUs do not copy a layer of smaller ones, which is
# not contiguous in the memory of the host, and all layers of these take little memory.
_LEAST_SIZE = 2**20


def update_on_device(
    update: Callable[[PyTree], tuple[PyTree, PyTree]], opt_state: PyTree
) -> tuple[PyTree, PyTree]:
    """Calls `update(opt_state)`, which returns parameters and the new state, with arrays on the
    device in place of those in the memory of the host.

    Stacks of layers, as many as most of the state has, are updated one layer after another, and
    returned in the memory of the host.
    """
    leaves = jax.tree_util.tree_leaves_with_path(opt_state)
    old, structure = jax.tree.flatten(opt_state)
    if not any(map(_is_on_host, old)):
        return update(opt_state)
    types = list(map(abstract_array, old))
    flat_update = lambda *leaves: update(structure.unflatten(leaves))
    traced, output = jax.make_jaxpr(flat_update, return_shape=True)(*types)
    # Without calls of elementwise functions, whose equations may be a part of the loop.
    inlined = lambda *inputs: evaluate_inlined(traced, inputs, _is_elementwise)
    program = jax.make_jaxpr(inlined)(*types)
    jaxpr = open_jaxpr(program)
    env = initial_env(program, old)
    on_host: set[Var] = set()  # of the new state
    for var, x in zip(jaxpr.outvars[-len(old) :], old, strict=True):
        if _is_on_host(x):
            on_host.update(variables([var]))
    stacks: dict[Var, Array] = {}
    for var, (path, x) in zip(jaxpr.invars, leaves, strict=True):
        if _is_stack_on_host(path, x):
            stacks[var] = x
    loop = _find_loop(jaxpr, stacks)
    if loop is None:
        results = evaluate_jaxpr(jaxpr, env, _on_device)
    else:
        before, after = loop.around(jaxpr)
        # What the loop and the equations after it read of the results of those before it.
        operands = [*loop.shared, *loop.stacks, *_read_by(after), *variables(jaxpr.outvars)]
        computed_later = {*_results(after), *loop.computed}
        operands = [var for var in dict.fromkeys(operands) if var not in computed_later]
        values = evaluate_equations(before, operands, env, _on_device)
        env = dict(zip(operands, values, strict=True))
        env.update(loop.run(env, on_host))
        results = evaluate_equations(after, jaxpr.outvars, env, _on_device)
    # An optimizer may return the parameters as a part of its state, too.
    of_params = len(results) - len(old)
    results[:of_params] = map(_copy_to_device, results[:of_params])
    return jax.tree.unflatten(jax.tree.structure(output), results)


def _is_elementwise(call: Call) -> bool:
    if call.kind is not CallKind.PLAIN:
        return False
    for equation in open_jaxpr(call.jaxpr).eqns:
        inner = control_flow(equation)
        if isinstance(inner, Call):
            is_elementwise = _is_elementwise(inner)
        else:
            is_elementwise = _keeps_elements_apart(equation)
        if not is_elementwise:
            return False
    return True


def _keeps_elements_apart(equation: JaxprEqn) -> bool:
    """Whether an element of the result depends on that element of the operands, and on scalars."""
    from ..sharding.operations._elementwise_rules import ELEMENTWISE

    name = equation.primitive.name
    if name == "broadcast_in_dim":
        return struct_of(equation.invars[0]).shape == ()
    if name not in ELEMENTWISE or not equation.outvars:  # such as a debugging print
        return False
    shape = struct_of(equation.outvars[0]).shape
    atoms = (*equation.invars, *equation.outvars)
    return all(struct_of(atom).shape in ((), shape) for atom in atoms)


@dataclass(frozen=True)
class _Loop:
    """The equations of a program that are run for one layer after another.

    They read `stacks` of layers and `shared` scalars, and return what is `computed`.
    """

    equations: list[JaxprEqn]
    shared: list[Var]
    stacks: list[Var]
    computed: list[Var]

    def around(self, jaxpr: Jaxpr) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
        """The equations that need nothing of the loop, and those that do."""
        inside = set(map(id, self.equations))
        before: list[JaxprEqn] = []
        after: list[JaxprEqn] = []
        of_loop = set(self.computed)
        for equation in jaxpr.eqns:
            if id(equation) in inside:
                continue
            if of_loop.isdisjoint(variables(equation.invars)):
                before.append(equation)
            else:
                after.append(equation)
                of_loop.update(equation.outvars)
        return before, after

    def run(self, env: Mapping[Var, PyTree], on_host: set[Var]) -> dict[Var, PyTree]:
        """The values of what is computed; those in `on_host` are in the memory of the host."""

        def body(carry: None, layers: list[PyTree]) -> tuple[None, list[PyTree]]:
            values = {var: _copy_to_device(env[var]) for var in self.shared}
            values.update(zip(self.stacks, map(_copy_to_device, layers), strict=True))
            results = evaluate_equations(self.equations, self.computed, values, _of_layer)
            places: list[PyTree] = []
            for var, x in zip(self.computed, results, strict=True):
                if var in on_host:
                    x = jax.device_put(x, jax.memory.Space.Host)
                places.append(x)
            return carry, places

        _, values = jax.lax.scan(body, None, [env[var] for var in self.stacks])
        return dict(zip(self.computed, values, strict=True))


def _is_stack_on_host(path: KeyPath, x: PyTree) -> bool:
    """Whether an array of the state is a stack of large layers, which devices have whole layers
    of."""
    if not _is_on_host(x) or x.ndim < 3 or not 1 < x.shape[0] <= _MOST_LAYERS:
        return False
    spec = spec_of(path, x)
    return x.size >= _LEAST_SIZE * x.shape[0] and (not spec or spec[0] is None)


def _find_loop(jaxpr: Jaxpr, of_state: Mapping[Var, Array]) -> _Loop | None:
    """The equations that are computed element by element with stacks in the memory of the host."""
    sizes: Counter[int] = Counter()  # elements by the number of layers
    for x in of_state.values():
        sizes[x.shape[0]] += x.size
    if not sizes:
        return None
    # One loop has one length: that of the stacks with the most elements.
    layers = max(sizes, key=sizes.__getitem__)
    stacked = {var for var, x in of_state.items() if x.shape[0] == layers}
    chosen: dict[int, JaxprEqn] = {}
    # An equation belongs to the loop if one of its stacks does, and all of its stacks then do.
    size = 0
    while size < len(stacked):
        size = len(stacked)
        for equation in jaxpr.eqns:
            atoms = variables((*equation.invars, *equation.outvars))
            stacks = {x for x in atoms if struct_of(x).shape}
            if not stacked.isdisjoint(stacks) and _keeps_elements_apart(equation):
                chosen[id(equation)] = equation
                stacked |= stacks
    while chosen:
        loop = _loop_of(jaxpr, chosen)
        _, after = loop.around(jaxpr)
        late = set(_results(after)).intersection((*loop.shared, *loop.stacks))
        if not late:
            return loop
        # What depends on all layers, such as their norm, is known before the first is updated.
        for equation in reversed(jaxpr.eqns):
            if not late.isdisjoint(equation.outvars):
                late.update(variables(equation.invars))
                chosen.pop(id(equation), None)
    return None


def _loop_of(jaxpr: Jaxpr, chosen: Container[int]) -> _Loop:
    """The equations of a program whose `id`s are chosen, as a loop."""
    equations = [equation for equation in jaxpr.eqns if id(equation) in chosen]
    others = [equation for equation in jaxpr.eqns if id(equation) not in chosen]
    inside = set(_results(equations))
    used = {*_read_by(others), *variables(jaxpr.outvars)}
    shared: list[Var] = []
    stacks: list[Var] = []
    for var in dict.fromkeys(_read_by(equations)):
        if var in inside:
            continue
        if struct_of(var).shape:
            stacks.append(var)
        else:
            shared.append(var)
    return _Loop(equations, shared, stacks, [var for var in _results(equations) if var in used])


def _read_by(equations: Sequence[JaxprEqn]) -> list[Var]:
    read: list[Var] = []
    for equation in equations:
        read += variables(equation.invars)
    return read


def _results(equations: Sequence[JaxprEqn]) -> list[Var]:
    results: list[Var] = []
    for equation in equations:
        results += equation.outvars
    return results


def _on_device(_: int, equation: JaxprEqn, operands: list[PyTree]) -> Sequence[PyTree]:
    return bind_again(equation, list(map(_copy_to_device, operands)))


def _of_layer(_: int, equation: JaxprEqn, operands: list[PyTree]) -> Sequence[PyTree]:
    """The results of an equation on stacks, for one layer."""
    if equation.primitive.name == "broadcast_in_dim":
        return [jnp.broadcast_to(operands[0], equation.params["shape"][1:])]
    return bind_again(equation, operands)


def where_they_were(tree: PyTree, before: PyTree) -> PyTree:
    """A tree whose arrays are in the memory of the host where those of a like tree are."""
    if not any(map(_is_on_host, jax.tree.leaves(before))):
        return tree
    return jax.tree.map(_copy_to_same, tree, before)


def _copy_to_device(x: PyTree) -> PyTree:
    if _is_on_host(x):
        return jax.device_put(x, jax.memory.Space.Device)
    return x


def _copy_to_same(x: PyTree, before: PyTree) -> PyTree:
    if _is_on_host(before) and not _is_on_host(x):
        return jax.device_put(x, jax.memory.Space.Host)
    return x


def _is_on_host(x: PyTree) -> bool:
    return isinstance(x, jax.Array) and jax.typeof(x).memory_space == jax.memory.Space.Host
