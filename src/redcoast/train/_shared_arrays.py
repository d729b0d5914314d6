"""Arrays and modules that occur several times in a model, as in PyTorch's weight tying."""

from collections.abc import Mapping
from typing import Any

import jax
from jaxtyping import PyTree

from ..core._errors import several
from ..core._frames import warn
from ..core._pytree import show_path
from ..core._trainable import partition_trainable

Path = tuple[Any, ...]


def warn_of_shared(model: PyTree, trainable: PyTree) -> None:
    """Warns of trainable arrays that are at several places of a model.

    They are trained separately, because a model is a tree.
    """
    params, _ = partition_trainable(model, trainable)
    arrays = dict(jax.tree_util.tree_leaves_with_path(params))
    places: dict[int, list[Path]] = {}
    for path, x in arrays.items():
        places.setdefault(id(x), []).append(path)
    shared = [paths for paths in places.values() if len(paths) > 1]
    groups = {tuple(map(show_path, _outermost(paths, arrays))): None for paths in shared}
    if not groups:
        return
    named = several([" and ".join(group) for group in groups], 3, separator="; ")
    warn(
        f"The model has the same arrays at several places: {named}. Each place has its own copy in "
        "training, so that their values become different, and the copies count twice in memory. To "
        "tie them, keep one of them, or use `eqx.nn.Shared`. If they are only to begin with the "
        "same values, pass copies, as `jnp.copy` makes them."
    )


def _outermost(paths: list[Path], arrays: Mapping[Path, Any]) -> list[Path]:
    """Returns the paths of the largest shared subtree, such as a module."""

    def content(part: Path) -> dict[Path, int]:
        inside = {path: x for path, x in arrays.items() if path[: len(part)] == part}
        return {path[len(part) :]: id(x) for path, x in inside.items()}

    for inner in reversed(range(min(map(len, paths)))):
        parts = [path[: len(path) - inner] for path in paths]
        if all(content(part) == content(parts[0]) for part in parts):
            return parts
    return paths
