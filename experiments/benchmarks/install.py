"""Measures what `pip install` installs, and what `import redcoast` costs.

    python experiments/benchmarks/install.py
    python experiments/benchmarks/install.py --requirements . ".[experiments]"

Each requirement is installed with pip in a new virtual environment: the number of packages, their
size without compiled Python files, the time (downloads included, unless pip has cached them), and
how much of it only one of the direct dependencies needs. The import is that of the first
requirement: processor time, the smallest of five, beside those of JAX alone, and of the libraries
that redcoast always imports.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tyro

ROOT = Path(__file__).parents[2]
IMPORTS = {
    "jax": "import jax",
    "jax, equinox, optax, jaxtyping": "import jax, equinox, optax, jaxtyping",
    "redcoast": "import redcoast",
}
# Runs in the new environment, which has none of this script's packages.
LIST = """
import importlib.metadata as metadata, json, os, re
packages = {}
for package in metadata.distributions():
    name = re.sub("[-_.]+", "-", package.metadata["Name"]).lower()
    # Installers differ in whether they compile Python files.
    files = [package.locate_file(x) for x in package.files or () if x.suffix != ".pyc"]
    size = sum(os.path.getsize(file) for file in files if os.path.isfile(file))
    needs = [x for x in package.requires or () if "extra ==" not in x]
    names = [re.sub("[-_.]+", "-", re.match(r"[\\w.-]+", x)[0]).lower() for x in needs]
    packages[name] = {"bytes": size, "needs": names}
print(json.dumps(packages))
"""
TIME = """
import sys, time
before = len(sys.modules)
begin = time.process_time()
{}
print(time.process_time() - begin, len(sys.modules) - before)
print(*sorted(name for name in sys.modules if "." not in name))
"""
RARE = ("grain", "gguf", "matplotlib", "orbax", "safetensors", "tyro", "wandb")


def main(requirements: tuple[str, ...] = (".", ".[experiments]")) -> None:
    """Prints the tables.

    Args:
        requirements: What to install, as pip takes it; paths are relative to the repository.
    """
    with tempfile.TemporaryDirectory() as directory:
        for i, requirement in enumerate(requirements):
            python, seconds = install(requirement, Path(directory) / str(i))
            packages = json.loads(output(python, LIST))
            packages.pop("pip", None)
            packages.pop("setuptools", None)
            print_packages(requirement, packages, seconds)
            if i == 0:
                print_imports(python)
            shutil.rmtree(Path(directory) / str(i))


def install(requirement: str, environment: Path) -> tuple[Path, float]:
    """A new environment's Python, and the seconds that pip took."""
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    python = environment / "bin" / "python"
    begin = time.perf_counter()
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, requirement], check=True, cwd=ROOT)
    return python, time.perf_counter() - begin


def output(python: Path, code: str) -> str:
    """What a program prints; it sees only the packages of its environment."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), "-c", code]
    # Not in the repository, whose folders could be imported.
    options = {"cwd": python.parent, "env": variables, "check": True, "text": True}
    return subprocess.run(command, stdout=subprocess.PIPE, **options).stdout


def print_packages(requirement: str, packages: dict[str, Any], seconds: float) -> None:
    """The size of an installation, and what it would lack without each direct dependency."""
    size = sum(package["bytes"] for package in packages.values())
    print(f"\npip install {requirement}: {len(packages)} packages, {size / 1e6:,.0f} MB, ", end="")
    print(f"{seconds:.0f} s\n\nOf these, only needed by\n")
    everything = reachable(packages, {"redcoast"})
    rows = []
    for dependency in set(packages["redcoast"]["needs"]) & set(packages):
        others = {name: package["needs"] for name, package in packages.items()}
        needs = [name for name in others["redcoast"] if name != dependency]
        rest = reachable({**packages, "redcoast": {"needs": needs}}, {"redcoast"})
        only = everything - rest
        rows.append((sum(packages[name]["bytes"] for name in only), len(only), dependency))
    for size, count, dependency in sorted(rows, reverse=True):
        print(f"  {dependency:<20}{count:>4} packages {size / 1e6:>8,.1f} MB")


def reachable(packages: dict[str, Any], start: set[str]) -> set[str]:
    """The installed packages that these packages need, directly or not, and they themselves."""
    reached, new = set(start), set(start)
    while new:
        needed = {name for package in new for name in packages[package]["needs"]}
        new = (needed & set(packages)) - reached
        reached |= new
    return reached


def print_imports(python: Path) -> None:
    """The processor time and the modules of imports."""
    print("\nImports: processor time, and modules\n")
    runs: list[list[str]] = []
    for name, code in IMPORTS.items():
        runs = [output(python, TIME.format(code)).splitlines() for _ in range(5)]
        seconds = min(float(figures.split()[0]) for figures, _ in runs)
        modules = int(runs[0][0].split()[1])
        print(f"  {name:<32}{seconds:>6.2f} s {modules:>6} modules")
    imported = set(runs[0][1].split()) & set(RARE)
    print(f"\n  Imported only when they are used: {', '.join(sorted(set(RARE) - imported))}")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
