"""Explains JAX's errors about arrays in static fields of modules, which do not name the field."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from ._errors import several
from ._pytree import show_path

# Words of JAX's and NumPy's errors, in any version, when such fields are compared or hashed.
_COMPARED = re.compile(r"metadata fields|truth value of an array|__eq__|hash")
_INIT_FN = ("init_fn", "model_or_state")  # arguments that are functions of a key


def static_arrays(tree: PyTree, path: KeyPath = ()) -> Iterator[str]:
    """Yields the static fields of dataclasses in a tree that contain arrays."""
    # One level of the tree: its children, which are flattened no further.
    inner = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: x is not tree)
    if any(child is tree for _, child in inner):  # a leaf
        return
    if dataclasses.is_dataclass(tree):
        children = {id(child) for _, child in inner}
        for field in dataclasses.fields(tree):
            value = getattr(tree, field.name, None)
            if id(value) not in children and _holds_array(value):
                where = show_path((*path, jax.tree_util.GetAttrKey(field.name)))
                yield f"{where} (field `{field.name}` of {type(tree).__name__})"
    for key, child in inner:
        yield from static_arrays(child, (*path, *key))


def _holds_array(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_array, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_array, value))
    # An array of one element has a truth value, so that it can be compared.
    return isinstance(value, np.ndarray | jax.Array) and value.size != 1


def explain_static_arrays(
    fn: Callable[..., object], error: Exception, args: tuple[object, ...], kwargs: dict[str, object]
) -> ValueError | None:
    """Returns the error to raise in place of an error of `fn(*args, **kwargs)` that static arrays
    caused."""
    texts = [str(each) for each in (error, error.__cause__, error.__context__)]
    if not any(map(_COMPARED.search, texts)):
        return None
    try:
        arguments = inspect.signature(fn).bind_partial(*args, **kwargs).arguments
        names = list(static_arrays(list(map(_model_of, arguments, arguments.values()))))
    except Exception:  # nothing may hide the error itself
        return None
    if not names:
        return None
    names = list(dict.fromkeys(name.split("/", 1)[1] for name in names))
    return ValueError(
        f"An array is in a static field: {several(names, 3)}. JAX compares static fields to find "
        "out whether it has compiled a function for them, and arrays have no single truth value. "
        "Remove `static=True`, and keep the array from being trained with `trainable`, or with "
        "`jax.lax.stop_gradient` where it is used; or store a tuple of numbers, such as "
        "`tuple(array.tolist())`."
    )


def _model_of(name: str, value: PyTree) -> PyTree:
    """Returns an argument, or the model if it is a function that creates one."""
    if name not in _INIT_FN or not callable(value) or jax.tree.leaves(value) != [value]:
        return value
    models: list[PyTree] = []
    jax.eval_shape(lambda key: models.append(value(key)), jax.random.key(0))
    return models[-1]
