"""A loss that a run traces once, for its plan and for its step."""

import functools as ft
from collections.abc import Callable, Hashable
from typing import NamedTuple

import jax
from jax.extend.core import jaxpr_as_fun
from jaxtyping import PyTree

from ..core._control_flow import AnyJaxpr, open_jaxpr
from ..core._dtypes import keep_large_counts
from ..core._jaxpr import as_traced
from ..core._pytree import Arrays, Static, abstract_array, join, split
from ..core._target import sequence_parts, target
from ..core._tracing import traced_mesh
from ._debug_settings import is_debugged
from ._loss import check_metrics


class _LossProgram(NamedTuple):
    """What a function computes from the arrays of its arguments."""

    jaxpr: AnyJaxpr
    output: Static
    returns_model: bool  # whether its third result is the model that it was called with


def traced_once(loss_fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Returns `loss_fn(model, batch, key)`, which is traced once for each kind of arguments.

    It is for one run: a later run traces the function again, and notices whatever it reads that has
    changed.
    """
    programs: dict[Hashable, _LossProgram] = {}

    # Messages name the user's function.
    @ft.wraps(loss_fn, updated=())
    def loss(model: PyTree, *args: PyTree) -> PyTree:
        arrays, static = split((model, *args))
        key = _trace_key(arrays, static)
        if key is None:
            return loss_fn(model, *args)
        if key not in programs:
            programs[key] = _trace(loss_fn, arrays, static)
        program = programs[key]
        outvars = open_jaxpr(program.jaxpr).outvars
        # Numbers that the function returns are arrays here too.
        results = list(map(as_traced, jaxpr_as_fun(program.jaxpr)(*arrays), outvars))
        result = join(results, program.output)
        if program.returns_model:
            return (*result[:2], model)
        return result

    return loss


def _trace_key(arrays: Arrays, static: Static) -> Hashable | None:
    """What a trace depends on, or None if the function is to be called itself."""
    if is_debugged():  # operation by operation, without a trace
        return None
    try:
        hash(static)
    except TypeError:  # such as of a list in a leaf that is no array
        return None
    types: list[Hashable] = []
    for x in map(abstract_array, arrays):
        types.append((x.shape, x.dtype, x.weak_type))
    meshes = traced_mesh(), jax.sharding.get_abstract_mesh()
    return static, tuple(types), meshes, target(), sequence_parts()


def _trace(loss_fn: Callable[..., PyTree], arrays: Arrays, static: Static) -> _LossProgram:
    outputs: list[tuple[Static, bool]] = []  # the last is of the trace that JAX returns

    def flat(*arrays: jax.Array) -> Arrays:
        model, *args = join(list(arrays), static)
        result = loss_fn(model, *args)
        check_metrics(result, model)  # before JAX, whose error would name no metric
        returns_model = type(result) is tuple and len(result) == 3 and result[2] is model
        flat_result, output = split(result)
        outputs.append((output, returns_model))
        return keep_large_counts(flat_result)

    flat.__wrapped__ = loss_fn  # JAX's messages name this function  # type: ignore[attr-defined]
    jaxpr = jax.make_jaxpr(flat)(*map(abstract_array, arrays))
    return _LossProgram(jaxpr, *outputs[-1])
