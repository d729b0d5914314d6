"""Each experiment finds the packages that it imports, or names the extra that installs them."""

import ast
import functools as ft
import re
import sys
import tomllib
from importlib.metadata import packages_distributions, requires

from paths import EXPERIMENTS, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
normal = lambda name: re.sub(r"[-_.]+", "-", name).lower()


def names(requirements):
    return {normal(re.split(r"[^\w.-]", text)[0]) for text in requirements}


def installed_by(requirements):
    """The packages that are installed for some requirements, without their own extras."""
    reached, new = set(), names(requirements)
    while new:
        reached |= new
        needs = [x for name in new for x in _needs(name)]
        new = names(needs) - reached
    return reached


@ft.cache  # most packages need the same few
def _needs(name):
    try:
        return [x for x in requires(name) or () if "extra ==" not in x]
    except ImportError:  # PackageNotFoundError
        return []


def imports(file):
    """The packages that a script imports, each with the extra of the block that it stands in."""
    tree = ast.parse(file.read_text("utf-8"))
    extras = {}
    for block in ast.walk(tree):
        if isinstance(block, ast.With) and "from_extra" in ast.unparse(block.items[0]):
            call = block.items[0].context_expr
            assert isinstance(call, ast.Call)
            extra = ast.literal_eval(call.args[0])
            extras |= {id(node): extra for node in ast.walk(block)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules = [node.module or ""]
        else:
            continue
        for module in modules:
            yield module.partition(".")[0], extras.get(id(node))


# Imported only if a user's own file needs it, after a look whether it is there.
OPTIONAL = {"transformers", "tensorboardX"}
# It brings torch, so no extra installs it. The script says what does.
OPTIONAL |= {"lm_eval"}
ALWAYS = installed_by([*PROJECT["dependencies"], *EXTRAS["experiments"]])
OF_SERVER = {"serve.py": "serve", "_openai.py": "serve"}


def test_each_import_is_of_an_extra_that_the_script_names():
    distributions = packages_distributions()
    own = {file.stem for file in EXPERIMENTS.glob("*.py")} | {"redcoast", "redcoast_cli"}
    seen = set()
    for file in sorted(EXPERIMENTS.glob("*.py")):
        for module, extra in imports(file):
            if module in own | OPTIONAL or module in sys.stdlib_module_names:
                continue
            (package, *_) = distributions[module]
            extra = extra or OF_SERVER.get(file.name)
            there = ALWAYS if extra is None else installed_by(EXTRAS[extra]) | ALWAYS
            assert normal(package) in there, (file.name, module, extra)
            seen.add(extra)
    assert {"privacy", "rl", "text"} <= seen


def test_a_missing_extra_is_one_sentence(monkeypatch, refused):
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    from _extras import from_extra

    words = (
        "This experiment needs the package a_package_that_is_not_there, which is not installed: "
        r'python -m pip install -e "\.\[experiments,rl\]"'
    )
    with refused(words), from_extra("rl"):
        import a_package_that_is_not_there  # noqa: F401  # pyright: ignore[reportMissingImports]
