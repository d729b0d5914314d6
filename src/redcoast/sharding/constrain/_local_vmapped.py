"""Runs primitives of Equinox under `vmap`, such as `lineax.linear_solve`, on each device's rows.

What such a primitive runs is only known when it is lowered: a loop, a decomposition, or a function
on the host. It cannot be lowered inside of `jax.shard_map`, where arrays have other types than its
parameters say, and what it runs has no derivative. A primitive takes its place that is lowered to
`jax.shard_map` of what it runs for the rows of one device, and whose derivative rules are those of
the primitive itself, with the same replacement.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, Mesh, use_abstract_mesh
from jax.sharding import PartitionSpec as P

from ...core._control_flow import AnyJaxpr, Call, CallKind, consts_of, control_flow, open_jaxpr
from ...core._jaxpr import bind_again, evaluate_jaxpr, struct_of
from .._mesh_axes import parts
from ..program._local_states import VMAPPED_SIZE, NotLocal, State, is_vmapped
from ..program._trace import Arrays
from ._custom_rules import replace_chosen
from ._local_region import LocalRegion, evaluate_row, waits_for_rows

_AXES = "__batch_axes"


@dataclass(frozen=True)
class _Rows:
    """A vmapped primitive, whose elements are rows that are divided over `axes` of a mesh."""

    equation: JaxprEqn
    mesh: Mesh | AbstractMesh
    axes: tuple[str, ...]

    @property
    def count(self) -> int:
        return parts(self.axes, self.mesh.shape)

    def trace(self) -> AnyJaxpr:
        """What the primitive runs for the rows of one device."""
        params = dict(self.equation.params)
        params[VMAPPED_SIZE] //= self.count
        avals: list[jax.ShapeDtypeStruct] = []
        for atom, axis in zip(self.equation.invars, params[_AXES], strict=True):
            aval = struct_of(atom)
            shape = list(aval.shape)
            if axis is not None:
                shape[axis] //= self.count
            avals.append(jax.ShapeDtypeStruct(tuple(shape), aval.dtype))
        # Outside of `jax.shard_map`, where arrays have the types that the parameters say.
        with use_abstract_mesh(self.equation.ctx.cur_abstract_mesh):
            return jax.make_jaxpr(partial(self.equation.primitive.impl, **params))(*avals)

    def run(self, *operands: jax.Array) -> Sequence[jax.Array]:
        """The results, of which each device computes its rows."""
        # A loop without a derivative: the rules of the primitive replace it.
        region = LocalRegion(self.mesh, self.axes, forward_only=True, of_row=True)
        jaxpr = self.trace()
        specs: list[P] = []
        for axis in self.equation.params[_AXES]:
            spec = P()
            if axis is not None:
                spec = P(*[None] * axis, self.axes)
            specs.append(spec)
        # No gradient flows through it, so that all axes can be manual, as calls of the host need.
        run = jax.shard_map(
            lambda *inputs: tuple(evaluate_row(region, jaxpr, inputs)),
            mesh=self.mesh,
            in_specs=tuple(specs),
            out_specs=(P(self.axes),) * len(self.equation.outvars),
            check_vma=False,
        )
        return jax.jit(run)(*operands)

    def replace_in(self, jaxpr: AnyJaxpr, inputs: Sequence[object]) -> Arrays:
        """Evaluates a derivative rule, in which each device computes its rows too."""
        opened = open_jaxpr(jaxpr)
        arguments = zip(
            (*opened.constvars, *opened.invars), (*consts_of(jaxpr), *inputs), strict=True
        )

        def handle(index: int, equation: JaxprEqn, operands: Arrays) -> Arrays:
            flow = control_flow(equation)
            if isinstance(flow, Call) and flow.kind is CallKind.PLAIN:
                return self.replace_in(flow.jaxpr, operands)
            same_rows = is_vmapped(equation) and (
                equation.params[VMAPPED_SIZE] == self.equation.params[VMAPPED_SIZE]
            )
            if same_rows and waits_for_rows(equation):
                return _local_p.bind(*operands, rows=_Rows(equation, self.mesh, self.axes))
            return bind_again(equation, operands)

        return evaluate_jaxpr(opened, dict(arguments), handle)


def check_vmapped(equation: JaxprEqn, states: Sequence[State], region: LocalRegion) -> None:
    """Raises `NotLocal` if the elements of a vmapped primitive are not the rows.

    `states` are the dimensions of the operands that are rows.
    """
    pairs = zip(states, equation.params[_AXES], strict=True)
    if any(state is not None and state != axis for state, axis in pairs):
        raise NotLocal("a primitive of Equinox is applied along rows")
    if equation.params[VMAPPED_SIZE] % parts(region.axes, region.mesh.shape):
        raise NotLocal("a primitive of Equinox is applied to rows that do not divide")


def run_vmapped(
    equation: JaxprEqn, operands: Arrays, states: Sequence[State], region: LocalRegion
) -> Arrays:
    """The results of a vmapped primitive, of which each device computes those of its rows.

    Raises `NotLocal`.
    """
    check_vmapped(equation, states, region)
    return list(_local_p.bind(*operands, rows=_Rows(equation, region.mesh, region.axes)))


def _jvp(
    primals: Sequence[jax.Array], tangents: Sequence[Any], *, rows: _Rows
) -> tuple[Arrays, Arrays]:
    equation = rows.equation
    moving = list(map(_is_nonzero, tangents))
    nonzero = list(itertools.compress(tangents, moving))
    is_moving: list[bool] = []  # of the results
    zeros: list[Any] = []  # those that are not

    def rule(primals: Sequence[jax.Array], nonzero: Sequence[jax.Array]) -> tuple[Arrays, Arrays]:
        push = ad.primitive_jvps[equation.primitive]
        all_tangents = replace_chosen(tangents, moving, nonzero)
        results, pushed = push(primals, all_tangents, **equation.params)
        is_moving[:] = map(_is_nonzero, pushed)
        zeros[:] = replace_chosen(pushed, is_moving, [None] * sum(is_moving))
        return list(results), list(filter(_is_nonzero, pushed))

    # Traced for all rows, and then evaluated with what each device has.
    jaxpr = jax.make_jaxpr(rule)(primals, nonzero)
    arrays = rows.replace_in(jaxpr, [*primals, *nonzero])
    count = len(zeros)
    return arrays[:count], replace_chosen(zeros, is_moving, arrays[count:])


def _transpose(cotangents: Sequence[Any], *inputs: Any, rows: _Rows) -> Arrays:
    equation = rows.equation
    used = list(map(_is_nonzero, cotangents))
    known = [not ad.is_undefined_primal(x) for x in inputs]
    of_used = list(itertools.compress(cotangents, used))
    of_known = list(itertools.compress(inputs, known))
    is_array: list[bool] = []  # of the cotangents of the operands
    others: list[Any] = []  # those that are not

    def rule(of_used: Sequence[jax.Array], of_known: Sequence[jax.Array]) -> Arrays:
        pull = ad.primitive_transposes[equation.primitive]
        all_used = replace_chosen(cotangents, used, of_used)
        pulled = pull(all_used, *replace_chosen(inputs, known, of_known), **equation.params)
        is_array[:] = [isinstance(x, jax.Array) for x in pulled]
        others[:] = replace_chosen(pulled, is_array, [None] * sum(is_array))
        return list(itertools.compress(pulled, is_array))

    jaxpr = jax.make_jaxpr(rule)(of_used, of_known)
    arrays = rows.replace_in(jaxpr, [*of_used, *of_known])
    return replace_chosen(others, is_array, arrays)


def _is_nonzero(tangent: object) -> bool:
    return type(tangent) is not ad.Zero


def _batch(inputs: Sequence[jax.Array], dims: Sequence[int | None], *, rows: _Rows) -> Any:
    # The same for several arrays at once, by the rules of the primitive itself.
    run = jax.vmap(lambda *xs: bind_again(rows.equation, xs), in_axes=tuple(dims))
    results = run(*inputs)
    return results, [0] * len(results)


_local_p = Primitive("redcoast_local")
_local_p.multiple_results = True
_local_p.def_impl(lambda *operands, rows: list(rows.run(*operands)))
_local_p.def_abstract_eval(lambda *avals, rows: [var.aval for var in rows.equation.outvars])
mlir.register_lowering(
    _local_p, mlir.lower_fun(lambda *operands, rows: rows.run(*operands), multiple_results=True)
)
ad.primitive_jvps[_local_p] = _jvp
ad.primitive_transposes[_local_p] = _transpose
batching.primitive_batchers[_local_p] = _batch
