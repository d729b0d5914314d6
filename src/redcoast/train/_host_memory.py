"""Arrays that a plan keeps in the memory of the host, such as the state of an optimizer."""

import jax
from jaxtyping import PyTree


def on_device(tree: PyTree) -> PyTree:
    """A tree whose arrays in the memory of the host are copied to the device."""
    return jax.tree.map(_copy_to_device, tree)


def where_they_were(tree: PyTree, before: PyTree) -> PyTree:
    """A tree whose arrays are in the memory of the host where those of a like tree are."""
    if not any(map(_is_on_host, jax.tree.leaves(before))):
        return tree
    return jax.tree.map(_copy_to_same, tree, before)


def _copy_to_device(x: PyTree) -> PyTree:
    if _is_on_host(x):
        return jax.device_put(x, jax.memory.Space.Device)
    return x


def _copy_to_same(x: PyTree, before: PyTree) -> PyTree:
    if _is_on_host(before):
        return jax.device_put(x, jax.memory.Space.Host)
    return x


def _is_on_host(x: PyTree) -> bool:
    return isinstance(x, jax.Array) and jax.typeof(x).memory_space == jax.memory.Space.Host
