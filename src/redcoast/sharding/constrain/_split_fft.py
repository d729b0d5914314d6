"""Runs Fourier transforms along dimensions that are split: rows of a batch, or parts of an example.

A device needs all elements along a dimension that it transforms. The array is split along another
dimension meanwhile, by an all-to-all before and one after the transform, or gathered if no other
dimension divides. The spectrum of a split example stays split along the other dimension until the
inverse transform: what selects or scales frequencies sends nothing. XLA's own partitioning of such
a transform can end the process.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import JaxprEqn
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ...core._control_flow import primitive_name
from ...core._jaxpr import struct_of
from .._mesh_axes import parts
from ..program._trace import Arrays
from ..tree._overrides import spec_axes
from ._bound_equation import BoundEquation
from ._shardings import Shardings


def run_split_fft(bound: BoundEquation) -> Arrays | None:
    """The result of a Fourier transform, or None if rows are split and no transformed dimension."""
    equation, shardings = bound.equation, bound.shardings
    (x,), (value,), (result,) = bound.operands, bound.values, bound.results
    lengths = tuple(equation.params["fft_lengths"])
    entries = list(shardings.spec(value))
    transformed = range(x.ndim - len(lengths), x.ndim)
    keeps_turned = shardings.splits_examples
    if not keeps_turned and set(entries[transformed.start :]) <= {None}:
        return None
    whole = _Stage(equation.params["fft_type"], tuple(transformed), lengths)
    # Constrained before and after, the cotangents are too.
    if not (keeps_turned and whole.is_inverse):
        x = shardings.constrain(x, value)
    if _moved(entries, transformed, x.shape, shardings.mesh.shape) is not None:
        stages = [whole]
    else:
        stages = _stages(whole)
    specs: list[P] = []  # while each stage runs
    shape = list(x.shape)  # before each stage
    for stage in stages:
        moved = _moved(entries, stage.dims, shape, shardings.mesh.shape)
        if moved is None:
            # No other dimension divides: every device has and transforms all of it.
            x = _transform(shardings.with_spec(x, P()), whole, P(), shardings)
            return [shardings.constrain(x, result)]
        specs.append(P(*moved))
        entries = moved
        # The spectrum of a real array has about half of its last dimension.
        if stage.name == "RFFT":
            shape[stage.dims[-1]] = stage.lengths[-1] // 2 + 1
        elif stage.name == "IRFFT":
            shape[stage.dims[-1]] = stage.lengths[-1]
    for stage, spec in zip(stages, specs, strict=True):
        x = _transform(shardings.with_spec(x, spec), stage, spec, shardings)
    if whole.is_inverse or not keeps_turned:
        x = shardings.constrain(x, result)
    return [x]


def writes_slice(equation: JaxprEqn) -> bool:
    """Whether an operation writes one slice of an array, as of the low frequencies of a spectrum.

    Its result is split like its operands, which may be spectra.
    """
    is_scatter = primitive_name(equation) == "scatter"
    return is_scatter and struct_of(equation.invars[1]).ndim == 1


@dataclass(frozen=True)
class _Stage:
    """A transform along some dimensions."""

    kind: object  # a `jax.lax.FftType`; an integer in some versions of JAX
    dims: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def name(self) -> str:
        return str(getattr(self.kind, "name", self.kind)).upper()

    @property
    def is_inverse(self) -> bool:
        """Whether it transforms a spectrum into a field."""
        return self.name in ("IFFT", "IRFFT")


def _stages(whole: _Stage) -> list[_Stage]:
    """Transforms along one dimension each, which are the transform along all of them."""
    name = whole.name
    forward, backward = jax.lax.FftType.FFT, jax.lax.FftType.IFFT
    kinds = [forward] * len(whole.dims)
    if whole.is_inverse:
        kinds = [backward] * len(whole.dims)
    # The array is real before or after the last dimension only.
    if name == "RFFT":
        kinds[-1] = jax.lax.FftType.RFFT
    if name == "IRFFT":
        kinds[-1] = jax.lax.FftType.IRFFT
    places = zip(kinds, whole.dims, whole.lengths, strict=True)
    stages = [_Stage(kind, (d,), (length,)) for kind, d, length in places]
    if name == "RFFT":
        return [stages[-1], *stages[:-1]]
    return stages


def _moved(
    entries: Sequence[object], dims: Sequence[int], shape: Sequence[int], sizes: Mapping[str, int]
) -> list[tuple[str, ...] | None] | None:
    """The entries of a spec without the dimensions `dims`, which are split along others instead.

    None if no other dimension divides.
    """
    moved = list(map(spec_axes, entries))
    others = [d for d in range(len(shape)) if d not in dims]
    for d in dims:
        axes, moved[d] = moved[d], ()
        if not axes:
            continue
        best, largest = None, 0  # the dimension with the largest part on each device
        for other in others:
            part, left = divmod(shape[other], parts((*moved[other], *axes), sizes))
            if left == 0 and (best is None or part > largest):
                best, largest = other, part
        if best is None:
            return None
        moved[best] = (*moved[best], *axes)
    return [axes or None for axes in moved]


def _transform(x: jax.Array, stage: _Stage, spec: P, shardings: Shardings) -> jax.Array:
    last = tuple(range(x.ndim - len(stage.dims), x.ndim))
    mesh = shardings.mesh
    is_cpu = isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu"

    def local(x: jax.Array) -> jax.Array:
        if stage.dims != last:
            x = jnp.moveaxis(x, stage.dims, last)
        if is_cpu:
            x = _row_major(x)
        x = jax.lax.fft(x, stage.kind, stage.lengths)
        if is_cpu:
            x = _row_major(x)
        if stage.dims != last:
            x = jnp.moveaxis(x, last, stage.dims)
        return x

    run = jax.shard_map(local, mesh=shardings.mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(run)(x)


def _row_major(x: jax.Array) -> jax.Array:
    """The array, and its cotangent, with the last dimension contiguous in memory.

    XLA for CPUs assigns other layouts to a transform beside a convolution, and then refuses to run
    it (JAX 0.10.2 to 0.12).
    """
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
