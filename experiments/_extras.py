"""Packages that only some experiments need, each in an extra of `pyproject.toml`."""

import contextlib
from collections.abc import Iterator

from _options import refuse


@contextlib.contextmanager
def from_extra(extra: str) -> Iterator[None]:
    """Ends the script with the command that installs an extra, if an import fails without it."""
    try:
        yield
    except ModuleNotFoundError as error:
        refuse(
            f"This experiment needs the package {error.name}, which is not installed: "
            f'python -m pip install -e ".[experiments,{extra}]"'
        )
