"""Blocks of the docs that are not a part of their page's program: each runs, or is listed why not.

A block that starts with ```python runs with its page (`test_docs.py`). All others that are code are
listed in `tests/helpers/fragments.py`.
"""

import importlib.util
import os
import re
import subprocess
import sys
import textwrap

import pytest
from fragments import FRAGMENTS, Fragment
from paths import EXPERIMENTS, ROOT

DOCS = ROOT / "docs"
# Pages of notebooks are written from them, by `nox -s notebooks`, which runs them.
PAGES = {
    path.relative_to(DOCS).as_posix(): path.read_text("utf-8")
    for path in sorted(DOCS.rglob("*.md"))
    if path.parent.name != "notebooks"
}
RUNS = [fragment for fragment in FRAGMENTS if not fragment.elsewhere]


def blocks(text: str) -> list[tuple[str, str]]:
    """The language and the code of each fenced block."""
    actual = re.findall(r"^( *)```(\w*)\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL)
    return [(language, textwrap.dedent(body)) for _, language, body in actual]


def code_of(fragment: Fragment) -> str:
    others = [body for language, body in blocks(PAGES[fragment.page]) if language != "python"]
    (body,) = [body for body in others if fragment.line in body]
    return body


@pytest.mark.parametrize("page", PAGES)
def test_every_block_runs_with_its_page_or_is_listed(page):
    """No block can be added that is never run: a new `py` block fails here."""
    listed = [code_of(fragment) for fragment in FRAGMENTS if fragment.page == page]
    code = [body for language, body in blocks(PAGES[page]) if language in ("py", "yaml")]
    assert sorted(code) == sorted(listed)
    languages = {language for language, _ in blocks(PAGES[page])}
    assert languages <= {"python", "py", "yaml", "bash", "text"}


@pytest.mark.integration
@pytest.mark.parametrize("fragment", RUNS, ids=lambda x: f"{x.page}: {x.line}")
def test_fragment_runs(fragment, tmp_path):
    missing = [name for name in fragment.needs if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)} (nox -s fragments)")
    program = tmp_path / "program.py"
    own = [body for language, body in blocks(PAGES[fragment.page]) if language == "python"]
    program.write_text("\n".join([fragment.setup, *own[: fragment.after], code_of(fragment)]))
    environment = {k: v for k, v in os.environ.items() if k != "NPROC"}
    environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    result = subprocess.run(
        [sys.executable, program.name],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr


def commands() -> list[str]:
    """The shell commands of README, CONTRIBUTING and all pages."""
    texts = [*PAGES.values(), *((ROOT / f"{x}.md").read_text() for x in ("README", "CONTRIBUTING"))]
    shell = [body for text in texts for language, body in blocks(text) if language != "python"]
    lines = "\n".join(shell).replace("\\\n", " ").splitlines()
    return sorted({line.strip() for line in lines})


def test_scripts_of_the_commands_exist_and_have_their_options():
    """A renamed script or option, of which a page still speaks, fails here."""
    helpers = "".join(path.read_text() for path in EXPERIMENTS.glob("_*.py"))
    helpers += "".join(path.read_text() for path in (ROOT / "src/redcoast_cli").glob("*.py"))
    checked = 0
    for command in commands():
        script = re.search(r"\bpython(?: -m)? (\S+\.py)\b(.*)", command)
        if script is None or not script[1].startswith("experiments/"):
            continue
        source = (ROOT / script[1]).read_text("utf-8") + helpers
        for option in re.findall(r" --([a-z][\w-]+)", script[2]):
            field = option.replace("-", "_")
            assert re.search(rf'\b{field}: |"--{option}|\b{field}\b', source), command
        checked += 1
    assert checked > 20


def test_sessions_of_the_commands_exist():
    sessions = (ROOT / "noxfile.py").read_text("utf-8")
    texts = "\n".join([*PAGES.values(), (ROOT / "README.md").read_text()])
    names = set(re.findall(r"nox -s ([\w-]+)", texts))
    assert len(names) > 5
    for name in names:
        assert f"def {name}(" in sessions or f'name="{name}"' in sessions, name
