"""How a script ends that was asked for what cannot be."""

import sys
from typing import NoReturn


def refuse(message: str) -> NoReturn:
    """Says what is wrong, and exits with 2, as for an option that there is not."""
    print(message, file=sys.stderr, flush=True)
    raise SystemExit(2)
