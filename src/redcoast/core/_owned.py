"""Detects memory that a user's function may overwrite after returning it, such as a reused buffer.

Such memory is copied before the function is called again, unless its reference counts show that
nothing else refers to it.
"""

import copy
import functools as ft
import sys
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree


def held_elsewhere(objects: Sequence[object], known: Iterable[object] = ()) -> list[bool]:
    """Whether other code may refer to the memory of each array, or of the arrays in each container.

    This is so if there are other references to an array, to its base, or to a dict or list; if the
    memory does not belong to NumPy (a memory map); and for JAX arrays on the CPU, which may be
    views of NumPy arrays.

    - `objects`: arrays, dicts, lists and tuples, to which the caller refers only by this sequence.
        All other objects are treated as immutable.
    - `known`: arrays that are never written.
    """
    visited: dict[int, object] = {}
    references: dict[int, int] = {}
    for x in objects:
        _visit(x, visited, references)
    x = None  # it is a reference, too
    referenced = {key for key in visited if _references(visited, key) > references[key] + _ALONE}
    safe = {id(array) for array in known}
    return [_is_held(x, referenced, safe) for x in objects]


def are_fresh(arrays: list[np.ndarray]) -> bool:
    """Whether arrays of NumPy have memory of their own, and only this list refers to them.

    It takes less time than `held_elsewhere`, which also recognises views of such arrays.
    """
    for i in range(len(arrays)):
        if _references_in(arrays, i) > _ALONE_IN_LIST:
            return False
        if arrays[i].base is not None or not arrays[i].flags.owndata:
            return False
    return True


def _references_in(items: Sequence[object], i: int) -> int:
    return sys.getrefcount(items[i])


# The reference count of an object that only a list refers to depends on the interpreter.
_ALONE_IN_LIST = _references_in([object()], 0)


@ft.cache
def _kind(cls: type) -> type | None:
    """The mutable type that a class derives from, if any; `isinstance` takes longer."""
    kinds = (np.ndarray, dict, list, tuple, jax.Array)
    return next((kind for kind in kinds if issubclass(cls, kind)), None)


def _visit(x: PyTree, visited: dict[int, object], references: dict[int, int]) -> None:
    """Counts a reference to an object, and its references to others."""
    kind = _kind(type(x))
    if kind is None:
        return
    key = id(x)
    references[key] = references.get(key, 0) + 1
    # What it refers to was counted then.
    if key in visited:
        return
    visited[key] = x
    if kind is np.ndarray:
        if x.base is not None:
            _visit(x.base, visited, references)
    elif kind is not jax.Array:
        for part in _parts(x, kind):
            _visit(part, visited, references)


def _parts(x: PyTree, kind: type) -> Iterable[PyTree]:
    if kind is dict:
        return x.values()
    # A list of numbers is not searched.
    if x and _kind(type(x[0])) is not None:
        return x
    return ()


def _references(visited: dict[int, object], key: int) -> int:
    return sys.getrefcount(visited[key])


# The reference count of an object that only `visited` refers to depends on the interpreter.
_ALONE = _references({0: object()}, 0)


def _is_held(x: PyTree, referenced: set[int], safe: set[int]) -> bool:
    kind = _kind(type(x))
    if kind is None:
        return False
    if kind is np.ndarray:
        return _is_array_held(x, referenced, safe)
    if kind is jax.Array:
        # On a CPU, JAX may have taken the memory of an array of NumPy.
        return any(device.platform == "cpu" for device in x.devices())
    if kind is not tuple and id(x) in referenced:
        return True
    return any(_is_held(part, referenced, safe) for part in _parts(x, kind))


def _is_array_held(x: np.ndarray, referenced: set[int], safe: set[int]) -> bool:
    if id(x) in safe:
        return False
    if id(x) in referenced:
        return True
    if x.base is None:
        # Memory of another library, which may write into it.
        return not x.flags.owndata
    return _kind(type(x.base)) is not np.ndarray or _is_array_held(x.base, referenced, safe)


def have_places(examples: Sequence[object], count: int) -> bool:
    """Whether examples are views of one array with room for `count` of them, so that each of a
    dataset's `count` examples has a place of its own.

    Memory that a dataset writes each example into has room for few.
    """
    first = examples[0]
    if not isinstance(first, np.ndarray):
        return False
    memory, size = first.base, first.nbytes
    if not isinstance(memory, np.ndarray) or not size or memory.nbytes < count * size:
        return False
    for x in examples:
        # A view of other memory has no place in this one.
        if not isinstance(x, np.ndarray) or x.base is not memory or x.nbytes != size:
            return False
    return True


def memory_of(x: PyTree) -> list[int]:
    """The addresses of the arrays, dicts and lists of a tree."""
    kind = _kind(type(x))
    if kind is np.ndarray:
        if x.base is None:
            return [id(x)]
        # A view: its address, since several views may have the same base.
        if x.size:
            return [x.__array_interface__["data"][0]]
        return []
    if kind in (None, jax.Array):
        return []
    places = []
    if kind is not tuple:  # which nobody writes to
        places.append(id(x))
    for part in _parts(x, kind):
        places += memory_of(part)
    return places


def copied(x: PyTree) -> PyTree:
    """Copies the arrays and the containers of a tree. Other objects are treated as immutable."""
    if type(x) is np.ndarray:  # most often
        return x.copy()
    kind = _kind(type(x))
    if kind is None:
        return x
    if kind is np.ndarray:
        return x.copy()
    if kind is jax.Array:
        return jnp.copy(x).block_until_ready()
    if not (parts := _parts(x, kind)):
        if kind is tuple:
            return x
        return copy.copy(x)
    if kind is tuple:
        parts = map(copied, parts)
        # A named tuple takes its items one by one.
        if hasattr(x, "_make"):
            return x._make(parts)
        return tuple(parts)
    result = copy.copy(x)  # of the same class
    if kind is dict:
        for name, part in x.items():
            result[name] = copied(part)
    else:
        result[:] = map(copied, x)
    return result
