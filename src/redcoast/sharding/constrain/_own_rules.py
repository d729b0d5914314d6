"""Runs primitives of Equinox, such as `lineax.linear_solve`, inside of `jax.shard_map`.

What such a primitive runs is only known when it is lowered: a loop, a decomposition, or a function
on the host. It cannot be lowered inside of `jax.shard_map`, where arrays have other types than its
parameters say, and what it runs has other derivatives, or none. A primitive takes its place that is
lowered to what it runs, and whose derivative rules are those of the primitive itself.
"""

import functools as ft
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec as P
from jax.sharding import get_abstract_mesh, use_abstract_mesh

from ...core._control_flow import AnyJaxpr, open_jaxpr
from ...core._jaxpr import bind_again, struct_of
from ..program._trace import Arrays
from ._custom_rules import replace_chosen

Evaluate = Callable[[AnyJaxpr, Sequence[Any]], Arrays]


@dataclass(frozen=True)
class _Replaced:
    """An equation of a primitive of Equinox, and what evaluates a jaxpr in its place.

    Jaxprs are traced outside of the region, where arrays have the types that the parameters say.
    """

    equation: JaxprEqn
    evaluate: Evaluate

    def run(self, fn: Callable[..., Any], *inputs: jax.Array) -> Arrays:
        """The results of a rule of the primitive."""
        return self.evaluate(_trace(fn, inputs, self.equation), inputs)


def bind_replaced(
    equation: JaxprEqn, inputs: Sequence[Any], changes: Mapping[str, object], evaluate: Evaluate
) -> Arrays:
    """Binds an equation inside of `jax.shard_map`, with some parameters changed.

    `evaluate` evaluates jaxprs there.
    """
    bind = ft.partial(equation.primitive.bind, **{**equation.params, **changes})
    (local,) = open_jaxpr(_trace(bind, inputs, equation)).eqns
    return list(_replaced_p.bind(*inputs, by=_Replaced(local, evaluate)))


def _trace(fn: Callable[..., Any], inputs: Sequence[Any], equation: JaxprEqn) -> AnyJaxpr:
    structs = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in inputs]
    with use_abstract_mesh(equation.ctx.cur_abstract_mesh):
        return jax.make_jaxpr(fn)(*structs)


def with_all_axes(run: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """A function that each device runs on all that it has, inside of `jax.shard_map` over some
    axes. It has no derivative."""
    mesh = get_abstract_mesh()
    others = frozenset(mesh.axis_names).difference(mesh.manual_axes)
    if not others:
        return run
    return jax.shard_map(run, in_specs=P(), out_specs=P(), axis_names=others, check_vma=False)


def _impl(*operands: jax.Array, by: _Replaced) -> Arrays:
    impl = ft.partial(by.equation.primitive.impl, **by.equation.params)
    return list(with_all_axes(lambda *xs: tuple(by.run(impl, *xs)))(*operands))


def _jvp(
    primals: Sequence[jax.Array], tangents: Sequence[Any], *, by: _Replaced
) -> tuple[Arrays, Arrays]:
    equation = by.equation
    # `by.run` traces a function of arrays, so that symbolic zeros are left out and put back.
    moving = list(map(_is_nonzero, tangents))
    count = len(primals)
    is_moving: list[bool] = []  # of the results

    def rule(*inputs: jax.Array) -> Arrays:
        push = ad.primitive_jvps[equation.primitive]
        all_tangents = replace_chosen(tangents, moving, inputs[count:])
        results, pushed = push(inputs[:count], all_tangents, **equation.params)
        is_moving[:] = map(_is_nonzero, pushed)  # known once the rule is traced
        return [*results, *filter(_is_nonzero, pushed)]

    arrays = by.run(rule, *primals, *itertools.compress(tangents, moving))
    results, pushed = arrays[: len(is_moving)], arrays[len(is_moving) :]
    zeros = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]
    return results, replace_chosen(zeros, is_moving, pushed)


def _transpose(cotangents: Sequence[Any], *inputs: Any, by: _Replaced) -> Arrays:
    equation = by.equation
    used = list(map(_is_nonzero, cotangents))
    # The operands that the primitive is linear in have no values here.
    known = [not ad.is_undefined_primal(x) for x in inputs]
    is_array: list[bool] = []  # of the cotangents of the operands

    def rule(*arrays: jax.Array) -> Arrays:
        pull = ad.primitive_transposes[equation.primitive]
        all_used = replace_chosen(cotangents, used, arrays[: sum(used)])
        all_inputs = replace_chosen(inputs, known, arrays[sum(used) :])
        pulled = pull(all_used, *all_inputs, **equation.params)
        is_array[:] = [isinstance(x, jax.Array) for x in pulled]
        return list(itertools.compress(pulled, is_array))

    of_used, of_known = itertools.compress(cotangents, used), itertools.compress(inputs, known)
    arrays = by.run(rule, *of_used, *of_known)
    return replace_chosen([None] * len(inputs), is_array, arrays)


def _is_nonzero(tangent: object) -> bool:
    return type(tangent) is not ad.Zero


def _batch(inputs: Sequence[jax.Array], dims: Sequence[int | None], *, by: _Replaced) -> Any:
    # The same for several arrays at once, by the rules of the primitive itself.
    run = jax.vmap(lambda *xs: bind_again(by.equation, xs), in_axes=tuple(dims))
    results = by.run(run, *inputs)
    return results, [0] * len(results)


def _types(by: _Replaced) -> list[ShapedArray]:
    structs = map(struct_of, by.equation.outvars)
    return [ShapedArray(struct.shape, struct.dtype) for struct in structs]


_replaced_p = Primitive("redcoast_local")
_replaced_p.multiple_results = True
_replaced_p.def_impl(_impl)
_replaced_p.def_abstract_eval(lambda *avals, by: _types(by))
mlir.register_lowering(_replaced_p, mlir.lower_fun(_impl, multiple_results=True))
ad.primitive_jvps[_replaced_p] = _jvp
ad.primitive_transposes[_replaced_p] = _transpose
batching.primitive_batchers[_replaced_p] = _batch
