"""Runs Fourier transforms along dimensions that are split: rows of a batch, or parts of an example.

A device needs all elements along a dimension that it transforms. The array is split along another
dimension meanwhile, by an all-to-all before and one after the transform, or gathered if no other
dimension divides. XLA's own partitioning of such a transform can end the process.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import jax
from jax.extend.core import JaxprEqn
from jax.sharding import PartitionSpec as P

from ...core._jaxpr import bind_again
from ..program._graph import Value
from ..tree._overrides import spec_axes
from ._shardings import Shardings


def run_split_fft(
    equation: JaxprEqn, operand: Any, value: Value, result: Value, shardings: Shardings
) -> list[Any] | None:
    """The result of a Fourier transform, or None if no transformed dimension is split."""
    lengths = tuple(equation.params["fft_lengths"])
    entries, first = list(shardings.spec(value)), operand.ndim - len(lengths)
    transformed = range(first, operand.ndim)
    if not any(entries[d] is not None for d in transformed):
        return None
    # Constrained before and after, the cotangents are too.
    x, kind = shardings.constrain(operand, value), equation.params["fft_type"]
    stages = _stages(kind, lengths, first)
    if _moved(entries, transformed, x.shape, shardings.mesh.shape) is not None:
        stages = [(kind, tuple(transformed), lengths)]
    specs = _specs_of_stages(entries, [dims for _, dims, _ in stages], x.shape, shardings)
    if specs is None:
        x = shardings.with_spec(x, P())
        x = shardings.with_spec(bind_again(equation, [x])[0], P())
        return [shardings.constrain(x, result)]
    for (kind, dims, sizes), spec in zip(stages, specs, strict=True):
        x = _transform(shardings.with_spec(x, spec), kind, dims, sizes, spec, shardings)
    return [shardings.constrain(x, result)]


def _specs_of_stages(
    entries: Sequence[Any],
    stages: Sequence[tuple[int, ...]],
    shape: Sequence[int],
    shardings: Shardings,
) -> list[P] | None:
    """The spec during the transform of each stage's dimensions; None if another dimension lacks."""
    specs: list[P] = []
    for dims in stages:
        moved = _moved(entries, dims, shape, shardings.mesh.shape)
        if moved is None:
            return None
        entries = moved
        specs.append(P(*moved))
    return specs


def _stages(
    kind: Any, lengths: tuple[int, ...], first: int
) -> list[tuple[Any, tuple[int, ...], tuple[int, ...]]]:
    """Transforms of one dimension each, which are the transform of several: the kind, the
    dimension, and its length."""
    name = str(getattr(kind, "name", kind)).upper()
    dims = [first + i for i in range(len(lengths))]
    steps = [((d,), (size,)) for d, size in zip(dims, lengths, strict=True)]
    forward, backward = jax.lax.FftType.FFT, jax.lax.FftType.IFFT
    if name == "RFFT":
        *others, last = steps
        return [(jax.lax.FftType.RFFT, *last), *((forward, *one) for one in others)]
    if name == "IRFFT":
        *others, last = steps
        return [*((backward, *one) for one in others), (jax.lax.FftType.IRFFT, *last)]
    return [(backward if name == "IFFT" else forward, *one) for one in steps]


def _moved(
    entries: Sequence[Any], dims: Sequence[int], shape: Sequence[int], sizes: Any
) -> list[Any] | None:
    """The entries of a spec without the dimensions `dims`, which are split along others instead."""
    moved = [spec_axes(entry) for entry in entries]
    for d in dims:
        axes, moved[d] = moved[d], ()
        if not axes:
            continue

        def parts(other: int, axes: tuple[str, ...] = axes) -> int:
            return prod(sizes[axis] for axis in (*moved[other], *axes))

        others = [other for other in range(len(shape)) if other not in dims]
        free = [other for other in others if shape[other] % parts(other) == 0]
        if not free:
            return None
        best = max(free, key=lambda other: (shape[other] // parts(other), -other))
        moved[best] = (*moved[best], *axes)
    return [axes or None for axes in moved]


def _transform(
    x: Any, kind: Any, dims: tuple[int, ...], lengths: Any, spec: P, shardings: Shardings
) -> Any:
    last = tuple(range(x.ndim - len(dims), x.ndim))

    def local(x: Any) -> Any:
        if dims == last:
            return jax.lax.fft(x, kind, lengths)
        found = jax.lax.fft(jax.numpy.moveaxis(x, dims, last), kind, lengths)
        return jax.numpy.moveaxis(found, last, dims)

    run = jax.shard_map(local, mesh=shardings.mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(run)(x)
