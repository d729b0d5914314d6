"""Reads loops, branches and calls in the jaxprs of each version of JAX.

`control_flow(equation)` returns what an equation runs, in one form for all versions. Nothing else
in redcoast reads the parameters of such equations. Three layouts exist:

- JAX 0.10 and 0.11.0: `scan` counts its operands in `num_consts` and `num_carry`, and a jaxpr with
  constants is a `ClosedJaxpr`.
- From JAX 0.11.2: `scan` has trees of its operands and results (`ft_in`, `ft_out`), and a `Jaxpr`
  has its own constants.
- With `JAX_REMAT3`, `JAX_CUSTOM_VJP3` or `JAX_CUSTOM_JVP3`: rematerialisation and custom
  derivatives are `call_hi_primitive` equations, whose parameter `_prim` has the jaxpr. Some
  operations of `jax.numpy` and `jax.lax.custom_root` are such equations from JAX 0.11.2 on.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar, cast

import jax
import jax.extend.core
from jax._src.ad_checkpoint import name_p
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, jaxprs_in_params
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import PyTree

from ._versions import own_version, versions_tested

if TYPE_CHECKING:
    AnyJaxpr = jax.extend.core.ClosedJaxpr | Jaxpr
else:
    AnyJaxpr = getattr(jax.extend.core, "ClosedJaxpr", Jaxpr) | Jaxpr
Atom = Var | Literal
T = TypeVar("T")
Items = TypeVar("Items", bound=Sequence[object])


class UnsupportedJaxVersion(RuntimeError):
    """Raised if redcoast cannot read the traced programs of the installed version of JAX.

    !!! Example

        ```python
        try:
            plan = rc.plan_shardings(model, mesh, fn=loss_fn, args=(batch, key))
        except rc.UnsupportedJaxVersion as error:
            print(f"Install another version: {error}")
        ```
    """

    __module__ = "redcoast"


@dataclass(frozen=True)
class Scan:
    """A `scan`. The operands are `consts` constants, `carry` carried values, and the scanned
    arrays."""

    body: AnyJaxpr
    length: int
    reverse: bool
    unroll: int
    consts: int
    carry: int

    def split(self, items: Items) -> tuple[Items, Items, Items]:
        """Splits items, one for each operand, into constants, carry and scanned arrays."""
        scanned = self.consts + self.carry
        parts = items[: self.consts], items[self.consts : scanned], items[scanned:]
        return cast(tuple[Items, Items, Items], parts)

    def run(
        self,
        body: Callable[[list[PyTree]], Sequence[PyTree]],
        consts: Sequence[PyTree],
        init: Sequence[PyTree],
        xs: Sequence[PyTree],
    ) -> list[PyTree]:
        """Runs another body on the same operands; both take and return one list of arrays."""

        def iterate(carry: list[PyTree], xs: list[PyTree]) -> tuple[list[PyTree], list[PyTree]]:
            results = list(body([*consts, *carry, *xs]))
            return results[: self.carry], results[self.carry :]

        # The length is said, since a loop without scanned arrays has no other.
        options = {"length": self.length, "reverse": self.reverse, "unroll": self.unroll}
        carry, ys = jax.lax.scan(iterate, list(init), list(xs), **options)
        return [*carry, *ys]


@dataclass(frozen=True)
class While:
    """A `while`. The operands are the constants of the condition and of the body, and the carry."""

    cond: AnyJaxpr
    body: AnyJaxpr
    cond_consts: int
    body_consts: int

    def split(self, items: Items) -> tuple[Items, Items, Items]:
        """Splits items, one for each operand, into the constants of each function and the carry."""
        carry = self.cond_consts + self.body_consts
        parts = items[: self.cond_consts], items[self.cond_consts : carry], items[carry:]
        return cast(tuple[Items, Items, Items], parts)


@dataclass(frozen=True)
class Cond:
    """A `cond` or `switch`. The first operand is the index of the branch that runs."""

    branches: tuple[AnyJaxpr, ...]


class CallKind(Enum):
    """What an equation changes about the jaxpr that it calls."""

    PLAIN = "runs it"
    REMAT = "computes it again in the backward pass"
    CUSTOM_JVP = "replaces its forward-mode derivative"
    CUSTOM_VJP = "replaces its reverse-mode derivative"
    OWN_RULES = "replaces any of its transformations"


@dataclass(frozen=True)
class Call:
    """An equation that runs a jaxpr once, with its own operands and results.

    `policy` and `prevent_cse` are the arguments of `jax.checkpoint`, if the call is rematerialised.
    `symbolic_zeros` is whether a derivative rule of its own learns what has no derivative.
    """

    jaxpr: AnyJaxpr
    kind: CallKind
    policy: Callable[..., PyTree] | None = None
    prevent_cse: bool | tuple[bool, ...] = True
    symbolic_zeros: bool = False

    @property
    def has_derivative(self) -> bool:
        """Whether the call has a custom derivative."""
        return self.kind not in (CallKind.PLAIN, CallKind.REMAT)


@dataclass(frozen=True)
class LinearSolve:
    """A `custom_linear_solve`, whose `solve` runs on the operands in `places`.

    `functions` has each of its functions by name, and the places of the constants among the
    operands. The right side follows all constants. `symmetric` is whether `matvec` is its own
    transpose.
    """

    solve: AnyJaxpr
    places: tuple[int, ...]
    functions: Mapping[str, tuple[AnyJaxpr, tuple[int, ...]]]
    symmetric: bool


@dataclass(frozen=True)
class Kernel:
    """A `pallas_call`, which runs `body` once for each point of its grid."""

    body: AnyJaxpr
    points: tuple[object, ...]  # the sizes of the grid, some of which may depend on data


@dataclass(frozen=True)
class Manual:
    """A `shard_map`, which runs `body` on the shards of its operands.

    `axes` are the mesh axes over which an operand or a result is sharded.
    """

    body: AnyJaxpr
    mesh: Mesh | AbstractMesh
    axes: frozenset[str]


ControlFlow = Scan | While | Cond | Call | LinearSolve | Kernel | Manual

_CALLS = {
    "checkpoint": CallKind.REMAT,
    "remat": CallKind.REMAT,
    "remat2": CallKind.REMAT,
    "custom_jvp_call": CallKind.CUSTOM_JVP,
    "custom_vjp_call": CallKind.CUSTOM_VJP,
}
_CALLBACKS = frozenset(["debug_callback", "io_callback", "pure_callback"])
# The jaxprs of these do not run once on the operands as they are.
_NOT_CALLS = _CALLBACKS | frozenset(["custom_call", "ffi_call"])
_HIGH_LEVEL = "call_hi_primitive"
_NAMED = "name"  # the primitive of `checkpoint_name`


def is_callback(equation: JaxprEqn) -> bool:
    """Whether an equation calls a function on the host."""
    return equation.primitive.name in _CALLBACKS


def control_flow(equation: JaxprEqn) -> ControlFlow | None:
    """Returns what an equation runs, or None if it only computes.

    Raises `UnsupportedJaxVersion` if the equation lacks a parameter that it has in all tested
    versions of JAX.
    """
    name = equation.primitive.name
    if name in _NOT_CALLS:
        return None
    try:
        if name in _READERS:
            return _READERS[name](equation)
        if name == _HIGH_LEVEL:
            flow = _high_level(equation.params["_prim"])
            if not isinstance(flow, Call):
                return None
            return flow
        return _call(equation, _CALLS.get(name, CallKind.PLAIN))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UnsupportedJaxVersion(
            f"JAX {jax.__version__} describes the operation `{name}` by the parameters "
            f"{', '.join(sorted(equation.params))}, which redcoast {own_version()} cannot read. It "
            f"was tested with JAX {versions_tested('jax')}. Install one of these versions of JAX, "
            "or a newer version of redcoast."
        ) from error


def _scan(equation: JaxprEqn) -> Scan:
    params = equation.params
    # From JAX 0.11.2 on.
    if "ft_in" in params:
        consts, carry, _ = map(len, params["ft_in"].unpack())
    else:
        consts, carry = params["num_consts"], params["num_carry"]
    options = params["length"], params["reverse"], params["unroll"]
    return Scan(params["jaxpr"], *options, consts, carry)


def _while(equation: JaxprEqn) -> While:
    params = equation.params
    counts = params["cond_nconsts"], params["body_nconsts"]
    return While(params["cond_jaxpr"], params["body_jaxpr"], *counts)


def _cond(equation: JaxprEqn) -> Cond:
    return Cond(tuple(equation.params["branches"]))


def _linear_solve(equation: JaxprEqn) -> LinearSolve:
    # The jaxprs other than `solve` are for derivatives.
    lengths, jaxprs = equation.params["const_lengths"], equation.params["jaxprs"]
    functions, first = {}, 0
    for name in ("matvec", "vecmat", "solve", "transpose_solve"):
        count, jaxpr = getattr(lengths, name), getattr(jaxprs, name)
        if jaxpr is not None:
            functions[name] = jaxpr, tuple(range(first, first + count))
        # Operands are in the order of all functions, also of those that are `None`.
        first += count
    right_side = tuple(range(first, len(equation.invars)))
    places = (*functions["solve"][1], *right_side)
    # With `symmetric=True`, JAX uses one jaxpr for both.
    return LinearSolve(jaxprs.solve, places, functions, jaxprs.vecmat is jaxprs.matvec)


def _kernel(equation: JaxprEqn) -> Kernel:
    return Kernel(equation.params["jaxpr"], tuple(equation.params["grid_mapping"].grid))


def _manual(equation: JaxprEqn) -> Manual:
    params = equation.params
    axes = set()
    for spec in (*params["in_specs"], *params["out_specs"]):
        for entry in spec:
            # The axis that a dimension is sharded over, a tuple of axes, or None.
            if isinstance(entry, str):
                axes.add(entry)
            elif entry is not None:
                axes.update(entry)
    return Manual(params["jaxpr"], params["mesh"], frozenset(axes))


_READERS = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "custom_linear_solve": _linear_solve,
    "pallas_call": _kernel,
    "shard_map": _manual,
}


def _call(equation: JaxprEqn, kind: CallKind) -> Call | None:
    params = equation.params
    # The names of this parameter in the primitives of JAX.
    body = params.get("jaxpr") or params.get("call_jaxpr") or params.get("fun_jaxpr")
    if not isinstance(body, AnyJaxpr):
        # A version of JAX with another name for it, which the caller reports.
        if kind is not CallKind.PLAIN:
            raise KeyError("jaxpr")
        return None
    inner = open_jaxpr(body)
    operands, results = len(equation.invars), len(equation.outvars)
    # What runs such a jaxpr does something else with its operands, too.
    if (len(inner.invars), len(inner.outvars)) != (operands, results):
        return None
    if kind is CallKind.REMAT:
        return Call(body, kind, params["policy"], params["prevent_cse"])
    return Call(body, kind, symbolic_zeros=bool(params.get("symbolic_zeros")))


def primitive_name(equation: JaxprEqn) -> str:
    """Returns the name of an equation's primitive, the same in all layouts."""
    name = equation.primitive.name
    is_named = name == _HIGH_LEVEL and _high_level(equation.params["_prim"]) == _NAMED
    if is_named:
        return _NAMED
    return name


def saves(policy: Callable[..., object], equation: JaxprEqn) -> bool:
    """Returns whether a rematerialisation policy keeps the results of an equation."""
    primitive, params = equation.primitive, equation.params
    if primitive.name == _HIGH_LEVEL and primitive_name(equation) == _NAMED:
        # JAX asks its policies about names as in the older layout.
        primitive, params = name_p, {"name": params["_prim"].name}
    return policy_keeps(policy(primitive, *[atom.aval for atom in equation.invars], **params))


def policy_keeps(decision: object) -> bool:
    """Returns whether a rematerialisation policy's answer is to keep a result."""
    return decision is not False and decision is not _RECOMPUTE


def _high_level(prim: Any) -> Call | str | None:
    """The call of a `jax.experimental.hijax.HiPrim`, or the name of the primitive that it replaces.

    None if it has no jaxpr.
    """
    # Kept with the operation, so that all readers of a program see the same jaxpr.
    if _READ not in vars(prim):
        setattr(prim, _READ, _read_high_level(prim))
    return getattr(prim, _READ)


def _read_high_level(prim: Any) -> Call | str | None:
    kind = _high_level_kind(type(prim))
    if kind is CallKind.REMAT:
        return Call(prim.jaxpr, kind, prim.policy, prim.prevent_cse)
    if kind in (CallKind.CUSTOM_JVP, CallKind.CUSTOM_VJP):
        return Call(prim.traced.jaxpr, kind, symbolic_zeros=bool(prim.symbolic_zeros))
    if kind == _NAMED:
        return _NAMED

    def expand(*operands: PyTree) -> list[PyTree]:
        results = prim.expand(*jax.tree.unflatten(prim.in_tree, operands))
        return jax.tree.leaves(results)

    try:
        return Call(jax.make_jaxpr(expand)(*prim.in_avals_flat), CallKind.OWN_RULES)
    except Exception:  # its operands or its operations are of a kind that has no jaxpr
        return None


def _high_level_kind(cls: type) -> CallKind | str | None:
    """The kind of one of JAX's own classes of high-level operations.

    They have no public names, so a function of each kind is traced and its class is read.
    """
    for kind, fn in _PROBES.items():
        # JAX's flags choose the class, so it is the same for the probe and for the program.
        (equation,) = jax.make_jaxpr(fn)(1.0).eqns
        if type(equation.params.get("_prim")) is cls:
            return kind
    return None


def _identity(x: T) -> T:
    return x


_with_jvp = jax.custom_jvp(_identity)
_with_jvp.defjvp(lambda primals, tangents: (*primals, *tangents))
_with_vjp = jax.custom_vjp(_identity)
_with_vjp.defvjp(lambda x: (x, None), lambda _, cotangent: (cotangent,))
_PROBES = {
    CallKind.REMAT: jax.checkpoint(_identity),
    CallKind.CUSTOM_JVP: _with_jvp,
    CallKind.CUSTOM_VJP: _with_vjp,
    _NAMED: lambda x: checkpoint_name(x, "probe"),
}
_READ = "_redcoast_call"
# What policies that can also offload return for arrays that are recomputed.
_RECOMPUTE = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=[],
    offload_src="device",
    offload_dst="pinned_host",
)(None)


def open_jaxpr(jaxpr: AnyJaxpr) -> Jaxpr:
    """Returns the jaxpr without its constants."""
    return cast(Jaxpr, getattr(jaxpr, "jaxpr", jaxpr))


def consts_of(jaxpr: AnyJaxpr) -> Sequence[PyTree]:
    """Returns the constants of a closed jaxpr; an open one has none."""
    return getattr(jaxpr, "consts", ())


def close_jaxpr(jaxpr: Jaxpr, consts: Sequence[PyTree]) -> AnyJaxpr:
    """Returns the jaxpr with values for its constants."""
    if hasattr(jaxpr, "consts"):
        return jaxpr.replace(consts=list(consts))
    return jax.extend.core.ClosedJaxpr(jaxpr, list(consts))


def is_high_level(equation: JaxprEqn) -> bool:
    """Whether an equation is a `jax.experimental.hijax.HiPrim`."""
    return equation.primitive.name == _HIGH_LEVEL


def inner_jaxprs(equation: JaxprEqn) -> list[Jaxpr]:
    """Returns all jaxprs of an equation without their constants, including jaxprs for
    derivatives."""
    if not is_high_level(equation):
        return list(jaxprs_in_params(equation.params))
    call = control_flow(equation)
    if isinstance(call, Call):
        return [open_jaxpr(call.jaxpr)]
    return []


def replace_parameters(equation: JaxprEqn, replace: Callable[[PyTree], PyTree]) -> JaxprEqn:
    """Returns the equation with each of its parameters, jaxprs included, replaced.

    The jaxpr of an operation with a custom derivative is not changed.
    """
    if not is_high_level(equation):
        params = {name: replace(value) for name, value in equation.params.items()}
        return equation.replace(params=params)
    prim, call = equation.params["_prim"], control_flow(equation)
    if not isinstance(call, Call) or call.kind is not CallKind.REMAT:
        return equation
    # The operation has its jaxpr as an attribute, and not among its parameters.
    inner = type(prim)(replace(call.jaxpr), call.policy, call.prevent_cse)
    return equation.replace(params={"_prim": inner})
