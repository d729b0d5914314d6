"""The steps whose metrics are printed, which depend only on the length of the run."""

_LINES = 20  # at least, if a run has as many steps


def is_logged(step: int, steps: int | None, *, lines: int = _LINES) -> bool:
    """Whether a step is printed in a run of `steps` steps.

    The first step is printed, and every multiple of a round number (1, 2, 5, 10, 20, ...), so that
    there are between `lines` and 2.5 times as many lines. If the length is unknown, the steps are 1
    to 10, 20, 30, ..., 100, 200, ...
    """
    if step == 1:
        return True
    if steps is None:
        # One digit, and then zeros.
        return step % 10 ** (len(str(step)) - 1) == 0
    return step % _round_below(steps // lines) == 0


def _round_below(number: int) -> int:
    """The largest of 1, 2, 5, 10, 20, 50, ... that is at most `number`; at least 1."""
    power = 10 ** (len(str(max(number, 1))) - 1)
    return max(factor * power for factor in (1, 2, 5) if factor == 1 or factor * power <= number)
