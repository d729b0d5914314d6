"""Ends a script that was called with invalid options."""

import sys
from typing import NoReturn


def refuse(message: str) -> NoReturn:
    """Prints a message to stderr and exits with code 2, as for an unknown option."""
    print(message, file=sys.stderr, flush=True)
    raise SystemExit(2)
