"""The matrices of a model, and which of their dimensions are inputs and outputs."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import equinox as eqx
import jax
from jaxtyping import PyTree

from ..core._pytree import show_path
from ..models._einsum import LowRank
from ..pretrained._registry import family_of
from ..pretrained._tensors import Tensor


@dataclass(frozen=True)
class Matrix:
    """The roles of the dimensions of an array that is a matrix, or a stack of matrices.

    - `stacked`: the number of leading dimensions of the stack (layers or experts).
    - `inputs`: the number of input dimensions. All others are outputs.
    - `outputs_first`: whether the outputs come before the inputs.
    """

    stacked: int
    inputs: int
    outputs_first: bool = False

    def sides(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes of the stack, of the inputs and of the outputs."""
        stack, rest = shape[: self.stacked], shape[self.stacked :]
        if self.outputs_first:
            split = len(rest) - self.inputs
            return stack, rest[split:], rest[:split]
        return stack, rest[: self.inputs], rest[self.inputs :]


def find_matrices(model: PyTree) -> dict[str, Matrix]:
    """Finds the matrices of a PyTree, by path: matrices in models of `redcoast.models`, and weights
    of `eqx.nn.Linear`, at any depth."""
    matrices = {}
    for path, node in with_paths(model, _is_known):
        if isinstance(node, eqx.nn.Linear):
            matrices[_join(path, "weight")] = Matrix(node.weight.ndim - 2, 1, outputs_first=True)
        elif family := family_of(node):
            for leaf, tensor in family.hf.tensors(node.config).items():
                if matrix := matrix_of(tensor):
                    matrices[_join(path, leaf)] = matrix
    return matrices


def _is_known(node: object) -> bool:
    return isinstance(node, eqx.nn.Linear) or family_of(node) is not None


def matrix_of(tensor: Tensor) -> Matrix | None:
    """Describes an array with these published tensors as a matrix; None if it is not a matrix."""
    left, right, stacked = tensor.left, tensor.right, len(tensor.fields)
    if len(left) == 3 and left[0] == right[0]:  # the matrices of all experts in one tensor
        left, right, stacked = left[1:], right[1:], stacked + 1
    # Embedding tables are not stacked, and have the same layout as their published tensor.
    if len(left) != 2 or (not stacked and left == right):
        return None
    if tensor.name.endswith("bias"):  # of several experts
        return None
    inputs = next(group for group in left if right[0][0] in group)
    count = sum(set(group) <= set(inputs) for group in right)
    # Without output dimensions it is a vector that is published as a matrix with one row.
    return None if count == len(right) else Matrix(stacked, count)


def inputs_of(tensor: Tensor) -> tuple[str, ...]:
    """Returns the factors of the input dimension of the published matrix."""
    # Published matrices have their outputs first, or their inputs (GPT-2). The arrays here always
    # have their inputs first.
    first = tensor.right[0][0]
    return next(group for group in tensor.left if first in group)


def match_targets(targets: str | Sequence[str], matrices: Iterable[str]) -> set[str]:
    """Returns the paths of the matrices that a regular expression, or one of several, is found in.

    **Raises:**

    `ValueError` if one matches nothing.
    """
    if isinstance(targets, str):
        targets = [targets]
    chosen = set()
    for pattern in targets:
        try:
            matched = {path for path in matrices if re.search(pattern, path)}
        except re.error as error:
            raise ValueError(
                f"The pattern {pattern!r} is not a regular expression: {error}."
            ) from error
        if not matched:
            raise ValueError(
                f"The pattern {pattern!r} matches none of the model's matrices, which are: "
                f"{', '.join(matrices) or 'none at all'}."
            )
        chosen |= matched
    return chosen


def find_adapted(model: PyTree) -> dict[str, LowRank]:
    """Finds the adapted weights of a PyTree, by their paths."""
    return {path: node for path, node in with_paths(model, is_adapted) if is_adapted(node)}


def is_adapted(node: object) -> bool:
    return isinstance(node, LowRank)


def with_paths(tree: PyTree, is_leaf: Callable[[PyTree], bool]) -> Iterator[tuple[str, PyTree]]:
    """Yields the leaves of a tree with their paths."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf):
        yield show_path(path), leaf


def _join(path: str, leaf: str) -> str:
    return f"{path}/{leaf}".removeprefix("/")
