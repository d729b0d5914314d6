"""Whether the estimates of a plan stay below limits."""

import os
from collections.abc import Callable, Sequence
from operator import attrgetter

from ...core._errors import check_number
from ._data import LineCost, ProgramReport, total_bytes
from ._text import scaled

_NAMED = 3  # lines in a message


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
