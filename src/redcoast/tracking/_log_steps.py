"""The steps whose metrics are printed: the same in each run of a length, however fast it is."""

_LINES = 20  # at least, of a run that has as many steps


def is_logged(step: int, steps: int | None, *, lines: int = _LINES) -> bool:
    """Whether a step is printed in a run of so many steps.

    They are the first, and those that a round number (1, 2, 5, 10, 20, ...) divides, so that there
    are from `lines` to two and a half times as many. If the length is not known, they are 1 to 10,
    20, 30, ..., 100, 200, ...
    """
    if step == 1:
        return True
    if steps is None:
        return step % 10 ** (len(str(step)) - 1) == 0
    return step % _round_below(steps // lines) == 0


def _round_below(number: int) -> int:
    """The largest of 1, 2, 5, 10, 20, 50, ... that is not above a number; at least 1."""
    power = 10 ** (len(str(max(number, 1))) - 1)
    return max(factor * power for factor in (1, 2, 5) if factor == 1 or factor * power <= number)
