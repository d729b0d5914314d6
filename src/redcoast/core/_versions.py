"""The versions of other packages that redcoast was tested with."""

import platform
from importlib import metadata

# One row for each environment of `nox -s versions`, the oldest versions first.
_COLUMNS: tuple[str, ...] = ("Python", "jax", "equinox", "optax", "orbax-checkpoint")
_ROWS = (
    ("3.11", "0.10.2", "0.13.2", "0.2.8", "0.12.0"),
    ("3.11", "0.10.2", "0.13.8", "0.2.8", "0.12.8"),
    ("3.12", "0.11.2", "0.13.8", "0.2.8", "0.12.8"),
    ("3.13", "0.12.0.1", "0.13.8", "0.2.8", "0.12.8"),
)
TESTED: tuple[dict[str, str], ...] = tuple(dict(zip(_COLUMNS, row, strict=True)) for row in _ROWS)


def own_version() -> str:
    """Returns the installed version of redcoast."""
    try:
        return metadata.version("redcoast")
    except metadata.PackageNotFoundError:  # used from its source, without an installation
        return "(not installed)"


def versions_tested(package: str) -> str:
    """Returns the tested versions of a package, such as `0.10.2 and 0.12.0.1`."""
    *others, newest = dict.fromkeys(row[package] for row in TESTED)
    if others:
        return f"{', '.join(others)} and {newest}"
    return newest


def installed_versions() -> dict[str, str]:
    """Returns the installed version of Python, and of each package of `TESTED`."""
    major, minor, _ = platform.python_version_tuple()
    packages = {package: metadata.version(package) for package in _COLUMNS[1:]}
    return {"Python": f"{major}.{minor}", **packages}


def untested(installed: dict[str, str]) -> list[str]:
    """Returns what was not tested together, such as `jax 0.13.0 (tested: 0.12.0.1)`.

    The versions are compared with the tested environment that shares most of them.
    """
    nearest, fewest = TESTED[-1], list(_COLUMNS)
    # The newest of those that share as many.
    for environment in reversed(TESTED):
        other = [name for name in _COLUMNS if installed[name] != environment[name]]
        if len(other) < len(fewest):
            nearest, fewest = environment, other
    return [f"{name} {installed[name]} (tested: {nearest[name]})" for name in fewest]
