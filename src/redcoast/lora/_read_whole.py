"""Reads arrays whose tensors a file of adapters contains entirely."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..pretrained._lazy_tensor import Stored
from ..pretrained._slices import locate
from ..pretrained._tensors import Tensor, tensor_names


def read_whole(tensor: Tensor, leaf: Any, stored: Mapping[str, Stored]) -> Any:
    """Reads the tensors of an array; tensors that the file lacks are taken from `leaf`."""
    names = tensor_names(tensor, leaf.shape)
    if all(name in stored for name in names.values()):
        window = locate(tensor, leaf.shape, tuple(slice(n) for n in leaf.shape))
        read = np.stack([stored[name].take(window.slices) for name in window.names])
        array = window.place(read).astype(leaf.dtype)
        return jax.device_put(array, leaf.sharding) if isinstance(leaf, jax.Array) else array
    for index in (i for i, name in names.items() if name in stored):
        rest = (slice(n) for n in leaf.shape[len(index) :])
        window = locate(tensor, leaf.shape, (*(slice(i, i + 1) for i in index), *rest))
        part = window.place(stored[window.names[0]].take(window.slices)[None])
        part = part.reshape(leaf.shape[len(index) :]).astype(leaf.dtype)
        leaf = jnp.asarray(leaf).at[index].set(part)
    return leaf
