"""The matrices of a model, and which of their dimensions are inputs and outputs."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import equinox as eqx
import jax
from jaxtyping import PyTree

from ..core._errors import check_kind
from ..core._pytree import show_path
from ..models._einsum import LowRank
from ..models._quantised_weight import is_quantised
from ..pretrained._matrix_roles import Matrix, matrix_of
from ..pretrained._registry import family_of
from ..pretrained._tensors import Tensor


def find_matrices(model: PyTree) -> dict[str, Matrix]:
    """Finds the matrices of a PyTree, by path: matrices in models of `redcoast.models`, and weights
    of `eqx.nn.Linear`, at any depth."""
    matrices = {}
    for path, node in with_paths(model, _is_known):
        if isinstance(node, eqx.nn.Linear):
            # Equinox stores (outputs, inputs), stacked where layers are made by `vmap`.
            matrices[_join(path, "weight")] = Matrix(node.weight.ndim - 2, 1, outputs_first=True)
        elif family := family_of(node):
            for leaf, tensor in family.hf.tensors(node.config).items():
                if matrix := matrix_of(tensor):
                    matrices[_join(path, leaf)] = matrix
    return matrices


def _is_known(node: object) -> bool:
    return isinstance(node, eqx.nn.Linear) or family_of(node) is not None


def inputs_of(tensor: Tensor) -> tuple[str, ...]:
    """Returns the factors of the input dimension of the published matrix."""
    # Published matrices have their outputs first, or their inputs (GPT-2). The arrays here always
    # have their inputs first.
    first = tensor.right[0][0]
    return next(group for group in tensor.left if first in group)


def match_targets(targets: str | Sequence[str], matrices: Iterable[str]) -> set[str]:
    """Returns the paths of the matrices that a regular expression, or one of several, is found in.

    Raises `ValueError` if one matches nothing.
    """
    matrices = list(matrices)
    if not matrices:
        raise ValueError(
            "The tree contains no matrix whose inputs and outputs are known: none of its nodes is "
            "a model of `redcoast.models` or an `eqx.nn.Linear`. Pass the model, and not its "
            "parameters alone."
        )
    if isinstance(targets, str):
        targets = [targets]
    check_kind("targets", targets, Iterable, "a regular expression, or several in a list")
    if not targets:
        raise ValueError('`targets` is empty. Pass a regular expression; "." matches all matrices.')
    chosen = set()
    for pattern in targets:
        check_kind("targets", pattern, str, "a regular expression, or several in a list")
        try:
            matched = {path for path in matrices if re.search(pattern, path)}
        except re.error as error:
            raise ValueError(
                f"The pattern {pattern!r} is not a regular expression: {error}."
            ) from error
        if not matched:
            raise ValueError(
                f"The pattern {pattern!r} matches none of the model's matrices, which are: "
                f"{', '.join(matrices)}. Pass a regular expression that is found in some of these "
                'paths as `targets`; "." is found in all.'
            )
        chosen |= matched
    return chosen


def is_adapted(node: object) -> bool:
    return isinstance(node, LowRank)


def is_weight(node: object) -> bool:
    """Whether a node of a model stands in place of an array of weights."""
    return is_adapted(node) or is_quantised(node)


def with_paths(tree: PyTree, is_leaf: Callable[[PyTree], bool]) -> Iterator[tuple[str, PyTree]]:
    """Yields the leaves of a tree with their paths."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf):
        yield show_path(path), leaf


def _join(path: str, leaf: str) -> str:
    return f"{path}/{leaf}".removeprefix("/")
