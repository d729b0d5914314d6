"""What is added to an error on its way to the user: whose it is, and what it was about."""

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def noting(note: str | Callable[[], str]) -> Iterator[None]:
    """Adds a note to what is raised inside, unless it has it already."""
    try:
        yield
    except BaseException as error:
        # A loss that takes training steps itself is inside of two that would say the same.
        text = note if isinstance(note, str) else note()
        if text not in getattr(error, "__notes__", []):
            error.add_note(text)
        raise


def listed(items: list[int], most: int = 32) -> str:
    """`[1, 2, 3]`, or the first of many and how many more there are."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return f"{items[:most]}{more}"
