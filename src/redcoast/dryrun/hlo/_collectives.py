"""Reads the collectives of a compiled program from its HLO text.

The program of several slices of TPUs is that of one of them. What it exchanges with the others is a
`send` to its host, which names the kind of the collective.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import gcd, prod

from jax.sharding import AbstractMesh, Mesh

from ._parse import (
    Instruction,
    Module,
    attributes,
    branches_of,
    called,
    callee,
    computation,
    lookup,
    operands,
    operation_name,
    parse_module,
    size_in_bytes,
)
from ._products import call_target
from ._replica_groups import axes_and_size, written_groups
from ._source_lines import Frame, read_frames
from ._trip_counts import CallScope, inner_scope, loop_scope, trip_count

# The bytes that each of n devices sends in a ring, given the bytes of its operands, rounded up. The
# operand of an all-gather is a part, which goes to n - 1 others. An all-reduce is a reduce-scatter
# and an all-gather of its parts.
_SENT: dict[str, Callable[[int, int], int]] = {
    "all-reduce": lambda operand, n: -(-2 * operand * (n - 1) // n),
    "all-gather": lambda operand, n: operand * (n - 1),
    "reduce-scatter": lambda operand, n: -(-operand * (n - 1) // n),
    "all-to-all": lambda operand, n: -(-operand * (n - 1) // n),
    "ragged-all-to-all": lambda operand, n: -(-operand * (n - 1) // n),
    "collective-permute": lambda operand, n: operand * (n > 1),
    "collective-broadcast": lambda operand, n: operand * (n > 1),
}
# Kinds whose groups may number replicas instead of partitions.
_OVER_REPLICAS = ("all-reduce", "all-gather", "reduce-scatter")
_BETWEEN_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_KINDS_BETWEEN_SLICES = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
INCONSISTENT = (
    "The HLO text is inconsistent: an instruction refers to a missing operand, or a computation "
    "calls itself. Pass the complete text of one compiled program."
)


@dataclass(frozen=True)
class Collective:
    """One instruction of a compiled program with which devices exchange data.

    - `kind`: `"all-reduce"`, `"all-gather"`, `"reduce-scatter"`, `"all-to-all"`,
        `"collective-permute"`, `"ragged-all-to-all"` or `"collective-broadcast"`.
    - `axes`: the mesh axes along which the devices of a group differ, in the order of the mesh.
    - `frames`: the files and numbers of the lines that it comes from, innermost first.
    """

    kind: str
    axes: tuple[str, ...]
    count: int  # the number of times that one run of the program executes it
    operand_bytes: int  # the bytes of its operands on one device
    sent_bytes: int  # the bytes that one device sends in one execution, in a ring
    group_size: int  # the number of devices in a group
    source: str | None = None  # the name of the operation in the traced program, if it is known
    exact: bool = True  # false in a loop whose trip count depends on data and is counted as one
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True)
class PartitionedProgram:
    """A parsed program for the devices of a mesh, or of one of its slices."""

    module: Module
    axes: tuple[tuple[str, int], ...]  # names and sizes, inside of a slice
    between: tuple[str, ...]  # the axes along which slices differ
    slices: int
    carries: Callable[[str], bool]  # whether a computation contains or calls collectives
    frames_of: Callable[[str], list[Frame]]  # the lines of an instruction's attributes


def collectives(
    hlo_text: str | None, mesh: Mesh | AbstractMesh | Mapping[str, int]
) -> list[Collective]:
    """The collectives that one run of a compiled program executes, in the order of their start.

    An asynchronous collective is counted at its start. A collective in a loop is multiplied by the
    trip count. Of a conditional's branches, the one that sends the most bytes is counted. Transfers
    between a device and its host are not counted.

    `hlo_text` is what `jax.jit(fn).lower(...).compile().as_text()` returns. Collectives in groups
    of one device are included, and send nothing. Raises `ValueError` if the text is not compiled
    HLO, is cut off, or is for another number of devices, or if `hlo_text` is `None` because the
    compiler does not provide it.
    """
    program = read_program(hlo_text, mesh)
    if program.slices * program.module.replicas * program.module.partitions == 1:
        return []  # A program for one device communicates nothing, whatever the mesh.
    module = program.module
    try:
        return _executed(program, CallScope(module, module.entry, lambda number, place: None))
    except (IndexError, RecursionError) as error:
        raise ValueError(INCONSISTENT) from error


def read_program(
    hlo_text: str | None, mesh: Mesh | AbstractMesh | Mapping[str, int]
) -> PartitionedProgram:
    """Parses a compiled program for the devices of a mesh.

    Raises `ValueError` if the text is not compiled HLO, or is for another number of devices.
    """
    axes = dict(mesh if isinstance(mesh, Mapping) else mesh.shape)
    if hlo_text is None:
        raise ValueError(
            "There is no HLO text to read: `compiled.as_text()` returned None, because this "
            "compiler does not provide it. Compile for CPU, GPU or TPU."
        )
    module = parse_module(hlo_text)
    if module.replicas > 1 and module.partitions > 1:
        raise ValueError(
            f"The program is for {module.replicas} replicas of {module.partitions} partitions "
            "each. Only programs with either replicas or partitions can be read, as compiled by "
            "`jax.jit`."
        )
    devices = module.replicas * module.partitions
    slices, between = 1, list[str]()
    if _BETWEEN_SLICES.search(hlo_text):
        slices = max(1, prod(axes.values()) // devices)
        outside = slices
        # The first axes of a mesh are those between slices.
        for axis, size in axes.items():
            shared = gcd(size, outside)
            axes[axis], outside = size // shared, outside // shared
            if shared > 1:
                between.append(axis)
    if devices > 1 and devices != prod(axes.values()):
        sizes = ", ".join(f"{axis}={size}" for axis, size in axes.items())
        raise ValueError(
            f"The program was compiled for {devices} devices, but a mesh of {sizes} has "
            f"{prod(axes.values())}. Pass the mesh that it was compiled for."
        )

    @cache
    def carries(name: str) -> bool:
        for instruction in computation(module, name).instructions.values():
            if collective_kind(instruction) or any(map(carries, callees_of(instruction))):
                return True
        return False

    return PartitionedProgram(
        module=module,
        axes=tuple(axes.items()),
        between=tuple(between),
        slices=slices,
        carries=carries,
        frames_of=read_frames(hlo_text),
    )


def sent_bytes(of_program: Sequence[Collective]) -> int:
    """The bytes that one device sends in one run of a program with these collectives."""
    return sum(each.count * each.sent_bytes for each in of_program)


def collective_kind(instruction: Instruction) -> str | None:
    kind = instruction.opcode.removesuffix("-start")
    if kind in _SENT:
        return kind
    if kind == "send" and (transfer := _BETWEEN_SLICES.search(instruction.rest)):
        return _KINDS_BETWEEN_SLICES.get(transfer[1])
    return None


def callees_of(instruction: Instruction) -> list[str]:
    """The computations that an instruction runs, except reducers and comparators."""
    match instruction.opcode.removesuffix("-start"):
        case "while":
            return called(instruction, "condition", "body")
        case "conditional":
            return branches_of(instruction)
        # `async-done` is left out: it may name the computation of its `async-start` again.
        case "fusion" | "call" | "async" | "custom-call":
            return called(instruction, "calls", "to_apply", "called_computations")
    return []


def _executed(
    program: PartitionedProgram, scope: CallScope, caller: Instruction | None = None
) -> list[Collective]:
    """The collectives of one execution of a computation."""
    executed = []
    for instruction in scope.computation.instructions.values():
        if collective_kind(instruction):
            executed += collectives_of(program, scope, instruction, caller)
            continue
        callees = callees_of(instruction)
        if not any(map(program.carries, callees)):
            continue
        if instruction.opcode == "while":
            executed += _of_loop(program, scope, instruction)
        elif instruction.opcode == "conditional":
            # Its operands are the number of the branch, and one operand for each branch.
            branches = []
            for skip, name in enumerate(callees, start=1):
                branch = inner_scope(scope, instruction, name, skip)
                branches.append(_executed(program, branch))
            executed += max(branches, key=sent_bytes)
        else:
            for name in callees:
                executed += _executed(program, inner_scope(scope, instruction, name), instruction)
    return executed


def _of_loop(program: PartitionedProgram, scope: CallScope, loop: Instruction) -> list[Collective]:
    """The collectives of all iterations; of one, if their number depends on data."""
    trips = trip_count(scope, loop)
    body_runs = 1
    if trips is not None:
        body_runs = trips
    executed = []
    # The condition runs once more than the body.
    for role, runs in (("condition", body_runs + 1), ("body", body_runs)):
        inside = loop_scope(scope, loop, callee(loop, role))
        for each in _executed(program, inside):
            exact = each.exact and trips is not None
            executed.append(replace(each, count=runs * each.count, exact=exact))
    return executed


def collectives_of(
    program: PartitionedProgram,
    scope: CallScope,
    instruction: Instruction,
    caller: Instruction | None,
) -> list[Collective]:
    if is_later_part(scope, instruction):
        return []
    kind = str(collective_kind(instruction))
    arrays = operands(instruction)
    if kind == "ragged-all-to-all":
        arrays = arrays[:1]  # The other operands are the output buffer, offsets and sizes.
    if instruction.opcode == "send":
        arrays = arrays[:1]  # The other operand is a token.
    # Bytes of all operands: combined collectives have several.
    operand = sum(size_in_bytes(lookup(scope.computation, name).shape) for name in arrays)
    axes, size = _partners(program, instruction, kind)
    # On TPUs, a fusion of an all-reduce and a slice runs as a reduce-scatter.
    if (
        kind == "all-reduce"
        and size > 1
        and caller is not None
        and caller.opcode == "fusion"
        and size_in_bytes(caller.shape) * size == operand
    ):
        kind = "reduce-scatter"
    around = ""
    if caller is not None:
        around = caller.rest
    # A fusion may have the metadata that the collective inside is without.
    source = operation_name(instruction.rest) or operation_name(around)
    frames = program.frames_of(instruction.rest) or program.frames_of(around)
    return [
        Collective(
            kind=kind,
            axes=axes,
            count=1,
            operand_bytes=operand,
            sent_bytes=_SENT[kind](operand, size),
            group_size=size,
            source=source,
            frames=tuple(frames),
        )
    ]


def is_later_part(scope: CallScope, instruction: Instruction) -> bool:
    """Whether an instruction is the continuation of a collective that has already started.

    TPUs overlap a collective with several fusions, and its HLO appears in each of them.
    """
    if "chain_id=" not in attributes(instruction):
        return False
    for each in scope.computation.instructions.values():
        if call_target(each) == "AsyncCollectiveStart" and instruction.name in operands(each):
            return False
    return True


def _partners(
    program: PartitionedProgram, instruction: Instruction, kind: str
) -> tuple[tuple[str, ...], int]:
    """The mesh axes that a collective spans, and the number of devices in a group."""
    if instruction.opcode == "send":
        return program.between, program.slices
    text = attributes(instruction)
    groups = written_groups(text)
    if program.module.replicas == 1:
        # Without a channel or the flag, the groups number replicas, and there is only one.
        if "channel_id=" not in text:
            return (), 1
        if kind in _OVER_REPLICAS and "use_global_device_ids=true" not in text:
            groups = ""
    return axes_and_size(groups, program.axes)
