"""Quantises matrices while they are read, a few layers at a time."""

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp

from ..models._quantised_weight import Numbers, QuantisedWeight, quantised_weight
from ._matrix_roles import matrix_of
from ._read_plan import ArrayToRead

Fill = Callable[[Mapping[str, ArrayToRead]], dict[str, jax.Array]]

_MOST = 2**28  # bytes of a device that a part of a matrix has before it is quantised


def matrices_to_quantise(targets: Mapping[str, ArrayToRead], path: Path) -> list[str]:
    """The matrices of the layers, by their paths in the model.

    **Raises:**

    `ValueError` if there are none.
    """
    matrices = [name for name, target in targets.items() if matrix_of(target.tensor)]
    of_layers = [name for name in matrices if "layers" in name]
    if not of_layers:
        raise ValueError(
            f"The model at {path} has no matrices of layers to quantise. Load it without "
            "`quantise`, and choose its matrices by `redcoast.lora.quantise(model, targets=...)`."
        )
    return of_layers


def fill_quantised(
    targets: Mapping[str, ArrayToRead], numbers: Numbers, fill: Fill
) -> dict[str, QuantisedWeight]:
    """Creates quantised matrices. `fill` creates arrays from the files."""
    quantised: dict[str, QuantisedWeight] = {}
    for name, target in targets.items():
        matrix = matrix_of(target.tensor)
        assert matrix is not None
        quantise = partial(quantised_weight, numbers=numbers, axis=matrix.last_input(target.shape))
        quantise = jax.jit(quantise)
        parts: list[QuantisedWeight] = []
        for part in _parts(target):
            weight = quantise(fill({name: part})[name])
            # Waits, so that the array before is freed.
            parts.append(jax.block_until_ready(weight))
        quantised[name] = parts[0]
        if len(parts) > 1:
            quantised[name] = jax.jit(_concatenate)(parts)
    return quantised


def _parts(target: ArrayToRead) -> list[ArrayToRead]:
    """A matrix in parts of whole layers, if its first dimension counts them."""
    # A first dimension that is sharded, or is not of layers, is not divided.
    layers = target.shape[0]
    if not target.tensor.fields or target.box_shape[0] != layers:
        return [target]
    of_layer = prod(target.box_shape[1:]) * target.dtype.itemsize
    count = max(1, _MOST // of_layer)
    firsts = range(0, layers, count)
    return [target.layers_from(first, min(count, layers - first)) for first in firsts]


def _concatenate(parts: list[QuantisedWeight]) -> QuantisedWeight:
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *parts)
