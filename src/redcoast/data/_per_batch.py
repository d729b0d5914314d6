"""Arrays of a batch that do not have one row for each example."""

import dataclasses

import jax
from jaxtyping import PyTree

from ..core._pytree import ARRAYS, map_where, show_path


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PerBatch:
    """A marked part of a batch. The user's functions receive its arrays without the mark."""

    arrays: PyTree


def per_batch(arrays: PyTree) -> PyTree:
    """Marks arrays of a batch that do not have one row for each example.

    Use it in `collate_fn` for arrays of the batch as a whole: the nodes and edges of all graphs,
    the points of all point clouds, a bank of negatives, or class weights. All other arrays of the
    batch have one row for each example.

    **Arguments:**

    - `arrays`: an array, or a PyTree of arrays, of any shapes.

    **Returns:**

    A marked PyTree, to return from `collate_fn` as part of the batch. `loss_fn` and `predict_fn`
    receive `arrays` without the mark.

    **Raises:**

    `TypeError` if a leaf is not an array. `ValueError` if there are none, or if a part is already
    marked.

    !!! Example

        ```python
        def collate_fn(graphs):
            nodes = np.concatenate([graph["nodes"] for graph in graphs])
            of_graph = np.repeat(np.arange(len(graphs)), [len(graph["nodes"]) for graph in graphs])
            labels = np.stack([graph["label"] for graph in graphs])
            return {"graphs": rc.per_batch({"nodes": nodes, "of_graph": of_graph}), "y": labels}
        ```
    """
    if has_per_batch(arrays):
        raise ValueError("A part of `arrays` is marked as `per_batch` already. Mark it once.")
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    if not leaves:
        raise ValueError("`arrays` has no arrays. Pass an array, or a PyTree of arrays.")
    for path, x in leaves:
        if not isinstance(x, ARRAYS):
            raise TypeError(
                f"`arrays` has {type(x).__name__} at {show_path(path, 'its root')}. It must be an "
                "array, or a PyTree of arrays."
            )
    return PerBatch(arrays)


def is_per_batch(x: object) -> bool:
    return isinstance(x, PerBatch)


def has_per_batch(batch: PyTree) -> bool:
    """Whether any arrays of a batch are marked."""
    return any(map(is_per_batch, jax.tree.leaves(batch, is_leaf=is_per_batch)))


def without_marks(batch: PyTree) -> PyTree:
    """Returns the batch without marks, as the user's functions receive it."""
    return map_where(is_per_batch, lambda x: x.arrays, batch, is_leaf=is_per_batch)
