"""Runs operations that XLA cannot partition on the part of their operands that a device has.

XLA gathers the operands of Fourier transforms, matrix decompositions and triangular solves, on some
devices, although they act on each transform or matrix alone, and it cannot partition kernels. The
table of operations says along which dimensions each element is computed alone, such as the rows and
heads of attention; `jax.shard_map` divides those that are sharded.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import prod

import jax
from jax.extend.core import JaxprEqn
from jax.sharding import PartitionSpec as P

from ...core._control_flow import primitive_name
from ...core._jaxpr import bind_local
from ...core._pallas import independent_dims, of_fewer
from .._mesh_axes import parts, used_axes
from ..operations import Dimension, Factor, Rule, opaque_rule, rule_of
from ..operations._batched_rules import DECOMPOSITIONS
from ..program._graph import Value
from ..program._trace import Arrays
from ..tree._overrides import spec_axes
from ._bound_equation import BoundEquation
from ._shardings import Shardings

_WHOLE_ALONG_SOME = DECOMPOSITIONS | frozenset(["approx_top_k", "fft", "sort", "top_k"])
PALLAS = "pallas_call"
# The kernel for attention on TPUs. Where devices cannot divide it, it is operations instead that
# XLA partitions.
_ATTENTION = frozenset(["dot_product_attention_bwd_splash", "dot_product_attention_fwd_splash"])
_KERNELS = _ATTENTION | {PALLAS}
# JAX implements these by loops that go on until all elements have converged.
_ITERATED = frozenset(
    """
    igamma igamma_grad_a igammac random_gamma random_gamma_grad regularized_incomplete_beta
    """.split()  # noqa: SIM905
)


def acts_on_parts(equation: JaxprEqn) -> bool:
    """Whether an operation acts on parts alone that XLA computes together: vectors and matrices
    that are needed as a whole, elements that are iterated on, or those of a kernel."""
    return primitive_name(equation) in _WHOLE_ALONG_SOME | _ITERATED | _KERNELS


def run_operation(bound: BoundEquation) -> Arrays | None:
    """The results of an operation that runs on each device alone, or None if it does not."""
    equation, shardings = bound.equation, bound.shardings
    if not acts_on_parts(equation):
        return None
    name, rule = primitive_name(equation), rule_of(equation)
    if name == PALLAS and rule is None:
        rule = opaque_rule(equation)
    if rule is None:
        return None
    values = list(map(bound.scope.value_of, (*equation.invars, *equation.outvars)))
    axes = _axes_of_factors(rule, values, shardings)
    runs_whole = name in _KERNELS and prod(shardings.mesh.shape.values()) > 1
    if not axes and not runs_whole:
        return None
    if name in _ATTENTION and not _divide(axes, rule, values, shardings):
        return None
    used = frozenset(itertools.chain.from_iterable(axes.values()))
    changes: dict[str, object] = {}
    if name == PALLAS:
        changes = _of_part(equation, rule, axes, shardings.mesh.shape)
    if name in _KERNELS:
        # Kernels cannot be lowered for TPUs if XLA partitions along any axis.
        used = frozenset(shardings.mesh.axis_names)
    spec_of = partial(_spec, axes)
    run = jax.shard_map(
        lambda *inputs: tuple(bind_local(equation, inputs, changes)),
        mesh=shardings.mesh,
        in_specs=tuple(map(spec_of, rule.operands)),
        out_specs=tuple(map(spec_of, rule.results)),
        axis_names=used,
        check_vma=False,
    )
    return list(jax.jit(run)(*bound.operands))


def _of_part(
    equation: JaxprEqn, rule: Rule, axes: dict[Factor, tuple[str, ...]], sizes: Mapping[str, int]
) -> dict[str, object]:
    """The parameters of a kernel for the part of the operands that a device has."""
    counts: dict[int, int] = {}
    dims = independent_dims(equation)
    if dims is None:
        return {}
    for dimensions, of_grid in zip((*rule.operands, *rule.results), dims, strict=True):
        for dimension, dim in zip(dimensions, of_grid, strict=True):
            if dim is not None:
                counts[dim] = parts(axes.get(dimension[0], ()), sizes)
    return of_fewer(equation, counts)


def _axes_of_factors(
    rule: Rule, values: Iterable[Value | None], shardings: Shardings
) -> dict[Factor, tuple[str, ...]]:
    """The axes that each dimension is sharded over along which the operation acts on each element
    alone."""
    sizes = shardings.mesh.shape
    axes: dict[Factor, tuple[str, ...]] = {}
    for value, dimensions in zip(values, (*rule.operands, *rule.results), strict=True):
        if value is None:
            continue
        for dimension, entry in zip(dimensions, shardings.spec(value), strict=True):
            names = used_axes(spec_axes(entry), sizes)
            # A dimension of several factors may be sharded within one that is needed as a whole.
            if not names or len(dimension) != 1:
                continue
            factor = dimension[0]
            used = set(itertools.chain.from_iterable(axes.values()))
            is_free = rule.is_carried(factor) and factor not in axes and used.isdisjoint(names)
            if is_free and rule.sizes[factor] % parts(names, sizes) == 0:
                axes[factor] = names
    return axes


def _divide(
    axes: dict[Factor, tuple[str, ...]],
    rule: Rule,
    values: Iterable[Value | None],
    shardings: Shardings,
) -> bool:
    """Whether all arrays are sharded over these axes, and divide evenly.

    There may be fewer heads of keys than of queries.
    """
    sizes = shardings.mesh.shape
    for value, dimensions in zip(values, (*rule.operands, *rule.results), strict=True):
        if value is None:
            continue
        spec = shardings.spec(value)
        for size, (factor, *_), entry in zip(value.shape, dimensions, spec, strict=True):
            if not rule.is_carried(factor):
                continue
            names = used_axes(spec_axes(entry), sizes)
            if names != axes.get(factor, ()) or size % parts(names, sizes):
                return False
    return True


def _spec(axes: dict[Factor, tuple[str, ...]], dimensions: Sequence[Dimension]) -> P:
    entries: list[tuple[str, ...] | None] = [None] * len(dimensions)
    for d, dimension in enumerate(dimensions):
        if len(dimension) == 1:
            entries[d] = axes.get(dimension[0])
    return P(*entries)
