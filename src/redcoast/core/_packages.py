"""Packages that single functions need, and that are not installed with the project."""

import importlib.util
import sys


def require_package(name: str, purpose: str, installed: str | None = None) -> None:
    """Raises a `ModuleNotFoundError` with the command that installs a package, if it is missing.
    `installed` is what the command installs, by default the package."""
    if sys.modules.get(name) is None and importlib.util.find_spec(name) is None:
        command = f"pip install {installed or name}"
        raise ModuleNotFoundError(f"{purpose} needs the package `{name}`: {command}.")
