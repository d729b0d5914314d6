"""A name of the library stands for one thing, so that a search for it finds that thing."""

import ast
from collections import defaultdict
from pathlib import Path

from paths import ROOT

SOURCES = [x for x in sorted((ROOT / "src").rglob("*.py")) if x.name != "__init__.py"]
# A table of Hugging Face's names is called like its family, and all of them have these functions.
TABLES = ROOT / "src" / "redcoast" / "pretrained" / "hf"
OF_EACH_TABLE = {
    "duplicates",
    "example_inputs",
    "module_name",
    "read",
    "settle",
    "tensors",
    "write",
}
OF_EACH_COMMAND = {"main"}


def shared(named: dict[str, list[Path]]) -> dict[str, list[str]]:
    return {name: list(map(str, found)) for name, found in named.items() if len(found) > 1}


def test_no_two_files_have_the_same_name():
    files = defaultdict(list)
    for path in SOURCES:
        if path.parent != TABLES:
            files[path.name].append(path)
    assert shared(files) == {}


def test_no_two_functions_or_classes_have_the_same_public_looking_name():
    named = defaultdict(list)
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                named[node.name].append(path)
    of_commands = {x for x in OF_EACH_COMMAND if all("_cli" in str(p) for p in named[x])}
    of_tables = {x for x in OF_EACH_TABLE if all(p.parent == TABLES for p in named[x])}
    found = {k: v for k, v in named.items() if k not in of_commands | of_tables}
    assert shared(found) == {}
