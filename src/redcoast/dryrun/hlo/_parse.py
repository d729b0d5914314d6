"""The text of compiled HLO, as computations made of instructions."""

import re
from dataclasses import dataclass
from math import prod

_COMPUTATION = re.compile(r"(ENTRY )?%([\w.-]+) \(.*\{$")
# The type ends at the first word with a parenthesis behind it: layouts have none after a space.
_INSTRUCTION = re.compile(r"\s+(ROOT )?%([\w.-]+) = (.+?) ([a-z][\w-]*)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\](?:\{([^{}]*)\})?")
_WIDTH = re.compile(r"(?:bf|f|s|u|c)(\d+)")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_NAME = re.compile(r"%([\w.-]+)")


@dataclass(frozen=True)
class Instruction:
    """One line: `%name = shape opcode(rest`, with `rest` the operands and the attributes."""

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
    """The computations of a program, from what `compiled.as_text()` returns."""
    header = re.search(r"^HloModule .*$", text, re.MULTILINE)
    if header is None:
        raise ValueError(
            "This is no compiled HLO: no line of it begins with `HloModule`. Pass the text that "
            "`jax.jit(fn).lower(...).compile().as_text()` returns."
        )
    computations: dict[str, Computation] = {}
    entries: list[str] = []
    current, found, root = None, {}, None
    for number, line in enumerate(text.split("\n"), start=1):
        if current is None:
            opening = _COMPUTATION.match(line)
            if opening is not None:
                current, found, root = opening[2], {}, None
                entries += [current] if opening[1] else []
        elif line.startswith("}"):
            computations[current] = Computation(found, root or _no_root(current))
            current = None
        elif line.strip():
            instruction, is_root = _instruction(line, number)
            found[instruction.name] = instruction
            root = instruction.name if is_root else root
    if current is not None:
        raise ValueError(f"The HLO text is cut off: it ends inside the computation `{current}`.")
    if len(entries) != 1:
        raise ValueError(
            f"The HLO text has {len(entries)} computations marked ENTRY, and a program has one. "
            "Pass the text of one whole compiled program."
        )
    return Module(
        computations=computations,
        entry=entries[0],
        replicas=_setting(header[0], "replica_count"),
        partitions=_setting(header[0], "num_partitions"),
    )


def _instruction(line: str, number: int) -> tuple[Instruction, bool]:
    match = _INSTRUCTION.match(line)
    if match is None:
        raise ValueError(
            f"Line {number} of the HLO text is no instruction: {line.strip()[:80]!r}. It should "
            "look like `%name = f32[8]{0} opcode(%operand), attributes`."
        )
    is_root, name, shape, opcode, rest = match.groups()
    return Instruction(name, shape, opcode, rest), is_root is not None


def _no_root(name: str) -> str:
    raise ValueError(f"The computation `{name}` of the HLO text has no instruction marked ROOT.")


def _setting(header: str, name: str) -> int:
    match = re.search(rf"\b{name}=(\d+)", header)
    return int(match[1]) if match else 1


def computation(module: Module, name: str) -> Computation:
    if name not in module.computations:
        raise ValueError(f"The HLO text refers to a computation `{name}` that it does not hold.")
    return module.computations[name]


def lookup(within: Computation, name: str) -> Instruction:
    if name not in within.instructions:
        raise ValueError(f"The HLO text refers to an instruction `{name}` that it does not hold.")
    return within.instructions[name]


def arguments(instruction: Instruction) -> tuple[str, str]:
    """What stands between an instruction's parentheses, and its attributes behind them."""
    depth = 1
    for match in re.finditer(r"[()]", instruction.rest):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return instruction.rest[: match.start()], instruction.rest[match.end() :]
    raise ValueError(f"The operands of `{instruction.name}` in the HLO text have no end.")


def operands(instruction: Instruction) -> list[str]:
    """The names of an instruction's operands."""
    return _NAME.findall(arguments(instruction)[0])


def attributes(instruction: Instruction) -> str:
    """The attributes without what is in quotes, which is the program's and may say anything."""
    return _STRING.sub('""', arguments(instruction)[1])


def called(instruction: Instruction, *names: str) -> list[str]:
    """The computations that the attributes of these names refer to."""
    pattern = rf"\b(?:{'|'.join(names)})=(\{{[^{{}}]*\}}|%[\w.-]+)"
    found = re.finditer(pattern, attributes(instruction))
    return [name for match in found for name in _NAME.findall(match[1])]


def callee(instruction: Instruction, *names: str) -> str:
    """The one computation that the attributes of these names refer to."""
    found = called(instruction, *names)
    if len(found) != 1:
        raise ValueError(
            f"The instruction `{instruction.name}` of the HLO text refers to {len(found)} "
            f"computations by `{'` or `'.join(names)}`, and it should to one."
        )
    return found[0]


def size_in_bytes(shape: str) -> int:
    """The bytes of an array or a tuple of arrays on one device, given as `f32[8,32]{1,0}`."""
    return sum(_array_bytes(*match.groups()) for match in _ARRAY.finditer(shape))


def _array_bytes(dtype: str, dims: str, layout: str | None) -> int:
    if dtype in ("token", "opaque"):
        return 0
    width = _WIDTH.match(dtype)
    if width is None and dtype != "pred":
        raise ValueError(f"The HLO text has arrays of type `{dtype}`, whose size is not known.")
    bits = int(width[1]) if width else 8
    if bits < 8:
        # Narrow numbers take a byte each unless the layout says that they are packed.
        packed = re.search(r"E\((\d+)\)", layout or "")
        bits = int(packed[1]) if packed else 8
    # A dimension of varying size, `<=8`, takes the room of its bound.
    count = prod(int(dim.removeprefix("<=")) for dim in dims.split(",") if dim)
    return -(-count * bits // 8)
