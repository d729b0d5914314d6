"""What a release is made of: its metadata and links, the changelog, and the page for assistants."""

import importlib
import re
import sys
import tomllib
import types
from typing import Any

import pytest
from paths import ROOT

import redcoast as rc

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
README = (ROOT / "README.md").read_text("utf-8")
ADDRESS = "https://example.org/owner/redcoast"


@pytest.fixture
def hook(monkeypatch):
    """`hatch_build.py`, without hatchling, which only builds have."""
    interface: Any = types.ModuleType("hatchling.metadata.plugin.interface")
    interface.MetadataHookInterface = type("MetadataHookInterface", (), {})
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    for name in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.syspath_prepend(str(ROOT))
    yield importlib.import_module("hatch_build")
    sys.modules.pop("hatch_build")


def links(text):
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return re.findall(r"\]\(([^)]+)\)", prose)


def test_the_readme_of_a_package_has_no_relative_links(hook):
    relative = [link for link in links(README) if not link.startswith("https://")]
    assert len(relative) > 10
    for address in ("", ADDRESS):
        text = hook.absolute_links(README, address)
        assert all(link.startswith("https://") for link in links(text))
    for link in relative:
        assert f"{ADDRESS}/blob/main/{link}" in text or f"{ADDRESS}/raw/main/{link}" in text
    assert "![The plan of a GPT-2 on eight devices" in text
    # Without an address the words stay, and the code blocks are those of the repository.
    words = hook.absolute_links(README, "")
    assert "Getting started · Concepts ·" in words
    assert re.findall(r"```python.*?```", words, re.DOTALL) == re.findall(
        r"```python.*?```", README, re.DOTALL
    )


def test_a_package_links_to_the_address_if_there_is_one(hook):
    assert hook.urls("") == {}
    assert hook.urls(ADDRESS)["Issues"] == f"{ADDRESS}/issues"
    address = PROJECT["tool"]["redcoast"]["address"]
    assert address == "" or re.fullmatch(r"https://[^/]+/.+[^/]", address)


def test_the_version_is_in_one_place():
    version = PROJECT["project"]["version"]
    assert rc.__version__ == version
    heads = re.findall(r"^## (.*)$", (ROOT / "docs/changelog.md").read_text("utf-8"), re.MULTILINE)
    assert heads[0] == "Unreleased" or heads[0].startswith(version)
    assert any(head.startswith(version) for head in heads)
    others = [
        file for file in ROOT.glob("src/**/*.py") if f'"{version}"' in file.read_text("utf-8")
    ]
    assert others == []


@pytest.mark.integration
def test_the_examples_for_assistants_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "AGENTS.md").read_text("utf-8")
    namespace = {}
    import jax

    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            exec(compile(block, "AGENTS.md", "exec"), namespace)
    # Each name of the library that the text has is there.
    for name in set(re.findall(r"\brc\.([A-Za-z_]+)", text)):
        assert hasattr(rc, name), name
