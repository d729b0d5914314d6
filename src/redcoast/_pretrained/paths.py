"""Leaves of a tree by their paths, such as `layers/wq`."""

from typing import Any

import jax
from jaxtyping import PyTree


def leaf_paths(tree: PyTree, kinds: Any) -> dict[str, Any]:
    """The leaves of these kinds, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, kinds))
    show = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    return {show(path): leaf for path, leaf in leaves if isinstance(leaf, kinds)}
