"""The schedule of a compiled program: its kernels in order, and the transfers that run meanwhile.

Compilers write the instructions of a program in the order in which a device starts them. What
stands between the start and the end of an asynchronous transfer runs while it is under way.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from jax.sharding import AbstractMesh, Mesh

from ._collectives import (
    INCONSISTENT,
    Collective,
    PartitionedProgram,
    callees_of,
    collective_kind,
    collectives_of,
    is_later_part,
    read_program,
)
from ._kernels import HOST_SPACE, KernelWork, main_bytes, read_kernel
from ._parse import (
    Instruction,
    array_shapes,
    called,
    callee,
    lookup,
    operands,
    operation_name,
    size_in_bytes,
)
from ._products import call_target
from ._trip_counts import CallScope, inner_scope, loop_scope, trip_count


@dataclass(frozen=True)
class Transfer:
    """Bytes that a device moves over a network, or between its memories.

    - `kind`: the kind of a collective, such as `"all-gather"`; `"memory"` for a copy between the
      memories of a device, and `"host"` for a copy to or from the memory of its host.
    """

    kind: str
    axes: tuple[str, ...]  # the mesh axes of a collective
    sent_bytes: int  # the bytes that the device sends, or that are copied
    devices: int  # the number of devices that exchange data


@dataclass(frozen=True)
class Start:
    """An asynchronous transfer begins. `key` identifies it."""

    key: str
    transfer: Transfer


@dataclass(frozen=True)
class Done:
    """The program waits for the end of an asynchronous transfer."""

    key: str


@dataclass(frozen=True)
class Loop:
    """Events that are repeated. `exact` is False if the number of times depends on data."""

    times: int
    events: "tuple[Event, ...]"
    exact: bool = True


Event = KernelWork | Transfer | Start | Done | Loop


def read_schedule(
    hlo_text: str | None, mesh: Mesh | AbstractMesh | Mapping[str, int]
) -> tuple[Event, ...]:
    """The events of one run of a compiled program on a device, in the order of their start.

    They are kernels, transfers that the program waits for at once, starts and ends of asynchronous
    transfers, and loops of such events. Of a conditional's branches, the one with the most work is
    taken. Raises `ValueError` if the text is not compiled HLO, or is for another number of
    devices.
    """
    program = read_program(hlo_text, mesh)
    scope = CallScope(program.module, program.module.entry, lambda number, place: None)
    try:
        return tuple(_events(program, scope))
    except (IndexError, RecursionError) as error:
        raise ValueError(INCONSISTENT) from error


def count_flops(events: Iterable[Event]) -> Counter[str]:
    """The floating point operations of the products of events, by dtype."""
    total: Counter[str] = Counter()
    for event in events:
        match event:
            case KernelWork():
                total.update(dict(event.flops))
            case Loop(times, inner):
                for dtype, count in count_flops(inner).items():
                    total[dtype] += times * count
    return total


def count_open_loops(events: Iterable[Event]) -> int:
    """The number of loops that are repeated an unknown number of times."""
    count = 0
    for event in events:
        if isinstance(event, Loop):
            count += count_open_loops(event.events)
            if not event.exact:
                count += 1
    return count


# About the ratios of an A100 and of a TPU v4: of arithmetic to bytes of memory, and of bytes of
# memory to bytes that are sent.
_FLOPS_PER_BYTE = 200
_MEMORY_PER_SENT = 10


def _work(events: Iterable[Event]) -> float:
    """The work of events, in bytes of memory that are accessed in the same time."""
    total = 0.0
    for event in events:
        match event:
            case KernelWork():
                flops = sum(dict(event.flops).values())
                total += max(event.memory_bytes, flops / _FLOPS_PER_BYTE)
            case Transfer() as transfer:
                total += _MEMORY_PER_SENT * transfer.sent_bytes
            case Start(_, transfer):
                total += _MEMORY_PER_SENT * transfer.sent_bytes
            case Loop(times, inner):
                total += times * _work(inner)
    return total


def _events(program: PartitionedProgram, scope: CallScope) -> Iterator[Event]:
    for instruction in scope.computation.instructions.values():
        match instruction.opcode:
            # Loops over blocks stand for JAX's splash attention, which CPUs interpret.
            case "while" if "/splash_mha_" in (operation_name(instruction.rest) or ""):
                flops = count_flops([_loop(program, scope, instruction)])
                counts = tuple(sorted(flops.items()))
                # Such a kernel reads and writes each array once.
                accessed = main_bytes(instruction.shape)
                yield KernelWork(instruction.name, "attention", counts, accessed)
            case "while":
                yield _loop(program, scope, instruction)
            case "conditional":
                # Its operands are the number of the branch, and one operand for each branch.
                branches = []
                for skip, name in enumerate(callees_of(instruction), start=1):
                    branch = inner_scope(scope, instruction, name, skip)
                    branches.append(list(_events(program, branch)))
                yield from max(branches, key=_work)
            case "call":
                for name in called(instruction, "to_apply"):
                    yield from _events(program, inner_scope(scope, instruction, name))
            case opcode if opcode.endswith(("-done", "-update")):
                # An update only says that a transfer is under way.
                if opcode.endswith("-done"):
                    yield Done(_started_by(scope, instruction))
            case _:
                yield from _plain(program, scope, instruction)


def _loop(program: PartitionedProgram, scope: CallScope, instruction: Instruction) -> Loop:
    trips = trip_count(scope, instruction)
    body = loop_scope(scope, instruction, callee(instruction, "body"))
    events = tuple(_events(program, body))
    if trips is None:
        return Loop(1, events, exact=False)
    return Loop(trips, events)


def _plain(
    program: PartitionedProgram, scope: CallScope, instruction: Instruction
) -> Iterator[Event]:
    """The events of an instruction that is no control flow."""
    if collective_kind(instruction) is not None:
        for each in collectives_of(program, scope, instruction, None):
            event: Event = _transfer(each)
            if instruction.opcode.endswith("-start") or instruction.opcode == "send":
                event = Start(instruction.name, event)
            yield event
        return
    inner = [name for name in callees_of(instruction) if program.carries(name)]
    if inner:
        yield from _wrapped(program, scope, instruction, inner[0])
    elif instruction.opcode in ("copy-start", "slice-start", "dynamic-slice-start"):
        yield Start(instruction.name, _copied(scope, instruction))
    else:
        kernel = read_kernel(scope.module, scope.computation, instruction)
        if kernel is not None:
            yield kernel


def _wrapped(
    program: PartitionedProgram, scope: CallScope, instruction: Instruction, name: str
) -> Iterator[Event]:
    """The events of a fusion or an asynchronous computation that contains a collective.

    The TPU compiler fuses the start of a collective, its progress and its end with kernels.
    """
    inside = inner_scope(scope, instruction, name)
    channel = ""
    targets: set[str] = set()
    fused: list[Collective] = []
    for each in inside.computation.instructions.values():
        targets.add(call_target(each))
        if collective_kind(each) is not None:
            # The instructions that start and end a collective have its channel in common.
            _, _, after = each.rest.partition("channel_id=")
            channel = f"channel {after.partition(',')[0]}"
            if not is_later_part(inside, each):
                fused += collectives_of(program, inside, each, instruction)
    ends = "AsyncCollectiveDone" in targets
    if "AsyncCollectiveStart" in targets:
        for each in fused:
            yield Start(channel, _transfer(each))
        # They are under way, and the end of this instruction does not wait for them.
        fused = []
    if instruction.opcode == "async-start":
        for each in fused:
            yield Start(instruction.name, _transfer(each))
        return
    kernel = read_kernel(scope.module, scope.computation, instruction)
    # The memory traffic of a fusion without products is that of its transfer.
    if kernel is not None and kernel.flops:
        yield kernel
    if ends:
        yield Done(channel)
    else:
        yield from map(_transfer, fused)


def _transfer(collective: Collective) -> Transfer:
    return Transfer(
        kind=collective.kind,
        axes=collective.axes,
        sent_bytes=collective.sent_bytes,
        devices=collective.group_size,
    )


def _copied(scope: CallScope, instruction: Instruction) -> Transfer:
    """A copy between memories. Its result is a tuple, whose largest array is the one copied."""
    source = lookup(scope.computation, operands(instruction)[0]).shape
    result = instruction.shape
    kind = "memory"
    if any(array.space == HOST_SPACE for array in array_shapes(f"{source} {result}")):
        kind = "host"
    moved = size_in_bytes(source)
    if instruction.opcode != "copy-start":
        # The result has the operand, the slice, and a context.
        moved = size_in_bytes(result) - moved
    return Transfer(kind, (), max(0, moved), 1)


def _started_by(scope: CallScope, instruction: Instruction) -> str:
    """The name of the instruction that started what an instruction waits for."""
    name = operands(instruction)[0]
    start = lookup(scope.computation, name)
    if start.opcode.endswith("-update"):
        return _started_by(scope, start)
    return name
