"""Runs a program again, equation by equation, with the shardings of its values constrained."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ...core._jaxpr import bind_again
from ..program._constants import LARGE_CONSTANT
from ..program._graph import Value
from ..program._loop_weights import Parts, can_be_lifted, is_on_the_way, is_use, on_the_way, use
from ..program._walk import PINNED, Scope
from ._custom_rules import CUSTOM, is_worth_it, run_custom
from ._grouped_conv import is_grouped, run_grouped


@runtime_checkable
@runtime_checkable
class Pins(Parts, Protocol):
    """How the values of a program are split."""

    @property
    def mesh(self) -> Mesh | AbstractMesh: ...

    def spec(self, value: Value) -> P: ...

    def __call__(self, x: Any, value: Value) -> Any:
        """The array, constrained as the value that it stands for."""
        ...

    def operand(self, x: Any, value: Value) -> Any:
        """An operand of a contraction, constrained where it has to be."""
        ...

    def local(self, fn: Callable[..., Any], specs: Sequence[P], *inputs: Any) -> Any:
        """A function that is not in the program, constrained as its inputs are split."""
        ...


class NotRebuilt(Exception):
    """An equation that stands in the traced program and cannot be bound again, by its name."""


def evaluate(
    scope: Scope,
    pin: Pins,
    constants: Sequence[Any],
    inputs: Sequence[Any],
    stored: Sequence[bool] = (),
    lifted: Mapping[Any, Any] | None = None,
) -> list[Any]:
    """The program's results; `pin` constrains arrays as the values they stand for.

    Inputs that are `stored` are pinned where they are used: inside of loops and calls. Of those
    that are `lifted` there is a copy for each part of the batch.
    """
    jaxpr = scope.jaxpr
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
    env.update(zip(jaxpr.invars, inputs, strict=True))
    resting = _resting(scope, pin, stored)
    lifted = dict(lifted or {})
    last = _last_uses(jaxpr)
    for place, equation in enumerate(jaxpr.eqns):
        inner = scope.inner.get(place, [])
        if not inner:
            for var in resting.intersection(_variables(equation.invars)):
                env[var] = pin(env[var], scope.values[var])
                resting.discard(var)
        given = [_read(env, atom) for atom in equation.invars]
        if equation.primitive.name in ("dot_general", "conv_general_dilated"):
            known = [None if isinstance(a, Literal) else scope.values[a] for a in equation.invars]
            given = [
                x if v is None else pin.operand(x, v) for x, v in zip(given, known, strict=True)
            ]
        rests = [atom in resting for atom in _variables(equation.invars, all_of=True)]
        try:
            by_copies = _by_copies(equation, scope, pin, given, lifted)
            if by_copies is not None:
                results = [by_copies]
            elif is_grouped(equation):
                specs = (pin.spec(scope.values[atom]) for atom in equation.invars)
                results = run_grouped(equation, given, pin.mesh, *specs)
            else:
                results = _run(equation, inner, pin, given, rests)
        except NotRebuilt:
            raise
        except Exception as error:
            raise NotRebuilt(equation.primitive.name) from error
        if equation.primitive.name in PINNED:
            values = (scope.values[var] for var in equation.outvars)
            results = [pin(x, value) for x, value in zip(results, values, strict=True)]
        env.update(zip(equation.outvars, results, strict=True))
        for var in last.get(place, ()):
            del env[var]
    return [_array(_read(env, atom), atom) for atom in jaxpr.outvars]


def _resting(scope: Scope, pin: Pins, stored: Sequence[bool]) -> set[Any]:
    """What is pinned where it is used: stored inputs, and large constants that are split."""

    def is_split(value: Value) -> bool:
        return value.bytes >= LARGE_CONSTANT and any(pin.spec(value))

    inputs = {var for var, rests in zip(scope.jaxpr.invars, stored, strict=False) if rests}
    return inputs | {var for var in scope.jaxpr.constvars if is_split(scope.values[var])}


def _by_copies(
    equation: JaxprEqn, scope: Scope, pin: Pins, given: list[Any], lifted: dict[Any, Any]
) -> Any:
    """The result by a lifted operand, if that is how it is to be computed."""
    variables = _variables(equation.invars, all_of=True)
    places = [place for place, var in enumerate(variables) if var in lifted]
    if not places:
        return None
    copies, out = lifted[variables[places[0]]], equation.outvars[0]
    if is_on_the_way(equation):
        lifted[out] = on_the_way(equation, copies)
        return None
    if not is_use(equation, variables[places[0]]):
        return None
    values = [scope.values.get(var) for var in variables]
    return use(equation, given, places[0], copies, values, scope.values[out], pin)


def _variables(atoms: Sequence[Any], *, all_of: bool = False) -> list[Any]:
    """Those that are no literals; with `all_of`, `None` stands for a literal."""
    found = [None if isinstance(atom, Literal) else atom for atom in atoms]
    return found if all_of else [atom for atom in found if atom is not None]


def _read(env: dict[Any, Any], atom: Any) -> Any:
    return atom.val if isinstance(atom, Literal) else env[atom]


def _array(x: Any, atom: Any) -> Any:
    """Literals are Python numbers; what comes out must be an array, as it was when traced."""
    aval: Any = atom.aval
    return jnp.asarray(x, aval.dtype) if isinstance(atom, Literal) else x


def _last_uses(jaxpr: Jaxpr) -> dict[int, list[Any]]:
    """After which equation a variable can be forgotten, so that eager calls free memory."""
    places: dict[Any, int] = {}
    for place, equation in enumerate(jaxpr.eqns):
        for atom in (*equation.invars, *equation.outvars):
            if not isinstance(atom, Literal):
                places[atom] = place
    for atom in jaxpr.outvars:
        if not isinstance(atom, Literal):
            places.pop(atom, None)
    last: dict[int, list[Any]] = {}
    for var, place in places.items():
        last.setdefault(place, []).append(var)
    return last


def _run(
    equation: JaxprEqn, inner: list[Scope], pin: Pins, given: list[Any], rests: list[bool]
) -> list[Any]:
    name = equation.primitive.name
    if name == "sharding_constraint":
        return _own_constraint(equation, pin, given)
    if not inner or (name in CUSTOM and not is_worth_it(inner[0].jaxpr, PINNED)):
        return bind_again(equation, given)
    if name in _LOOPS:
        return _LOOPS[name](equation, inner, pin, given, rests)
    run = _body(inner[0], pin, _constants(equation), rests)
    if name in CUSTOM:
        specs = [pin.spec(inner[0].values[var]) for var in inner[0].jaxpr.invars]
        return run_custom(equation, run, given, specs, pin.local)
    if name in _REMATS:
        params = equation.params
        run = jax.checkpoint(run, prevent_cse=params["prevent_cse"], policy=params["policy"])
    return list(run(*given))


def _own_constraint(equation: JaxprEqn, pin: Pins, given: list[Any]) -> list[Any]:
    """A constraint of the user's own; one by the names of axes alone has no devices."""
    sharding, mesh = equation.params["sharding"], pin.mesh
    if isinstance(mesh, Mesh) and getattr(sharding, "mesh", None) == mesh.abstract_mesh:
        sharding = NamedSharding(mesh, sharding.spec)
        return [jax.lax.with_sharding_constraint(given[0], sharding)]
    return bind_again(equation, given)


_REMATS = frozenset(["checkpoint", "remat", "remat2"])


def _constants(equation: JaxprEqn) -> Sequence[Any]:
    for key in ("jaxpr", "call_jaxpr"):
        if key in equation.params:
            return getattr(equation.params[key], "consts", ())
    return ()


def _body(
    scope: Scope, pin: Pins, constants: Sequence[Any], rests: Sequence[bool]
) -> Callable[..., list[Any]]:
    return lambda *inputs: evaluate(scope, pin, constants, inputs, rests)


def _scan(
    equation: JaxprEqn, inner: list[Scope], pin: Pins, given: list[Any], rests: list[bool]
) -> list[Any]:
    params, scope = equation.params, inner[0]
    consts, carries = params["num_consts"], params["num_carry"]
    split = consts + carries
    avals = scope.jaxpr.invars[consts:split]
    values = [scope.values[var] for var in avals]
    constants = params["jaxpr"].consts
    given[:consts], rests = _gathered(scope, pin, given[:consts], rests)
    lifted = _lifted(scope, pin, given[:consts])
    still = [*rests[:consts], *(False for _ in values), *rests[split:]]

    def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        inputs = [*given[:consts], *_pinned(pin, carry, values), *xs]
        results = evaluate(scope, pin, constants, inputs, still, lifted)
        return _pinned(pin, results[:carries], values), results[carries:]

    init = _typed(given[consts:split], avals)
    carry, ys = jax.lax.scan(
        body,
        init,
        list(given[split:]),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *ys]


def _gathered(
    scope: Scope, pin: Pins, constants: list[Any], rests: Sequence[bool]
) -> tuple[list[Any], list[bool]]:
    """What a loop closes over, pinned before the loop and not at every iteration.

    Layers that a scan inside goes over stay as they are stored: they are gathered one by one.
    """
    still = list(rests)
    for place, (x, var) in enumerate(zip(constants, scope.jaxpr.invars, strict=False)):
        if rests[place] and not _has_layers(scope, var):
            constants[place], still[place] = pin(x, scope.values[var]), False
    return constants, still


def _has_layers(scope: Scope, var: Any) -> bool:
    """Whether a scan inside goes over the first dimension of an array."""
    for place, inner in scope.inner.items():
        equation = scope.jaxpr.eqns[place]
        params, count = equation.params, len(equation.invars)
        layers = count
        if equation.primitive.name == "scan":
            layers = params["num_consts"] + params["num_carry"]
        for at in (at for at, atom in enumerate(equation.invars) if atom is var):
            if at >= layers:
                return True
            for one in inner:
                # Before the operands of what is called may stand others, as the index of branches.
                behind = at - (count - len(one.jaxpr.invars))
                if behind >= 0 and _has_layers(one, one.jaxpr.invars[behind]):
                    return True
    return False


def _lifted(scope: Scope, pin: Pins, constants: Sequence[Any]) -> dict[Any, Any]:
    """Copies of what a loop closes over, where that spares it sums over the batch."""
    found = {}
    for x, var in zip(constants, scope.jaxpr.invars, strict=False):
        value = scope.values[var]
        if (
            pin.count > 1
            and isinstance(x, jax.Array)
            and value.shape
            and jnp.issubdtype(x.dtype, jnp.inexact)
            and pin.batch_dim(value) is None
            and can_be_lifted(scope.jaxpr, var)
        ):
            found[var] = pin.copies(pin(x, value), value)
    return found


def _pinned(pin: Pins, arrays: Sequence[Any], values: Sequence[Value]) -> list[Any]:
    return [pin(x, value) for x, value in zip(arrays, values, strict=True)]


def _typed(arrays: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """A loop must carry arrays of the type that it was traced with; literals are numbers."""
    return [
        x if isinstance(x, jax.Array) else jnp.asarray(x, var.aval.dtype)
        for x, var in zip(arrays, variables, strict=True)
    ]


def _while(
    equation: JaxprEqn, inner: list[Scope], pin: Pins, given: list[Any], rests: list[bool]
) -> list[Any]:
    params, (test, body) = equation.params, inner
    first, second = params["cond_nconsts"], params["body_nconsts"]
    split = first + second
    variables = body.jaxpr.invars[second:]
    values = [body.values[var] for var in variables]
    given[first:split], rests[first:split] = _gathered(
        body, pin, given[first:split], rests[first:split]
    )

    def going(carry: list[Any]) -> Any:
        inputs = [*given[:first], *carry]
        return evaluate(test, pin, params["cond_jaxpr"].consts, inputs, rests[:first])[0]

    def step(carry: list[Any]) -> list[Any]:
        inputs = [*given[first:split], *_pinned(pin, carry, values)]
        results = evaluate(body, pin, params["body_jaxpr"].consts, inputs, rests[first:split])
        if (go := going(carry)).ndim:
            # Under `vmap`, each row ends at its own time, and stays as it was there.
            results = [_where(go, x, before) for x, before in zip(results, carry, strict=True)]
        return _pinned(pin, results, values)

    init = _typed(given[split:], variables)
    return jax.lax.while_loop(lambda carry: jnp.any(going(carry)), step, init)


def _where(rows: Any, x: Any, y: Any) -> Any:
    mask = jnp.expand_dims(rows, tuple(range(rows.ndim, x.ndim)))
    return jax.lax.select(jnp.broadcast_to(mask, x.shape), x, y)


def _cond(
    equation: JaxprEqn, inner: list[Scope], pin: Pins, given: list[Any], rests: list[bool]
) -> list[Any]:
    branches = [
        _body(scope, pin, branch.consts, rests[1:])
        for scope, branch in zip(inner, equation.params["branches"], strict=True)
    ]
    return list(jax.lax.switch(given[0], branches, *given[1:]))


_LOOPS = {"scan": _scan, "while": _while, "cond": _cond}
