"""Donated arrays, which are copied if they are also needed elsewhere."""

from collections.abc import Hashable, Iterable

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import PyTree

from ._pytree import show_path


def separate(donated: list[PyTree], arguments: Iterable[PyTree], *, distinct: bool) -> list[PyTree]:
    """The arrays to donate, copied where they share memory with another array of the call.

    A buffer that is donated must occur once among the arguments; on several devices XLA ends the
    process otherwise. The copy is donated, so that the other array can still be read. `distinct`
    says that no two of the donated arrays share memory.
    """
    others = list(filter(is_concrete, arguments))
    if distinct and not others:
        return donated
    # Only arrays of one shape can be the same memory: to ask for buffers takes longer.
    shapes = {_data(x).shape for x in others}
    candidates: list[int] = []
    for i, x in enumerate(donated):
        if (not distinct or _data(x).shape in shapes) and is_concrete(x):
            candidates.append(i)
    # And of the others, only those with the shape of a candidate.
    shapes = {_data(donated[i]).shape for i in candidates}
    used: set[Hashable] = set()  # memory that must not be donated (again)
    for x in others:
        if _data(x).shape in shapes:
            used.update(_buffers(x))
    result = list(donated)
    for i in candidates:
        buffers = _buffers(donated[i])
        if not used.isdisjoint(buffers):
            result[i] = jnp.copy(donated[i])
        used.update(buffers)
    return result


def refuse_deleted(tree: PyTree, what: str, advice: str) -> None:
    """Raises if the memory of an array of the tree was donated to an earlier call."""
    if not any(map(is_deleted, filter(is_concrete, jax.tree.leaves(tree)))):
        return
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if is_concrete(x) and is_deleted(x):
            array = "array"
            if path:
                array = f"array at {show_path(path)}"
            raise ValueError(
                f"{what} was donated to an earlier step, and its memory holds the new state: the "
                f"{array} can no longer be read. {advice}"
            )


def refuse_deleted_argument(name: str, *arrays: object) -> None:
    """Raises if the memory of an array in an argument was donated or freed."""
    if any(map(is_deleted, filter(is_concrete, arrays))):  # tracers have no memory
        raise ValueError(
            f"`{name}` has an array of JAX that was deleted. A compiled function deletes the "
            "arguments that are donated to it: pass it a copy, such as `jnp.copy(x)`."
        )


def is_concrete(x: object) -> bool:
    """Whether this is an array with memory, and not a tracer."""
    return isinstance(x, jax.Array) and not isinstance(x, Tracer)


def is_deleted(x: object) -> bool:
    """Whether this was an array, and is no longer."""
    method = getattr(x, "is_deleted", None)  # `isinstance` takes ten times as long
    return method is not None and method()


def _data(x: PyTree) -> PyTree:
    # `jax.random.key_data` gives the same array, but takes longer than all else here.
    return getattr(x, "_base_array", x)


def _buffers(x: jax.Array) -> set[Hashable]:
    """The addresses of an array's shards; different `jax.Array`s may share memory."""
    try:
        shards = _data(x).addressable_shards
        return {(s.device.id, s.data.unsafe_buffer_pointer()) for s in shards}
    except jax.errors.JaxRuntimeError:  # of a backend that has no pointers
        return {id(x)}
