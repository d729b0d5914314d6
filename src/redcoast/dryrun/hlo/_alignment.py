"""Whether the rows of the matrices of a product are aligned.

Tensor cores of GPUs load 16 bytes at once. Rows whose size is not a multiple of that begin at other
addresses, and kernels have to load their elements one by one.
"""

from collections.abc import Sequence
from math import prod

from ._parse import (
    Computation,
    Instruction,
    Module,
    array_layout,
    called,
    computation,
    lookup,
    operands,
)
from ._products import call_target, dimension_numbers

_BYTES = 16
_CALLS = "fusion", "call", "async-start"
_FREE, _CONTRACTED, _BATCH, _OF_RIGHT = range(4)  # the role of a dimension in a product


def is_misaligned(module: Module, within: Computation, instruction: Instruction) -> bool:
    """Whether an instruction has a product with a matrix whose rows are not aligned to 16 bytes."""
    if instruction.opcode in _CALLS:
        for name in called(instruction, "calls", "to_apply"):
            inner = computation(module, name)
            for each in inner.instructions.values():
                if is_misaligned(module, inner, each):
                    return True
        return False
    is_dot = instruction.opcode == "dot"
    if not is_dot and not call_target(instruction).startswith("__cublas"):
        return False
    sides: list[list[int]] = []  # the roles of the dimensions of each operand
    arrays = operands(instruction)[:2]
    shapes = [lookup(within, name).shape for name in arrays]
    for side, shape in zip(("lhs", "rhs"), shapes, strict=True):
        roles = [_FREE] * len(array_layout(shape).sizes)
        for dim in dimension_numbers(instruction, f"{side}_contracting"):
            roles[dim] = _CONTRACTED
        for dim in dimension_numbers(instruction, f"{side}_batch"):
            roles[dim] = _BATCH
        sides.append(roles)
    if any(map(_has_misaligned_rows, shapes, sides)):
        return True
    # The dimensions of the result: of the batch, of the left and of the right operand.
    left, right = (roles.count(_FREE) for roles in sides)
    roles = [_BATCH] * sides[0].count(_BATCH) + [_FREE] * left + [_OF_RIGHT] * right
    # cuBLAS returns its workspace beside the result.
    return _has_misaligned_rows(instruction.shape, roles)


def _has_misaligned_rows(shape: str, roles: Sequence[int]) -> bool:
    """Whether the rows of a matrix are not aligned to 16 bytes.

    Dimensions with the same role are one dimension of the matrix.
    """
    layout = array_layout(shape)
    if len(roles) != len(layout.sizes):
        return False
    # Dimensions of one element change no address.
    dims = [dim for dim in layout.minor_to_major if layout.sizes[dim] > 1]
    # A row is what is contiguous: the fastest dimensions, as far as they have one role.
    row: list[int] = []
    for dim in dims:
        if roles[dim] != roles[dims[0]]:
            break
        row.append(layout.sizes[dim])
    if len(row) == len(dims):
        return False  # there is one row
    return prod(row) * layout.bits % (8 * _BYTES) != 0
