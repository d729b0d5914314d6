"""Labels and masks of an optax optimizer that are callable modules."""

import functools as ft
import types
from collections.abc import Iterator

import equinox as eqx
import jax
import optax
from jaxtyping import PyTree

_MOST = 10_000  # objects that are searched


def accept_module_labels(optimizer: optax.GradientTransformation) -> None:
    """Lets an optimizer such as `optax.multi_transform` take labels that are shaped like the model.

    If labels are callable, optax calls them with the parameters. A tree of labels that is an
    `eqx.Module` is callable if the module is, and calling it computes with the labels. So in the
    closures of the optimizer, each such tree is replaced by a function that returns it, without
    leaves that the parameters do not have.
    """
    for cell in _cells(optimizer):
        if _is_tree_of_labels(cell.cell_contents):
            # Optax calls labels that are callable, as a model is. It must not call this one.
            cell.cell_contents = ft.partial(labels_like, cell.cell_contents)


def labels_like(labels: PyTree, params: PyTree) -> PyTree:
    """A tree of labels, or of dimension numbers, without those of leaves that are not trained."""

    def keep(label: PyTree, part: PyTree) -> PyTree:
        if part is None:
            return None
        return label

    def is_label(x: object) -> bool:
        return x is None or isinstance(x, optax.contrib.MuonDimensionNumbers)

    return jax.tree.map(keep, labels, params, is_leaf=is_label)


def _is_tree_of_labels(x: object) -> bool:
    """Whether this is a module with names, numbers or booleans in place of arrays."""
    if not isinstance(x, eqx.Module):
        return False
    leaves = jax.tree.leaves(x)
    return bool(leaves) and all(isinstance(y, str | bool | int) for y in leaves)


def _cells(optimizer: object) -> Iterator[types.CellType]:
    """Yields the closure cells of an optimizer and of its parts."""
    waiting, visited = [optimizer], set()
    while waiting and len(visited) < _MOST:
        x = waiting.pop()
        # Functions may refer to each other in a circle.
        if id(x) in visited:
            continue
        visited.add(id(x))
        if isinstance(x, ft.partial):
            waiting += [x.func, *x.args, *x.keywords.values()]
        elif isinstance(x, types.MethodType):
            waiting += [x.__func__, *getattr(x.__self__, "__dict__", {}).values()]
        elif isinstance(x, types.FunctionType):
            # Optax keeps what an optimizer was given in the closures of its functions.
            filled = [cell for cell in x.__closure__ or () if _is_filled(cell)]
            yield from filled
            waiting += [cell.cell_contents for cell in filled]
            if "__wrapped__" in x.__dict__:
                waiting.append(x.__dict__["__wrapped__"])
        elif isinstance(x, tuple | list):
            waiting += x
        elif isinstance(x, dict):
            waiting += x.values()


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # raises if it is empty
    except ValueError:
        return False
    return True
