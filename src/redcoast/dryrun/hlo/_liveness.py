"""What is in the temporary memory of a compiled program when it is fullest.

The instructions of a compiled program are written in the order in which they run. A buffer lives
from the instruction that writes it to the last one that reads it. Instructions such as `bitcast`,
`tuple` and `while` have the buffers of their operands, and an elementwise operation writes over an
operand that is not needed afterwards. Arguments and results of the program, constants and what is
in a core's own memory are not temporaries.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from jaxtyping import PyTree

from ._parse import (
    Instruction,
    Module,
    attributes,
    branches_of,
    called,
    computation,
    operands,
    operation_name,
    parse_module,
    size_in_bytes,
)
from ._source_lines import Frame, read_frames

_INDEX = re.compile(r"\bindex=(\d+)")
_IN_CORE = re.compile(r"S\([1-9]\d*\)")  # the memory space of a layout
_WITHOUT_BUFFER = frozenset(["constant", "iota", "parameter", "partition-id", "replica-id"])
_SAME_BUFFER = frozenset(["bitcast", "opt-barrier", "optimization-barrier", "while"])
# Where the result is in the tuple that an instruction returns which starts something; of others, it
# is the second element, after the operands.
_RESULT_OF_START = {"all-reduce-start": None, "copy-start": 0}
_MAY_WRITE_OVER = frozenset(
    """
    abs add and ceil clamp compare convert copy cosine divide dynamic-update-slice exponential
    exponential-minus-one floor fusion log log-plus-one logistic maximum minimum multiply negate not
    or power remainder round-nearest-afz round-nearest-even rsqrt scatter select sign sine sqrt
    subtract tanh xor
    """.split()  # noqa: SIM905
)


@dataclass(frozen=True)
class HeldBuffer:
    """A buffer in use when most memory is.

    `source` is the name of the operation in the traced program that writes it, and `frames` are the
    files and numbers of the lines that it comes from, innermost first.
    """

    bytes: int
    source: str | None
    frames: tuple[Frame, ...]


@dataclass(eq=False)
class _Buffer:
    """A buffer from the place of one instruction to that of another."""

    bytes: int
    writer: Instruction
    born: int
    last: int


# The buffers of a value: one, or those of the elements of a tuple. None is not a temporary.
_Tree = PyTree


def peak_buffers(hlo_text: str) -> tuple[HeldBuffer, ...]:
    """The temporary buffers of a compiled program when most bytes are in use, the largest first.

    - `hlo_text`: the text that `jax.jit(fn).lower(...).compile().as_text()` returns, for CPU, GPU
        or TPU.

    Raises `ValueError` if the text is not compiled HLO or is cut off.
    """
    frames_of = read_frames(hlo_text)
    module = parse_module(hlo_text)
    buffers = []
    for buffer in _Program(module).peak(module.entry):
        rest = buffer.writer.rest
        frames = tuple(frames_of(rest))
        buffers.append(HeldBuffer(buffer.bytes, operation_name(rest), frames))
    return tuple(sorted(buffers, key=lambda buffer: -buffer.bytes))


@dataclass
class _Program:
    module: Module
    peaks: dict[str, list[_Buffer]] = field(default_factory=dict)

    def peak(self, name: str) -> list[_Buffer]:
        """What a computation holds at its peak, beside its operands and results."""
        if name in self.peaks:
            return self.peaks[name]
        body = computation(self.module, name)
        order = list(body.instructions.values())
        # What runs inside an instruction is in memory beside all that is live at its place.
        inside = [self._inside(instruction) for instruction in order]
        buffers, results = _buffers(order, body.root)
        begins: dict[int, list[_Buffer]] = defaultdict(list)
        ends: dict[int, list[_Buffer]] = defaultdict(list)
        for buffer in buffers:
            if buffer not in results:
                begins[buffer.born].append(buffer)
                ends[buffer.last].append(buffer)
        peak: list[_Buffer] = []
        live: dict[_Buffer, None] = {}
        size = most = 0
        for place in range(len(order)):
            live.update(dict.fromkeys(begins[place]))
            size += _total(begins[place])
            if size + _total(inside[place]) > most:
                most = size + _total(inside[place])
                peak = [*live, *inside[place]]
            # What is last read here still is in memory while the instruction runs.
            size -= _total(ends[place])
            for buffer in ends[place]:
                del live[buffer]
        self.peaks[name] = peak
        return peak

    def _inside(self, instruction: Instruction) -> list[_Buffer]:
        """What the computations that an instruction runs hold at their peak."""
        names: list[str] = []
        if instruction.opcode == "while":
            names = called(instruction, "condition", "body")
        elif instruction.opcode == "conditional":
            names = branches_of(instruction)
        elif instruction.opcode in ("call", "async-start"):
            names = called(instruction, "to_apply", "calls")
        return max(map(self.peak, names), key=_total, default=[])


def _total(buffers: Sequence[_Buffer]) -> int:
    return sum(buffer.bytes for buffer in buffers)


def _buffers(order: Sequence[Instruction], root: str) -> tuple[list[_Buffer], set[_Buffer]]:
    """All buffers of a computation, and those of its results."""
    # Dicts in place of sets of buffers keep the order of the program.
    last_reads: dict[str, int] = {}
    for place, instruction in enumerate(order):
        last_reads.update(dict.fromkeys(operands(instruction), place))
    values: dict[str, _Tree] = {}
    buffers: dict[_Buffer, None] = {}
    for place, instruction in enumerate(order):
        names = operands(instruction)
        reads = [values.get(name) for name in names]
        dying = []
        for name, read in zip(names, reads, strict=True):
            if last_reads[name] == place:
                dying.append(read)
        value = _value(instruction, reads, dying, place)
        values[instruction.name] = value
        in_use = reads
        if instruction.opcode == "get-tuple-element":
            in_use = value  # the other elements of the tuple are not read
        for buffer in _leaves(in_use):
            buffer.last = place
        buffers.update(dict.fromkeys(_leaves(value)))
    # Results live until after the last instruction.
    for buffer in _leaves(values.get(root)):
        buffer.last = len(order)
    return list(buffers), {*_leaves(values.get(root))}


def _value(instruction: Instruction, reads: list[_Tree], dying: list[_Tree], place: int) -> _Tree:
    """The buffers of a result; `dying` are operands that are not read later by their names."""
    opcode = instruction.opcode
    if opcode in _WITHOUT_BUFFER:
        return None
    if opcode == "tuple":
        return reads
    if opcode == "get-tuple-element":
        index = _INDEX.search(attributes(instruction))
        if index is None or not isinstance(reads[0], list):
            return None
        return reads[0][int(index[1])]
    if opcode in _SAME_BUFFER or opcode.endswith("-update"):
        return next(iter(reads), None)
    if opcode.endswith("-done"):
        # The first element of what the start returned; see below.
        return reads[0][0]
    sizes = _sizes(instruction.shape)
    if opcode.endswith("-start"):
        which = _RESULT_OF_START.get(opcode, 1)
        if which is not None:
            sizes = sizes[which]
        # The operands are read until the end.
        return [_allocate(sizes, instruction, place), *reads]
    tree = _allocate(sizes, instruction, place)
    # XLA lets an elementwise operation write over an operand of the same size.
    if isinstance(tree, _Buffer) and opcode in _MAY_WRITE_OVER:
        for read in dying:
            if isinstance(read, _Buffer) and read.bytes == tree.bytes:
                return read
    return tree


def _sizes(shape: str) -> PyTree:
    """The bytes of a shape, or those of each element of a tuple."""
    shape = shape.strip()
    if not shape.startswith("("):
        if _IN_CORE.search(shape):
            return 0
        return size_in_bytes(shape)
    parts: list[PyTree] = []
    # Splits at the commas of the tuple itself; `first` is where the current element begins.
    depth, first = 0, 1
    for place, letter in enumerate(shape):
        depth += letter in "([{"
        depth -= letter in ")]}"
        ends = depth == 0 or (letter == "," and depth == 1)
        if ends and shape[first:place].strip():
            parts.append(_sizes(shape[first:place]))
        if ends:
            first = place + 1
    return parts


def _allocate(sizes: PyTree, writer: Instruction, place: int) -> _Tree:
    if isinstance(sizes, list):
        return [_allocate(size, writer, place) for size in sizes]
    return _Buffer(sizes, writer, place, place)


def _leaves(tree: _Tree) -> Iterator[_Buffer]:
    if isinstance(tree, list):
        for part in tree:
            yield from _leaves(part)
    elif tree is not None:
        yield tree
