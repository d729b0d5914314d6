"""Arrays and modules that occur several times in a model, as in PyTorch's weight tying."""

from collections.abc import Mapping

import jax
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from ..core._errors import several
from ..core._frames import warn
from ..core._pytree import show_path
from ..core._trainable import partition_trainable


def warn_of_shared(model: PyTree, trainable: PyTree) -> None:
    """Warns of trainable arrays that are at several places of a model.

    They are trained separately, because a model is a tree.
    """
    params, _ = partition_trainable(model, trainable)
    arrays = dict(jax.tree_util.tree_leaves_with_path(params))
    places: dict[int, list[KeyPath]] = {}
    for path, x in arrays.items():
        # By identity: equal values are usual, as of biases that begin as zeros.
        places.setdefault(id(x), []).append(path)
    groups: dict[str, None] = {}  # each once: a module has many arrays
    for paths in places.values():
        if len(paths) > 1:
            names = map(show_path, _outermost(paths, arrays))
            groups[" and ".join(names)] = None
    if not groups:
        return
    named = several([*groups], 3, separator="; ")
    warn(
        f"The model has the same arrays at several places: {named}. Each place has its own copy in "
        "training, so that their values become different, and the copies count twice in memory. To "
        "tie them, keep one of them, or use `eqx.nn.Shared`. If they are only to begin with the "
        "same values, pass copies, as `jnp.copy` makes them."
    )


def _outermost(paths: list[KeyPath], arrays: Mapping[KeyPath, object]) -> list[KeyPath]:
    """Returns the paths of the largest shared subtree, such as a module."""

    def content(part: KeyPath) -> dict[KeyPath, int]:
        inside: dict[KeyPath, int] = {}
        for path, x in arrays.items():
            if path[: len(part)] == part:
                inside[path[len(part) :]] = id(x)
        return inside

    for inner in reversed(range(min(map(len, paths)))):
        parts = [path[: len(path) - inner] for path in paths]
        # Of a tied module, one line is enough for all of its arrays.
        if all(content(part) == content(parts[0]) for part in parts):
            return parts
    return paths
