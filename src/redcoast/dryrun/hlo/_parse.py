"""Parses the text of compiled HLO into computations and instructions."""

import re
from dataclasses import dataclass, replace
from math import prod

# `ENTRY %main.5 (x.1: f32[8]) -> f32[8] {`
_COMPUTATION = re.compile(r"(ENTRY )?%([\w.-]+) \(.*\{$")
# `  ROOT %add.3 = f32[8]{0} add(%a, %b), metadata={op_name="jit(f)/add"}`
# The shape ends at the first word followed by a parenthesis: layouts have no such word.
_INSTRUCTION = re.compile(r"\s+(ROOT )?%([\w.-]+) = (.+?) ([a-z][\w-]*)\((.*)$")
# `f32[8,32]{1,0:T(8,128)}`: the dtype, the dimensions, and the layout with tiles and memory space.
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\](?:\{([^{}]*)\})?")
_WIDTH = re.compile(r"(?:bf|f|s|u|c)(\d+)")  # `f8e4m3fn` has 8 bits, and `c64` has 64
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_NAME = re.compile(r"%([\w.-]+)")
_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Instruction:
    """One line, `%name = shape opcode(rest`: `rest` holds the operands and the attributes."""

    name: str
    shape: str
    opcode: str
    rest: str


@dataclass(frozen=True)
class Computation:
    instructions: dict[str, Instruction]
    root: str


@dataclass(frozen=True)
class Module:
    computations: dict[str, Computation]
    entry: str
    replicas: int
    partitions: int


def parse_module(text: str) -> Module:
    """Parses the text that `compiled.as_text()` returns.

    Raises `ValueError` if it is not the text of one complete compiled program.
    """
    header = re.search(r"^HloModule .*$", text, re.MULTILINE)
    if header is None:
        raise ValueError(
            "This is not compiled HLO: no line starts with `HloModule`. Pass the text that "
            "`jax.jit(fn).lower(...).compile().as_text()` returns."
        )
    computations: dict[str, Computation] = {}
    entries: list[str] = []
    current: str | None = None  # the name of the computation that the lines belong to
    instructions: dict[str, Instruction] = {}
    root: str | None = None
    last: Instruction | None = None
    for number, line in enumerate(text.split("\n"), start=1):
        if current is None:
            opening = _COMPUTATION.match(line)
            if opening is not None:
                current, instructions, root, last = opening[2], {}, None, None
                if opening[1]:
                    entries.append(opening[2])
        elif line.startswith("}") and not _is_open(last):
            if root is None:
                raise ValueError(
                    f"The computation `{current}` of the HLO text has no instruction marked ROOT."
                )
            computations[current] = Computation(instructions, root)
            current = None
        elif last is not None and not line.startswith(" ") and line.strip():
            # The attributes of a kernel of Pallas take several lines.
            last = replace(last, rest=f"{last.rest} {line}")
            instructions[last.name] = last
        elif line.strip():
            match = _INSTRUCTION.match(line)
            if match is None:
                raise ValueError(
                    f"Line {number} of the HLO text is not an instruction: {line.strip()[:80]!r}. "
                    "It should look like `%name = f32[8]{0} opcode(%operand), attributes`."
                )
            is_root, name, shape, opcode, rest = match.groups()
            last = Instruction(name, shape, opcode, rest)
            instructions[name] = last
            if is_root is not None:
                root = name
    # A complete text ends behind the last computation.
    if current is not None:
        raise ValueError(f"The HLO text is cut off: it ends inside the computation `{current}`.")
    if len(entries) != 1:
        raise ValueError(
            f"The HLO text has {len(entries)} computations marked ENTRY, but a program has one. "
            "Pass the complete text of one compiled program."
        )
    return Module(
        computations=computations,
        entry=entries[0],
        replicas=_setting(header[0], "replica_count"),
        partitions=_setting(header[0], "num_partitions"),
    )


def _is_open(instruction: Instruction | None) -> bool:
    """Whether the attributes of an instruction go on in the next line: a brace is not closed."""
    if instruction is None:
        return False
    text = _STRING.sub("", instruction.rest)
    return text.count("{") > text.count("}")


def _setting(header: str, name: str) -> int:
    match = re.search(rf"\b{name}=(\d+)", header)
    if match is None:
        return 1
    return int(match[1])


def computation(module: Module, name: str) -> Computation:
    if name not in module.computations:
        raise ValueError(f"The HLO text refers to a missing computation `{name}`.")
    return module.computations[name]


def lookup(within: Computation, name: str) -> Instruction:
    if name not in within.instructions:
        raise ValueError(f"The HLO text refers to a missing instruction `{name}`.")
    return within.instructions[name]


def arguments(instruction: Instruction) -> tuple[str, str]:
    """The text of an instruction's operands, and of the attributes after them."""
    depth = 1
    for match in re.finditer(r"[()]", instruction.rest):
        if match[0] == "(":
            depth += 1
        else:
            depth -= 1
        if depth == 0:
            return instruction.rest[: match.start()], instruction.rest[match.end() :]
    raise ValueError(f"Unterminated operand list for `{instruction.name}` in the HLO text.")


def operands(instruction: Instruction) -> list[str]:
    """The names of an instruction's operands."""
    return _NAME.findall(arguments(instruction)[0])


def attributes(instruction: Instruction) -> str:
    """The text of the attributes without quoted strings, whose content is arbitrary."""
    return _STRING.sub('""', arguments(instruction)[1])


def called(instruction: Instruction, *names: str) -> list[str]:
    """The computations that the attributes of these names refer to."""
    pattern = rf"\b(?:{'|'.join(names)})=(\{{[^{{}}]*\}}|%[\w.-]+)"
    callees = []
    for reference in re.finditer(pattern, attributes(instruction)):
        callees += _NAME.findall(reference[1])
    return callees


def branches_of(instruction: Instruction) -> list[str]:
    """The computations of a conditional: by number, or one for true and one for false."""
    return called(instruction, "branch_computations", "true_computation", "false_computation")


def operation_name(text: str) -> str | None:
    """The name of an operation in the traced program, from the metadata of an instruction."""
    match = _OP_NAME.search(text)
    if match is None:
        return None
    return match[1]


def callee(instruction: Instruction, *names: str) -> str:
    """The one computation that the attributes of these names refer to."""
    callees = called(instruction, *names)
    if len(callees) != 1:
        raise ValueError(
            f"The instruction `{instruction.name}` of the HLO text refers to {len(callees)} "
            f"computations by `{'` or `'.join(names)}`, but must refer to one."
        )
    return callees[0]


@dataclass(frozen=True)
class ArrayShape:
    """An array on one device, such as `f32[8,32]{1,0:T(8,128)}`: `layout` is the text in braces."""

    dtype: str
    sizes: tuple[int, ...]
    layout: str

    @property
    def minor_to_major(self) -> tuple[int, ...]:
        """The dimensions, from the one whose elements are next to each other in memory to the one
        whose elements are farthest apart."""
        # What a layout has before a colon.
        order = _sizes(self.layout.partition(":")[0])
        if len(order) != len(self.sizes):  # without a layout, the last dimension is the minor one
            return tuple(reversed(range(len(self.sizes))))
        return order

    @property
    def bits(self) -> int:
        """The bits that an element takes in memory."""
        if self.dtype == "pred":
            return 8
        width = _WIDTH.match(self.dtype)
        if width is None:
            raise ValueError(
                f"The HLO text has arrays of type `{self.dtype}`, whose size is unknown."
            )
        bits = int(width[1])
        if bits >= 8:
            return bits
        # Numbers of less than 8 bits take a byte each, unless the layout packs them.
        # The bits of an element, as in `s4[8]{0:E(4)}`.
        packed = re.search(r"E\((\d+)\)", self.layout)
        if packed is None:
            return 8
        return int(packed[1])

    @property
    def bytes(self) -> int:
        if self.dtype in ("token", "opaque"):
            return 0
        return -(-prod(self.sizes) * self.bits // 8)

    @property
    def space(self) -> int:
        """The memory space, of which 0 is the device's main memory."""
        written = re.search(r"S\((\d+)\)", self.layout)
        if written is None:
            return 0
        return int(written[1])


def array_shapes(shape: str) -> list[ArrayShape]:
    """The arrays of a shape, or of a tuple of shapes."""
    arrays: list[ArrayShape] = []
    for dtype, dims, layout in _ARRAY.findall(shape):
        arrays.append(ArrayShape(dtype, _sizes(dims), layout))
    return arrays


def _sizes(dims: str) -> tuple[int, ...]:
    """The dimensions of an array, such as `8,32`; a dynamic one, `<=8`, is allocated at its
    bound."""
    sizes = []
    for dim in dims.split(","):
        if dim:  # a scalar has no dimensions
            sizes.append(int(dim.removeprefix("<=")))
    return tuple(sizes)


def first_array(shape: str) -> ArrayShape:
    """The array of a shape, or the first one of a tuple."""
    for array in array_shapes(shape):
        return array
    raise ValueError(f"The HLO text has `{shape}` where an array was expected.")


def size_in_bytes(shape: str) -> int:
    """The bytes of a shape, or of a tuple of shapes, on one device."""
    return sum(array.bytes for array in array_shapes(shape))
