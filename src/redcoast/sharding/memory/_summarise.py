"""What is computed again, by the lines of the user's code."""

from collections import Counter

from ...core._control_flow import primitive_name
from ...core._frames import own_line
from ._block_policies import BlockPolicies
from ._flat import FlatStep

_SHOWN, _NAMED = 5, 4  # lines, and operations of each
_LIBRARIES = "code of libraries"


def recomputed_lines(chosen: BlockPolicies) -> tuple[str, ...]:
    """The lines whose results are computed again, the costliest first, such as
    `model.py:12: dot_general, exp`."""
    seconds: Counter[str] = Counter()
    names: dict[str, dict[str, None]] = {}
    steps = _steps_again(chosen)
    for step, times in sorted(steps, key=lambda item: -item[0].seconds):
        line = own_line(getattr(step.equation.source_info, "traceback", None)) or _LIBRARIES
        seconds[line] += times * step.seconds  # pyright: ignore[reportArgumentType]
        if step.seconds:
            names.setdefault(line, {})[primitive_name(step.equation)] = None
    lines: list[str] = []
    for line, _ in seconds.most_common(_SHOWN):
        if line in names:  # other lines cost nothing
            named = list(names[line])[:_NAMED]
            lines.append(f"{line}: {', '.join(named)}")
    return tuple(lines)


def _steps_again(chosen: BlockPolicies) -> list[tuple[FlatStep, int]]:
    """The steps that are computed again, and how often."""
    again: list[tuple[FlatStep, int]] = []
    for block, policy in chosen:
        if block.loop is not None:
            for chosen_of_turn in policy.inner:
                times = block.loop.scan.length // len(policy.inner)
                for step, many in _steps_again(chosen_of_turn):
                    again.append((step, many * times))
        elif policy.recomputes:
            # What is needed, and not kept, is computed, and what that is computed from.
            wanted = block.needs
            for step in reversed(block.steps):
                if step.hides or not (wanted - policy.kept).isdisjoint(step.outputs):
                    again.append((step, 1))
                    wanted.update(step.reads)
    return again
