"""Helpers for reading and evaluating jaxprs.

They use two undocumented parts of JAX, `JaxprEqn.ctx` and `Primitive.get_bind_params`.
`_control_flow.py` reads loops, branches and calls.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jaxtyping import PyTree

from ._control_flow import (
    AnyJaxpr,
    Atom,
    Call,
    consts_of,
    control_flow,
    inner_jaxprs,
    open_jaxpr,
)
from ._frames import own_or_model_frame

T = TypeVar("T")


def iter_equations(
    jaxpr: AnyJaxpr, skip: Callable[[JaxprEqn], bool] = lambda equation: False
) -> Iterator[JaxprEqn]:
    """Yields all equations of a jaxpr and of the jaxprs inside it, except where `skip` is true."""
    for equation in open_jaxpr(jaxpr).eqns:
        yield equation
        if not skip(equation):
            for inner in inner_jaxprs(equation):
                yield from iter_equations(inner, skip)


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """Returns the atoms that are not literals."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def is_inexact(aval: object) -> bool:
    """Whether values of this type are floating point or complex, and so can have gradients."""
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def struct_of(atom: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a variable or a literal."""
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)


def as_traced(x: PyTree, atom: Any) -> PyTree:
    """A value of a variable or a literal as an array of the traced dtype, if it is a number."""
    if isinstance(x, bool | int | float | complex | np.generic | np.ndarray):
        return jnp.asarray(x, struct_of(atom).dtype)
    return x


def bind_again(equation: JaxprEqn, inputs: Sequence[PyTree]) -> list[PyTree]:
    """Binds an equation's primitive to other inputs, and returns the results."""
    return _bind(equation, inputs, equation.params, equation.ctx.manager)


def bind_local(
    equation: JaxprEqn, inputs: Sequence[PyTree], changes: Mapping[str, object]
) -> list[PyTree]:
    """Binds an equation's primitive inside of `jax.shard_map`, with some parameters changed.

    The mesh of the equation has no meaning there.
    """
    unsharded = {key: None for key in ("sharding", "out_sharding") if key in equation.params}
    params = {**equation.params, **unsharded, **changes}
    # Of the equation's context, only what random numbers depend on: the mesh has no meaning.
    random = jax.threefry_partitionable(equation.ctx.threefry_partitionable)
    return _bind(equation, inputs, params, random)


def _bind(
    equation: JaxprEqn,
    inputs: Sequence[PyTree],
    params: Mapping[str, object],
    context: AbstractContextManager[object],
) -> list[PyTree]:
    primitive = equation.primitive
    functions, options = (), primitive.get_bind_params(params)
    # Older versions of JAX return the functions to call separately from the parameters.
    if isinstance(options, tuple):
        functions, options = options
    with context:
        results = primitive.bind(*functions, *inputs, **options)
    if primitive.multiple_results:
        return list(results)
    return [results]


def evaluate_jaxpr(
    jaxpr: Jaxpr,
    env: dict[Var, T],
    handle: Callable[[int, JaxprEqn, list[T]], Sequence[T]],
    read_literal: Callable[[Literal], T] = lambda literal: literal.val,
) -> list[T]:
    """Evaluates a jaxpr with a custom interpretation of its equations.

    - `env`: the values of the constants and inputs, by variable. It is updated in place, and a
        variable is deleted after its last use, so that eager evaluation frees memory.
    - `handle`: returns the results of an equation, as `handle(index, equation, operands)`.
    - `read_literal`: returns the value of a literal.

    Returns the values of the jaxpr's outputs.
    """
    return evaluate_equations(jaxpr.eqns, jaxpr.outvars, env, handle, read_literal)


def evaluate_equations(
    equations: Sequence[JaxprEqn],
    outvars: Sequence[Any],
    env: dict[Var, T],
    handle: Callable[[int, JaxprEqn, list[T]], Sequence[T]],
    read_literal: Callable[[Literal], T] = lambda literal: literal.val,
) -> list[T]:
    """Evaluates some equations of a jaxpr as `evaluate_jaxpr` does, and returns the values of
    `outvars`."""
    indices: dict[Var, int] = {}  # of the last use of each variable
    for index, equation in enumerate(equations):
        # A result that nothing uses is deleted after the equation that computes it.
        indices.update(dict.fromkeys(variables((*equation.invars, *equation.outvars)), index))
    last: dict[int, list[Var]] = {}
    # What is returned is kept to the end.
    for var in indices.keys() - set(variables(outvars)):
        last.setdefault(indices[var], []).append(var)

    def read(atom: Atom) -> T:
        if isinstance(atom, Literal):
            return read_literal(atom)
        return env[atom]

    for index, equation in enumerate(equations):
        operands = [read(atom) for atom in equation.invars]
        with at_line_of(equation):
            results = handle(index, equation, operands)
        env.update(zip(equation.outvars, results, strict=True))
        for var in last.get(index, ()):
            del env[var]
    return [read(atom) for atom in outvars]


def initial_env(program: AnyJaxpr, inputs: Sequence[PyTree]) -> dict[Var, PyTree]:
    """The values of the constants and inputs of a program, by variable."""
    jaxpr = open_jaxpr(program)
    env: dict[Var, PyTree] = dict(zip(jaxpr.constvars, consts_of(program), strict=True))
    env.update(zip(jaxpr.invars, inputs, strict=True))
    return env


def evaluate_inlined(
    program: AnyJaxpr, inputs: Sequence[PyTree], is_inlined: Callable[[Call], bool]
) -> list[PyTree]:
    """Evaluates a program with the equations of some calls in place of the calls."""

    def handle(_: int, equation: JaxprEqn, operands: list[PyTree]) -> list[PyTree]:
        call = control_flow(equation)
        if isinstance(call, Call) and is_inlined(call):
            return evaluate_inlined(call.jaxpr, operands, is_inlined)
        return bind_again(equation, operands)

    return evaluate_jaxpr(open_jaxpr(program), initial_env(program, inputs), handle)


def at_line_of(equation: JaxprEqn) -> AbstractContextManager[None]:
    """A context in which operations have the line of the user's code that an equation has.

    An equation of a compiled function, such as `jnp.take`, has no such line, and stays at that of
    the call.
    """
    info = equation.source_info
    trace = info.traceback
    frames = ((frame.file_name, frame.line_num) for frame in getattr(trace, "frames", ()))
    if own_or_model_frame(frames) is None:
        trace = source_info_util.current().traceback
    names = source_info_util.current_name_stack() + info.name_stack
    return source_info_util.user_context(trace, name_stack=names)


def multiply_adds(equation: JaxprEqn) -> int | None:
    """Counts the multiply-adds of a contraction; None for other equations.

    Zeros that pad or dilate the input of a convolution are counted.
    """
    params = equation.params
    match equation.primitive.name:
        case "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            left = _shape(equation.invars[0])
            # Each element of the result is a sum over the contracted dimensions.
            return prod(_shape(equation.outvars[0])) * prod(left[d] for d in contracted)
        case "ragged_dot_general":
            # Each row belongs to one group, whichever dimension the groups are along.
            numbers = params["ragged_dot_dimension_numbers"]
            (_, contracted), (_, batch) = numbers.dot_dimension_numbers
            counted = {*contracted, *batch, *numbers.rhs_group_dimensions}
            left, right = map(_shape, equation.invars[:2])
            # Each element of the left side is multiplied with all outputs of its group.
            outputs = 1
            for dim, size in enumerate(right):
                if dim not in counted:
                    outputs *= size
            return prod(left) * outputs
        case "conv_general_dilated":
            kernel = _shape(equation.invars[1])
            # Multiply-adds of one element of the result: the kernel without its output features.
            taps = prod(kernel) // kernel[params["dimension_numbers"].rhs_spec[0]]
            return prod(_shape(equation.outvars[0])) * taps
        case (
            "dot_product_attention_fwd_wrapper"
            | "dot_product_attention_bwd_wrapper"
            | "dot_product_attention_fwd_splash"
            | "dot_product_attention_bwd_splash"
        ):
            # Two products forward, five backward, where the scores are recomputed.
            (batch, queries, heads, head_dim), (_, keys, *_) = map(_shape, equation.invars[:2])
            products = 2
            if "bwd" in equation.primitive.name:
                products = 5
            return products * batch * heads * queries * keys * head_dim
    return None


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape
