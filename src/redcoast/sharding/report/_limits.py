"""Whether the estimates of a plan stay below limits."""

import os

from ...core._errors import check_number
from ._data import LineCost, ProgramReport
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
            costs = [(line.memory_bytes, line) for line in program.lines]
            raise ValueError(
                f"Each device needs about {scaled(program.memory.total)} of memory, more than "
                f"max_memory={max_memory:,.0f} bytes. {_costliest(costs, 'keep')}"
            )
    if max_bytes is not None:
        check_number("max_bytes", max_bytes)
        sent = sum(traffic.bytes for traffic in program.traffic)
        if sent > max_bytes:
            costs = [(line.sent_bytes, line) for line in program.lines]
            raise ValueError(
                f"Each device communicates about {scaled(sent)} in a step, more than "
                f"max_bytes={max_bytes:,.0f} bytes. {_costliest(costs, 'send')}"
            )


def _costliest(costs: list[tuple[int, LineCost]], verb: str) -> str:
    """A sentence on the lines that cost most."""
    ordered = sorted(costs, key=lambda cost: -cost[0])
    texts: list[str] = []
    for size, line in ordered[:_NAMED]:
        # What belongs to no line of the user's code has no file.
        if size and line.file:
            texts.append(f"{os.path.basename(line.file)}:{line.number} ({scaled(size)})")
    if not texts:
        return '`plan.table(by="line")` lists what each line costs.'
    return f'These lines {verb} most: {", ".join(texts)}. `plan.table(by="line")` lists all.'
