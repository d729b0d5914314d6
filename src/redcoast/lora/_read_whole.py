"""Reads arrays whose tensors a file of adapters contains entirely."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from ..pretrained._lazy_tensor import Stored
from ..pretrained._read_plan import read_window
from ..pretrained._slices import locate
from ..pretrained._tensors import Tensor, tensor_names


def read_whole(
    tensor: Tensor, leaf: jax.Array | np.ndarray, stored: Mapping[str, Stored]
) -> jax.Array | np.ndarray:
    """Reads the tensors of an array; tensors that the file lacks are taken from `leaf`."""
    names = tensor_names(tensor, leaf.shape)
    # The whole array at once, with the dtype and the sharding of the model's.
    if stored.keys() >= {*names.values()}:
        window = locate(tensor, leaf.shape, tuple(map(slice, leaf.shape)))
        read = read_window(window, leaf.dtype, stored)
        array = window.place(read).astype(leaf.dtype)
        if isinstance(leaf, jax.Array):
            return jax.device_put(array, leaf.sharding)
        return array
    # The layers that are not in the file stay as they are.
    for index, name in names.items():
        if name in stored:
            part = read_at(tensor, leaf.shape, index, stored).astype(leaf.dtype)
            leaf = jnp.asarray(leaf).at[index].set(part)
    return leaf


def read_at(
    tensor: Tensor, shape: tuple[int, ...], index: tuple[int, ...], stored: Mapping[str, Stored]
) -> np.ndarray:
    """Reads an array of this shape at one index of its leading dimensions."""
    rest = shape[len(index) :]
    at = tuple(slice(i, i + 1) for i in index)
    window = locate(tensor, shape, (*at, *map(slice, rest)))
    # One tensor, as a stack of one.
    part = window.place(stored[window.names[0]].take(window.slices)[None])
    return part.reshape(rest)
