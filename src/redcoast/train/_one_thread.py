"""The updates of a small model in one thread of a CPU.

XLA's runtime for CPUs runs a program as kernels, and wakes other threads if more than eight of them
are ready. In a training step, this happens behind the norm of the gradient: all updates of the
optimizer wait for it, because they are skipped if it is not finite. To wake threads takes longer
than to update a small model. So the updates become calls of a few kernels each, which the runtime
takes one after the other.
"""

from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Jaxpr, JaxprEqn, Var, jaxpr_as_fun
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import PyTree

from ..core._control_flow import AnyJaxpr, Atom, Call, control_flow, open_jaxpr
from ..core._jaxpr import (
    bind_again,
    evaluate_equations,
    evaluate_inlined,
    initial_env,
    struct_of,
    variables,
)
from ..core._pytree import Arrays
from ..distributed._arrays import stays_on_host
from ..sharding.operations._elementwise_rules import ELEMENTWISE
from ..sharding.operations._rule_table import REDUCTIONS, VIEWS

READY = 8  # XLA's runtime runs as many kernels in one thread
IN_CALL = 6  # results of a call; some take more than one kernel
CALLS = 4  # that are ready at the same time
MOST_BYTES = 1 << 20  # of what one thread reads and writes
# What XLA computes in few kernels: no products, no calls of libraries.
_SIMPLE = ELEMENTWISE | REDUCTIONS | VIEWS
_SIMPLE |= {"broadcast_in_dim", "concatenate", "iota", "slice", "split", "transpose"}


def in_one_thread(program: AnyJaxpr, mesh: Mesh | AbstractMesh) -> Callable[..., Arrays]:
    """A function that computes a traced step, in which one thread makes the updates of a small
    model."""
    plain = jaxpr_as_fun(program)
    is_one_cpu = isinstance(mesh, Mesh) and stays_on_host(mesh)
    if not (is_one_cpu and _is_small(open_jaxpr(program).outvars)):
        return plain

    def run(*args: PyTree) -> Arrays:
        # Libraries call functions of all parameters at once, which hide what needs what.
        inline = lambda *args: evaluate_inlined(program, args, _is_simple_call)
        without_calls = jax.make_jaxpr(inline)(*args)
        jaxpr = open_jaxpr(without_calls)
        others, updates = _split(jaxpr)
        if not updates:
            return plain(*args)
        env = initial_env(without_calls, args)
        evaluate_equations(others, _results_before(jaxpr, updates), env, _bind)
        _run_in_calls(updates, env)
        return evaluate_equations([], jaxpr.outvars, env, _bind)  # all are evaluated: read

    return run


class _Updates:
    """Equations of a program whose results no other equations use."""

    def __init__(self, equations: Sequence[JaxprEqn], outvars: Sequence[Atom]):
        self.equations = equations
        inside: set[Var] = set()
        used: list[Var] = []
        for equation in equations:
            inside.update(equation.outvars)
            used += variables(equation.invars)
        self.operands = [x for x in dict.fromkeys(used) if x not in inside]
        self.results = [x for x in dict.fromkeys(variables(outvars)) if x in inside]


def _split(jaxpr: Jaxpr) -> tuple[list[JaxprEqn], list[_Updates]]:
    """The equations before the updates, and the updates, with as many results in each as fit in a
    call.

    There are none if other threads would not be woken, or have enough to compute.
    """
    end = _end_of(jaxpr)
    masks = _masks(end, jaxpr.outvars)
    before = _before_updates(end, masks)
    # Without what nothing uses.
    own = [x for x in end if id(x) not in before and masks[id(x)]]
    whole = _Updates(own, jaxpr.outvars)
    if len(whole.results) <= READY or not _is_small([*whole.operands, *whole.results]):
        return jaxpr.eqns, []
    updates: list[_Updates] = []
    # What computes the same results stays together, since calls do not read each other's values.
    connected = _union_of_connected([masks[id(x)] for x in own])
    for part in _pack(connected):
        equations = [x for x in own if masks[id(x)] & part]
        updates.append(_Updates(equations, jaxpr.outvars))
    others = [x for x in jaxpr.eqns if id(x) not in masks or id(x) in before]
    return others, updates


def _results_before(jaxpr: Jaxpr, updates: Sequence[_Updates]) -> list[Var]:
    """What the updates and the results of a program read of the equations before the updates."""
    operands: list[Var] = []
    results: set[Var] = set()
    for part in updates:
        operands += part.operands
        results.update(part.results)
    return [*operands, *(x for x in variables(jaxpr.outvars) if x not in results)]


def _end_of(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """The simple equations whose results nothing else uses, in their order."""
    needed: set[Var] = set()  # by other equations
    end: list[JaxprEqn] = []
    for equation in reversed(jaxpr.eqns):
        if _is_simple(equation) and needed.isdisjoint(equation.outvars):
            end.append(equation)
        else:
            needed.update(variables(equation.invars))
    return end[::-1]


def _masks(end: Sequence[JaxprEqn], outvars: Sequence[Atom]) -> dict[int, int]:
    """Which results of the program need each equation, as bits, by its identity."""
    of_variable: dict[Var, int] = {}
    for bit, x in enumerate(dict.fromkeys(variables(outvars))):
        of_variable[x] = 1 << bit
    masks: dict[int, int] = {}
    for equation in reversed(end):
        mask = 0
        for x in equation.outvars:
            mask |= of_variable.get(x, 0)
        masks[id(equation)] = mask
        for x in variables(equation.invars):
            of_variable[x] = of_variable.get(x, 0) | mask
    return masks


def _before_updates(end: Sequence[JaxprEqn], masks: Mapping[int, int]) -> set[int]:
    """The identities of equations of numbers and of what all updates need, such as the norm of the
    gradient."""
    before: set[int] = set()
    needed: set[Var] = set()
    for equation in reversed(end):
        is_number = all(struct_of(x).size == 1 for x in equation.outvars)
        is_shared = masks[id(equation)].bit_count() > READY
        if is_number or is_shared or not needed.isdisjoint(equation.outvars):
            before.add(id(equation))
            needed.update(variables(equation.invars))
    return before


def _union_of_connected(masks: Sequence[int]) -> list[int]:
    """The union of all masks that share bits, such as the moments and the value of a parameter."""
    unions: list[int] = []
    for mask in masks:
        disjoint: list[int] = []
        # Unions share no bits with each other, so what one adds to the mask meets no other.
        for x in unions:
            if x & mask:
                mask |= x
            else:
                disjoint.append(x)
        unions = [*disjoint, mask]
    return unions


def _pack(masks: Sequence[int]) -> list[int]:
    """The masks, united as far as a call has room for their results."""
    parts: list[int] = []
    for mask in masks:
        if parts and (parts[-1] | mask).bit_count() <= IN_CALL:
            parts[-1] |= mask
        else:
            parts.append(mask)
    return parts


def _is_small(atoms: Sequence[Atom]) -> bool:
    size = 0
    for atom in atoms:
        x = struct_of(atom)
        # Keys have no size in bytes, and are few.
        size += x.size * getattr(x.dtype, "itemsize", 0)
    return size <= MOST_BYTES


def _is_simple(equation: JaxprEqn) -> bool:
    if equation.effects:
        return False
    flow = control_flow(equation)
    if isinstance(flow, Call):
        return _is_simple_call(flow)
    if flow is not None or equation.primitive.name not in _SIMPLE:
        return False
    return all(map(_is_plain, (*equation.invars, *equation.outvars)))


def _is_simple_call(call: Call) -> bool:
    return all(map(_is_simple, open_jaxpr(call.jaxpr).eqns))


def _is_plain(atom: Atom) -> bool:
    """Whether these are booleans, integers or floats of NumPy."""
    dtype = getattr(atom.aval, "dtype", None)
    return isinstance(dtype, np.dtype) and dtype.kind in "biuf"


def _run_in_calls(updates: Sequence[_Updates], env: dict[Var, PyTree]) -> None:
    """Computes updates in a few calls, which contain more calls if there are many updates."""
    size = -(-len(updates) // CALLS)
    for begin in range(0, len(updates), size):
        _run_in_call(updates[begin : begin + size], env)


def _run_in_call(updates: Sequence[_Updates], env: dict[Var, PyTree]) -> None:
    operands: dict[Var, None] = {}  # each once, in their order
    results: list[Var] = []
    for part in updates:
        operands.update(dict.fromkeys(part.operands))
        results += part.results

    def update(values: Arrays) -> Arrays:
        inside: dict[Var, PyTree] = dict(zip(operands, values, strict=True))
        if len(updates) == 1:
            return evaluate_equations(updates[0].equations, results, inside, _bind)
        _run_in_calls(updates, inside)
        return [inside[x] for x in results]

    # The compiler inlines other calls.
    with set_xla_metadata(inlineable="false"):
        values = jax.jit(update)([env[x] for x in operands])
    env.update(zip(results, values, strict=True))


def _bind(_: int, equation: JaxprEqn, operands: Arrays) -> Arrays:
    return bind_again(equation, operands)
