"""Helpers for reading and evaluating jaxprs.

They use attributes and parameters of equations that JAX does not document: `JaxprEqn.ctx`,
`Primitive.get_bind_params`, and the parameter names of `scan`, `while` and calls. Tried with
JAX 0.10.2.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxprs_in_params

T = TypeVar("T")
Operands = TypeVar("Operands", bound=Sequence[Any])

CHECKPOINTS = frozenset(["checkpoint", "remat", "remat2"])
CUSTOM_DERIVATIVES = frozenset(["custom_jvp_call", "custom_vjp_call"])
# If these have a jaxpr, it does not run once on the operands as they are.
_NOT_CALLS = frozenset(
    "custom_call ffi_call io_callback pallas_call pure_callback scan shard_map".split()  # noqa: SIM905
)


def open_jaxpr(jaxpr: ClosedJaxpr | Jaxpr) -> Jaxpr:
    """Returns the jaxpr without its constants."""
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def consts_of(jaxpr: ClosedJaxpr | Jaxpr) -> Sequence[Any]:
    """Returns the constants of a closed jaxpr; an open one has none."""
    return jaxpr.consts if isinstance(jaxpr, ClosedJaxpr) else ()


def called_jaxpr(equation: JaxprEqn) -> ClosedJaxpr | Jaxpr | None:
    """Returns the jaxpr that an equation calls once with its own operands, or None."""
    if equation.primitive.name in _NOT_CALLS:
        return None
    found = (equation.params.get(key) for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"))
    called = next((one for one in found if isinstance(one, ClosedJaxpr | Jaxpr)), None)
    if called is None:
        return None
    inner = open_jaxpr(called)
    counts = len(inner.invars), len(inner.outvars)
    return called if counts == (len(equation.invars), len(equation.outvars)) else None


def iter_equations(jaxpr: Jaxpr, skip: Container[str] = ()) -> Iterator[JaxprEqn]:
    """Yields all equations of a jaxpr and of the jaxprs inside it, except inside `skip`."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name not in skip:
            for inner in jaxprs_in_params(equation.params):
                yield from iter_equations(inner, skip)


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Returns the atoms that are not literals."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def is_inexact(aval: Any) -> bool:
    """Whether values of this type are floating point or complex, and so can have gradients."""
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def scan_operands(equation: JaxprEqn, operands: Operands) -> tuple[Operands, Operands, Operands]:
    """Splits items, one for each operand of a `scan`, into those of its consts, carry and xs."""
    carry = equation.params["num_consts"]
    xs = carry + equation.params["num_carry"]
    return operands[:carry], operands[carry:xs], operands[xs:]  # pyright: ignore[reportReturnType]


def while_operands(equation: JaxprEqn, operands: Operands) -> tuple[Operands, Operands, Operands]:
    """Splits items, one for each operand of a `while`.

    The parts are those of the constants of the condition, the constants of the body, and the carry.
    """
    body = equation.params["cond_nconsts"]
    carry = body + equation.params["body_nconsts"]
    return operands[:body], operands[body:carry], operands[carry:]  # pyright: ignore[reportReturnType]


def bind_again(equation: JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    """Binds an equation's primitive to other inputs, and returns the results."""
    params = equation.primitive.get_bind_params(equation.params)
    # Older versions of JAX return the functions to call separately from the parameters.
    subfuns, params = params if isinstance(params, tuple) else ((), params)
    with equation.ctx.manager:
        found = equation.primitive.bind(*subfuns, *inputs, **params)
    return list(found) if equation.primitive.multiple_results else [found]


def evaluate_jaxpr(
    jaxpr: Jaxpr,
    env: dict[Any, T],
    handle: Callable[[int, JaxprEqn, list[T]], Sequence[T]],
    read_literal: Callable[[Literal], T] = lambda literal: literal.val,
) -> list[T]:
    """Evaluates a jaxpr with a custom interpretation of its equations.

    **Arguments:**

    - `env`: the values of the constants and inputs, by variable. It is updated in place, and a
        variable is deleted after its last use, so that eager evaluation frees memory.
    - `handle`: returns the results of an equation, as `handle(index, equation, operands)`.
    - `read_literal`: returns the value of a literal.

    **Returns:**

    The values of the jaxpr's outputs.
    """
    indices: dict[Any, int] = {}  # of the last use of each variable
    for index, equation in enumerate(jaxpr.eqns):
        indices.update(dict.fromkeys(variables((*equation.invars, *equation.outvars)), index))
    last: dict[int, list[Any]] = {}
    for var in indices.keys() - set(variables(jaxpr.outvars)):
        last.setdefault(indices[var], []).append(var)
    read = lambda atom: read_literal(atom) if isinstance(atom, Literal) else env[atom]
    for index, equation in enumerate(jaxpr.eqns):
        results = handle(index, equation, [read(atom) for atom in equation.invars])
        env.update(zip(equation.outvars, results, strict=True))
        for var in last.get(index, ()):
            del env[var]
    return [read(atom) for atom in jaxpr.outvars]
