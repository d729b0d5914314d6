"""What is computed again, by the lines of the user's code."""

from collections import Counter

from ...core._control_flow import primitive_name
from ...core._frames import own_line
from ._blocks import StepBlock
from ._choices import BlockChoice
from ._decide import Decided
from ._flat import Flat, FlatStep

_SHOWN, _NAMED = 5, 4  # lines, and operations of each
_LIBRARIES = "code of libraries"


def recomputed_lines(flat: Flat, decided: Decided) -> tuple[str, ...]:
    """The lines whose results are computed again, the costliest first, such as
    `model.py:12: dot_general, exp`."""
    seconds: Counter[str] = Counter()
    names: dict[str, dict[str, None]] = {}
    steps = _steps_again(flat, decided)
    for step, times in sorted(steps, key=lambda item: -item[0].seconds):
        line = own_line(getattr(step.equation.source_info, "traceback", None)) or _LIBRARIES
        seconds[line] += times * step.seconds  # pyright: ignore[reportArgumentType]
        if step.seconds:
            names.setdefault(line, {})[primitive_name(step.equation)] = None
    lines: list[str] = []
    for line, _ in seconds.most_common(_SHOWN):
        if line in names:
            named = list(names[line])[:_NAMED]
            lines.append(f"{line}: {', '.join(named)}")
    return tuple(lines)


def _steps_again(flat: Flat, decided: Decided) -> list[tuple[FlatStep, int]]:
    """The steps that are computed again, and how often."""
    steps: list[tuple[FlatStep, int]] = []
    for block, choice in decided:
        loop = flat.steps[block.start]
        if choice.inner and loop.body is not None and loop.scan is not None:
            times = loop.scan.length // len(choice.inner)
            for decided_of_turn in choice.inner:
                inside = _steps_again(loop.body, decided_of_turn)
                steps += [(step, many * times) for step, many in inside]
        elif choice.is_again:
            steps += [(step, 1) for step in _of_block(flat, block, choice)]
    return steps


def _of_block(flat: Flat, block: StepBlock, choice: BlockChoice) -> list[FlatStep]:
    """The steps of a block that what is needed, and not kept, is computed by."""
    steps = flat.steps[block.start : block.stop]
    wanted: set[int] = set()
    for step in steps:
        wanted |= step.needs
    again: list[FlatStep] = []
    for step in reversed(steps):
        if (wanted - choice.kept).isdisjoint(step.outputs) and not step.hides:
            continue
        again.append(step)
        wanted.update(step.reads)
    return again
