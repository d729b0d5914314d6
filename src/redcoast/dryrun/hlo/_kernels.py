"""What the kernels of a compiled program compute, and what they read and write in memory.

Tensor cores of GPUs load 16 bytes at once. Rows of matrices whose size is not a multiple of that
begin at other addresses, and kernels have to load their elements one by one: they are misaligned.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from ._parse import (
    Computation,
    Instruction,
    Module,
    array_shapes,
    called,
    computation,
    first_array,
    lookup,
    operands,
    size_in_bytes,
)
from ._products import call_target, dimension_numbers, is_attention, product_flops

KernelKind = Literal["product", "attention", "other"]
# Opcodes that run nothing: they name, group or reinterpret arrays, or are known when compiling.
_FREE = frozenset(
    """
    parameter get-tuple-element tuple constant bitcast after-all partition-id replica-id iota
    opt-barrier add-dependency domain get-dimension-size rng-get-and-update-state recv
    """.split()  # noqa: SIM905
)
# Calls by which the TPU compiler allocates memory or names parts of it.
_FREE_CALLS = ("AllocateBuffer", "ConcatBitcast", "SliceToDynamic", "PadToStatic", "Sharding")
# Opcodes whose result is their first operand with another shape or layout in a fusion.
_VIEWS = ("bitcast", "reshape", "copy", "convert", "transpose")
# Opcodes that read as much of their first operand as they return.
_PARTS = ("dynamic-slice", "slice", "gather")
HOST_SPACE = 5  # the memory space of the host, `kHostMemorySpace` of XLA's layouts


@dataclass(frozen=True)
class KernelWork:
    """The work of one execution of an instruction on one device.

    - `flops`: floating point operations of products, by the dtype of their operands.
    - `is_misaligned`: whether the rows of a product's matrices are not aligned to 16 bytes.
    """

    name: str
    kind: KernelKind  # `"product"`, `"attention"` (a kernel of its own), or `"other"`
    flops: tuple[tuple[str, int], ...]
    memory_bytes: int  # bytes that are read and written in the device's main memory
    is_misaligned: bool = False


def read_kernel(module: Module, within: Computation, instruction: Instruction) -> KernelWork | None:
    """The work of an instruction; `None` if it runs nothing."""
    if instruction.opcode in _FREE or call_target(instruction) in _FREE_CALLS:
        return None
    flops = product_flops(module, within, instruction)
    kind: KernelKind = "product" if flops else "other"
    if is_attention(instruction):
        kind = "attention"
    accessed = _accessed(module, within, instruction)
    misaligned = kind == "product" and is_misaligned(module, within, instruction)
    return KernelWork(instruction.name, kind, tuple(sorted(flops.items())), accessed, misaligned)


def main_bytes(shape: str) -> int:
    """The bytes of a shape in the device's main memory."""
    return sum(array.bytes for array in array_shapes(shape) if array.space == 0)


def _accessed(module: Module, within: Computation, instruction: Instruction) -> int:
    """The bytes that an instruction reads and writes."""
    arrays = operands(instruction)
    shapes = {name: lookup(within, name).shape for name in arrays}
    if instruction.opcode in ("fusion", "fusion-start") and (fused := _fused(instruction)):
        inner = computation(module, fused)
        read = 0
        for place, name in enumerate(arrays):
            needed = _bytes_read(module, inner, _parameter(inner, place))
            # Nothing of an operand that is in another memory already.
            read += min(main_bytes(shapes[name]), needed)
        written = main_bytes(instruction.shape)
        if instruction.opcode == "fusion-start":
            # The result of a start is a tuple, which has the operands, too.
            written = main_bytes(lookup(inner, inner.root).shape)
        return read + min(written, _bytes_written(module, inner, inner.root))
    result = main_bytes(instruction.shape)
    match instruction.opcode:
        case opcode if opcode in _PARTS:
            return 2 * result  # reads as much as it writes
        case "dynamic-update-slice":
            return 2 * main_bytes(shapes[arrays[1]])  # in place: only the update is moved
        case "broadcast":
            return result
    return sum(map(main_bytes, shapes.values())) + result


def _fused(instruction: Instruction) -> str | None:
    return next(iter(called(instruction, "calls")), None)


def _parameter(inner: Computation, place: int) -> str | None:
    for each in inner.instructions.values():
        # `parameter(0), metadata=...`: `rest` begins behind the parenthesis.
        if each.opcode == "parameter" and each.rest.startswith(f"{place})"):
            return each.name
    return None


def _bytes_read(module: Module, inner: Computation, name: str | None) -> int:
    """The bytes of a value that a fusion reads: only the slices, if it only slices it."""
    if name is None:
        return 0
    value = inner.instructions[name]
    most = size_in_bytes(value.shape)  # of all memory spaces: most shapes in a fusion have none
    total = 0
    for user in inner.instructions.values():
        for place, operand in enumerate(operands(user)):
            if operand == name:
                total += _read_by(module, inner, user, place, most)
    return min(total, most)


def _read_by(module: Module, inner: Computation, user: Instruction, place: int, whole: int) -> int:
    match user.opcode:
        case opcode if opcode in _PARTS and place == 0:
            return size_in_bytes(user.shape)
        # Only a slice of it is replaced, in place.
        case "dynamic-update-slice" if place == 0:
            return 0
        case "tuple":
            return 0
        case "fusion" if (fused := _fused(user)) is not None:
            nested = computation(module, fused)
            return _bytes_read(module, nested, _parameter(nested, place))
        case opcode if opcode in _VIEWS and user.name != inner.root:
            return _bytes_read(module, inner, user.name)
    return whole


def _bytes_written(module: Module, inner: Computation, name: str) -> int:
    """The bytes of a result that a fusion writes: only the slice, if it only updates one."""
    value = inner.instructions[name]
    match value.opcode:
        # Several results, each of which may be a slice.
        case "tuple":
            return sum(_bytes_written(module, inner, each) for each in operands(value))
        # An operand that is passed on as it is.
        case "parameter":
            return 0
        case "dynamic-update-slice":
            return size_in_bytes(lookup(inner, operands(value)[1]).shape)
        case "fusion" if (fused := _fused(value)) is not None:
            nested = computation(module, fused)
            return _bytes_written(module, nested, nested.root)
        case "bitcast" | "reshape":
            return _bytes_written(module, inner, operands(value)[0])
        case "convert" if _is_converted_back(inner, value):
            return _bytes_written(module, inner, operands(value)[0])
    return size_in_bytes(value.shape)


def _is_converted_back(inner: Computation, value: Instruction) -> bool:
    """Whether an array is updated in a wider dtype, and returned in its own.

    The compiler for CPUs does so in 16 bits. Accelerators update such an array in place.
    """
    update = lookup(inner, operands(value)[0])
    if update.opcode != "dynamic-update-slice":
        return False
    before = lookup(inner, operands(update)[0])
    if before.opcode != "convert":
        return False
    updated = first_array(lookup(inner, operands(before)[0]).shape)
    returned = first_array(value.shape)
    return (updated.dtype, updated.sizes) == (returned.dtype, returned.sizes)


_BYTES = 16
_CALLS = "fusion", "call", "async-start"
_UNSUMMED, _CONTRACTED, _BATCH, _OF_RIGHT = range(4)  # the role of a dimension in a product


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
        roles = [_UNSUMMED] * len(first_array(shape).sizes)
        for dim in dimension_numbers(instruction, f"{side}_contracting"):
            roles[dim] = _CONTRACTED
        for dim in dimension_numbers(instruction, f"{side}_batch"):
            roles[dim] = _BATCH
        sides.append(roles)
    if any(map(_has_misaligned_rows, shapes, sides)):
        return True
    # The dimensions of the result: of the batch, of the left and of the right operand.
    left, right = (roles.count(_UNSUMMED) for roles in sides)
    roles = [_BATCH] * sides[0].count(_BATCH) + [_UNSUMMED] * left + [_OF_RIGHT] * right
    # cuBLAS returns its workspace beside the result.
    return _has_misaligned_rows(instruction.shape, roles)


def _has_misaligned_rows(shape: str, roles: Sequence[int]) -> bool:
    """Whether the rows of a matrix are not aligned to 16 bytes.

    Dimensions with the same role are one dimension of the matrix.
    """
    array = first_array(shape)
    if len(roles) != len(array.sizes):
        return False
    # Dimensions of one element change no address.
    dims = [dim for dim in array.minor_to_major if array.sizes[dim] > 1]
    # A row is what is contiguous: the fastest dimensions, as far as they have one role.
    row: list[int] = []
    for dim in dims:
        if roles[dim] != roles[dims[0]]:
            break
        row.append(array.sizes[dim])
    if len(row) == len(dims):
        return False  # there is one row
    return prod(row) * array.bits % (8 * _BYTES) != 0
