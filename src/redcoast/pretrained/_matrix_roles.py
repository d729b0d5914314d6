"""Which arrays of a model are matrices, by the tensors that they are published as."""

from dataclasses import dataclass

from ._tensors import Tensor, factors_in


@dataclass(frozen=True)
class Matrix:
    """The roles of the dimensions of an array that is a matrix, or a stack of matrices.

    - `inputs`: the number of input dimensions. All others are outputs.
    """

    stacked: int  # the number of leading dimensions of the stack (layers or experts)
    inputs: int
    outputs_first: bool = False  # whether the outputs come before the inputs

    def last_input(self, shape: tuple[int, ...]) -> int:
        """The last dimension of the inputs, counted from the last one of the array, as -1."""
        if self.outputs_first:
            return -1
        return -1 - len(self.sides(shape)[2])

    def sides(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes of the stack, of the inputs and of the outputs."""
        stack, rest = shape[: self.stacked], shape[self.stacked :]
        if self.outputs_first:
            split = len(rest) - self.inputs
            return stack, rest[split:], rest[:split]
        return stack, rest[: self.inputs], rest[self.inputs :]


def matrix_of(tensor: Tensor) -> Matrix | None:
    """Describes an array with these published tensors as a matrix; None if it is not a matrix."""
    left, right, stacked = tensor.left, tensor.right, len(tensor.fields)
    if len(left) == 3 and left[0] == right[0]:  # the matrices of all experts in one tensor
        left, right, stacked = left[1:], right[1:], stacked + 1
    # Embedding tables are not stacked, and have the same layout as their published tensor.
    is_table = not stacked and factors_in(left) == factors_in(right)
    if len(left) != 2 or is_table:
        return None
    if tensor.name.endswith("bias"):  # of several experts
        return None
    # Arrays begin with their inputs. These are all dimensions whose factors are in the same
    # published dimension as the first one, such as the heads and their features.
    inputs = next(group for group in left if right[0][0] in group)
    count = sum(set(group) <= set(inputs) for group in right)
    # Without output dimensions it is a vector that is published as a matrix with one row.
    if count == len(right):
        return None
    return Matrix(stacked, count)
