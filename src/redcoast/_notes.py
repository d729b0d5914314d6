"""What is added to an error on its way to the user: whose it is, and what it was about."""

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def noting(note: str | Callable[[], str]) -> Iterator[None]:
    """Adds a note to what is raised inside."""
    try:
        yield
    except BaseException as error:
        error.add_note(note if isinstance(note, str) else note())
        raise


def listed(items: list[int], most: int = 32) -> str:
    """`[1, 2, 3]`, or the first of many and how many more there are."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return f"{items[:most]}{more}"
