"""Checks the wheel and the sdist of a directory, as they would be published.

    python -m build && python tests/release_check.py dist
    python tests/release_check.py dist --final

With `--final`, the changelog must have a section of the version, with a date, and no other entries.
"""

import email
import re
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ("src/redcoast/py.typed", "tests/conftest.py", "docs/index.md", "experiments/maml.py")
SOURCES += ("README.md", "LICENSE", "AGENTS.md", "noxfile.py", "pyproject.toml", "hatch_build.py")


def problems(dist: Path, *, final: bool) -> list[str]:
    """What keeps the packages of a directory from being published, as sentences."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    version = project["project"]["version"]
    (wheel,), (source,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    address = project["tool"]["redcoast"]["address"]
    lines = [*_wheel(wheel, version, address), *_source(source, version)]
    return lines + (_changelog(version, address) if final else [])


def _wheel(wheel: Path, version: str, address: str) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        about = email.message_from_bytes(archive.read(metadata))
    lines = []
    own = ("redcoast/", "redcoast_cli/", f"redcoast-{version}.dist-info/")
    if others := [name for name in names if not name.startswith(own)]:
        lines.append(f"The wheel has other files than the package: {', '.join(others[:5])}.")
    if "redcoast/py.typed" not in names:
        lines.append("The wheel has no `py.typed`, so type checkers ignore its annotations.")
    files = {f"redcoast{path.removeprefix('src/redcoast')}" for path in _modules()}
    if missing := files - set(names):
        lines.append(f"The wheel lacks {', '.join(sorted(missing)[:5])}.")
    if about["Version"] != version:
        lines.append(f"The wheel is of version {about['Version']}, and the project of {version}.")
    if about["Description-Content-Type"] != "text/markdown":
        lines.append("The wheel's description is not Markdown.")
    if relative := re.findall(r"\]\((?!https?:|#)([^)]*)\)", str(about.get_payload())):
        lines.append(f"The wheel's description has relative links: {', '.join(relative[:5])}.")
    if address and not about.get_all("Project-URL"):
        lines.append("The wheel has no project URLs.")
    return lines


def _modules() -> list[str]:
    paths = [*ROOT.glob("src/redcoast*/**/*.py")]
    return [path.relative_to(ROOT).as_posix() for path in paths]


def _source(source: Path, version: str) -> list[str]:
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    lines = [f"The sdist lacks {name}." for name in SOURCES if name not in names]
    caches = [
        name for name in names if "__pycache__" in name or name.startswith((".git/", "site/"))
    ]
    return lines + [f"The sdist has {name}, which is generated." for name in sorted(caches)[:5]]


def _changelog(version: str, address: str) -> list[str]:
    text = (ROOT / "docs" / "changelog.md").read_text("utf-8")
    heads = re.findall(r"^## (.*)$", text, re.MULTILINE)
    lines = []
    if not re.fullmatch(rf"{re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", heads[0]):
        lines.append(
            f"The first section of docs/changelog.md is {heads[0]!r}. It must be that of the "
            f"version and its date, such as '{version} (2026-11-25)'."
        )
    if not address:
        lines.append("`address` in pyproject.toml is empty: fill in the URL of the repository.")
    return lines


if __name__ == "__main__":
    actual = problems(Path(sys.argv[1]), final="--final" in sys.argv)
    print(*(actual or ["The wheel and the sdist can be published."]), sep="\n")
    sys.exit(bool(actual))
