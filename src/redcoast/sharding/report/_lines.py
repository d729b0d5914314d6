"""The memory and the communication of a plan, by the line of code, and limits of both.

A line is the innermost one in the user's code, or in a model of redcoast.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from linecache import getline
from operator import attrgetter

from jax.extend.core import JaxprEqn

from ...core._errors import check_number
from ...core._frames import first_own, own_or_model_frame
from ..program._graph import Source
from ..program._program import Program
from ..solver._buffers import WrittenBytes
from ._data import LineCost, ProgramReport, total_bytes
from ._sent import Sent
from ._text import WIDTH, hanging, megabytes, scaled

Frame = tuple[str, int]  # a file and the number of a line
_NOWHERE: Frame = ("", 0)
_SHOWN = 20  # lines of a table
_NAMED = 3  # lines in a message


def find_lines(
    entries: Iterable[Sent], memory: Iterable[WrittenBytes], program: Program
) -> tuple[LineCost, ...]:
    """The lines of the user's code that cost most, with the bytes of each.

    `entries` are what devices send, and `memory` the intermediate values at the peak.
    """
    frames = _Frames()
    sent: Counter[Frame] = Counter()
    saved: Counter[Frame] = Counter()
    causes: dict[Frame, Counter[str]] = defaultdict(Counter)
    for entry in entries:
        frame = frames.of(entry.source)
        cause, _, _ = entry.cause.partition(":")
        sent[frame] += entry.bytes  # pyright: ignore[reportArgumentType]
        causes[frame][cause] += entry.bytes  # pyright: ignore[reportArgumentType]
    for size, source in memory:
        saved[frames.of(source)] += size  # pyright: ignore[reportArgumentType]
    # Constants are in memory all the time, and belong to the line that first uses them.
    for constant in program.constants:
        source = program.graph.first_use_of(constant.values[0]).source
        frame = frames.of(source)
        saved[frame] += constant.bytes
        causes[frame]["arrays that the function closes over"] += constant.bytes
    lines: list[LineCost] = []
    # In any order: they are sorted below.
    for frame in {*sent, *saved}:
        # Each line has both: what is in memory at the peak, and what is sent because of it.
        memory_bytes, sent_bytes = round(saved[frame]), round(sent[frame])
        if not memory_bytes and not sent_bytes:
            continue
        costly = tuple(cause for cause, size in causes[frame].most_common() if size)
        caller = frames.callers.get(frame, _NOWHERE)
        lines.append(LineCost(*frame, memory_bytes, sent_bytes, costly, caller))
    return tuple(sorted(lines, key=_order))


def _order(line: LineCost) -> tuple[int, str, int]:
    """The costliest first, and lines that cost the same by their places."""
    return -(line.memory_bytes + line.sent_bytes), line.file, line.number


class _Frames:
    """The lines of operations; each operation is read once.

    `callers` has, for each line of a model of redcoast, the user's line that first called it.
    """

    def __init__(self):
        self.callers: dict[Frame, Frame] = {}
        self._known: dict[int, tuple[Frame | None, Frame | None]] = {}

    def of(self, source: Source) -> Frame:
        """The line of an operation, or else of the innermost call around it that has one."""
        frame: Frame | None = None
        # The operations in a loop know the lines in its body alone.
        for equation in reversed(source):
            inner, own = self._read(equation)
            frame = frame or inner
            if frame is not None and own is not None:
                self.callers.setdefault(frame, own)
                break
        return frame or _NOWHERE

    def _read(self, equation: JaxprEqn) -> tuple[Frame | None, Frame | None]:
        """The innermost line of the user's code or of a model, and that of the user's code."""
        if id(equation) not in self._known:
            trace = getattr(equation.source_info, "traceback", None)
            frames = [(f.file_name, f.line_num) for f in getattr(trace, "frames", ())]
            self._known[id(equation)] = own_or_model_frame(frames), first_own(frames)
        return self._known[id(equation)]


def draw_lines(program: ProgramReport) -> str:
    """A table of the lines that cost most, with their code."""
    lines = [f"{'memory MB':>10}  {'sent MB':>10}  line"]
    for line in program.lines[:_SHOWN]:
        first = f"{megabytes(line.memory_bytes):>10}  {megabytes(line.sent_bytes):>10}  "
        code = getline(line.file, line.number).strip()
        place = f"{os.path.basename(line.file)}:{line.number}"
        if not line.file:
            place = "no line of your code"
        # A very long line of code would hide the others.
        lines += hanging(first, f"{place}  {code}"[: 3 * WIDTH])
        if line.causes:
            indent = " " * (len(first) + 2)
            lines += hanging(indent, "; ".join(line.causes))
    rest = program.lines[_SHOWN:]
    if rest:
        memory = megabytes(sum(map(attrgetter("memory_bytes"), rest)))
        sent = megabytes(sum(map(attrgetter("sent_bytes"), rest)))
        lines.append(f"{memory:>10}  {sent:>10}  {len(rest)} other lines")
    memory = program.memory
    others = memory.total - memory.activations - memory.closed_over
    lines.append(f"{megabytes(others):>10}  {'':>10}  the model, its gradients and optimizer state")
    return "\n".join(lines)


def check_limits(
    program: ProgramReport, max_bytes: int | float | None, max_memory: int | float | None
) -> None:
    """Raises `ValueError` with the costliest lines if an estimate exceeds its limit."""
    if max_memory is None and max_bytes is None:
        raise ValueError("`check` needs a limit: pass `max_bytes`, `max_memory` or both.")
    if max_memory is not None:
        check_number("max_memory", max_memory)
        if program.memory.total > max_memory:
            costliest = _costliest(program.lines, attrgetter("memory_bytes"), "keep")
            raise ValueError(
                f"Each device needs about {scaled(program.memory.total)} of memory, more than "
                f"max_memory={max_memory:,.0f} bytes. {costliest}"
            )
    if max_bytes is not None:
        check_number("max_bytes", max_bytes)
        sent = total_bytes(program.traffic)
        if sent > max_bytes:
            costliest = _costliest(program.lines, attrgetter("sent_bytes"), "send")
            raise ValueError(
                f"Each device communicates about {scaled(sent)} in a step, more than "
                f"max_bytes={max_bytes:,.0f} bytes. {costliest}"
            )


def _costliest(lines: Sequence[LineCost], cost: Callable[[LineCost], int], verb: str) -> str:
    """A sentence on the lines that cost most."""
    ordered = sorted(lines, key=cost, reverse=True)
    texts: list[str] = []
    for line in ordered[:_NAMED]:
        size = cost(line)
        # What belongs to no line of the user's code has no file.
        if size and line.file:
            texts.append(f"{os.path.basename(line.file)}:{line.number} ({scaled(size)})")
    if not texts:
        return '`plan.table(by="line")` lists what each line costs.'
    return f'These lines {verb} most: {", ".join(texts)}. `plan.table(by="line")` lists all.'
