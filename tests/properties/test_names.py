"""A name of the library stands for one thing, so that a search for it finds that thing."""

import ast
import inspect
import re
from collections import defaultdict
from pathlib import Path

import equinox as eqx
from paths import ROOT

import redcoast as rc

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
# Measurements of what no public name has.
OF_INTERNALS = {
    "accelerators.py": "kernels and the schedule of a step that is compiled for absent devices",
    "memory_plan.py": "the arithmetic of a gradient, which the compiler counts without loops",
    "gpu_attention.py": "masks, and attention with and without a kernel, without a model",
    "ahead.py": "the arithmetic of programs that are compiled for absent devices",
    "attention.py": "the two implementations of attention, without a model around them",
    "data_parallel.py": "weights as an array for each layer, which only programs of decoding have",
    "expert_parallel.py": "a mixture of experts whose tokens are sent to the devices of experts",
    "first_fit.py": "the parts of the first `fit` of a process, which are timed inside of it",
    "gpu.py": "attention without cuDNN's kernel, beside attention with it",
    "loop.py": "a step whose updates XLA schedules as it does by default",
    "loop_parts.py": "the training step without some of its parts",
    "megatron_ahead.py": "the step of a dry run whose activations are not constrained",
    "planning.py": "the estimates of all meshes, without what the first of a process costs",
    "published_runs.py": "the schedule of a dry run, and the efficiencies of its estimate",
    "saving.py": "the parts of a load, which are timed by themselves",
    "step_ahead.py": "a gradient without a step around it, for devices that are not there",
}
# The command `redcoast` itself, of which scripts show or measure parts.
OF_THE_COMMAND = {
    "_cells.py": "the words and units of its dry runs",
    "_options.py": "how it reads meshes, wraps its help and refuses options, for all scripts",
    "_table1.py": "its search for the smallest number of devices, for the models of a paper",
    "dry_run.py": "the command `redcoast dry-run`, with one more option",
    "megatron_ahead.py": "the workloads of its dry runs",
    "meshes.py": "the workloads of its dry runs",
    "real_peak.py": "the workloads of its dry runs",
}
PRIVATE_OF_COMMAND = re.compile(r"\bredcoast_cli import (\w+, )*_|\bredcoast_cli(\.\w+)*\._\w")
PRIVATE = re.compile(r"\b(from|import) redcoast(\.\w+)* import (\w+, )*_|\bredcoast(\.\w+)*\._\w")


def shared(named: dict[str, list[Path]]) -> dict[str, list[str]]:
    return {name: list(map(str, actual)) for name, actual in named.items() if len(actual) > 1}


def is_overload(node: ast.stmt) -> bool:
    """Whether this is a signature of the function that follows it."""
    decorators = getattr(node, "decorator_list", [])
    return any(isinstance(x, ast.Name) and x.id == "overload" for x in decorators)


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
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or is_overload(node):
                continue
            if not node.name.startswith("_"):
                named[node.name].append(path)
    of_commands = {x for x in OF_EACH_COMMAND if all("_cli" in str(p) for p in named[x])}
    of_tables = {x for x in OF_EACH_TABLE if all(p.parent == TABLES for p in named[x])}
    actual = {k: v for k, v in named.items() if k not in of_commands | of_tables}
    assert shared(actual) == {}


def test_every_model_defines_its_constructor():
    """Type checkers would derive one from the fields, and refuse `config` and `key`."""
    for name, model in vars(rc.models).items():
        if isinstance(model, type) and issubclass(model, eqx.Module):
            assert "def __init__(self, config" in inspect.getsource(model), name


def test_experiments_use_public_names():
    """A user copies an experiment, and private names change without notice."""
    private, of_command = set(), set()
    for path in sorted((ROOT / "experiments").rglob("*.py")):
        text = path.read_text("utf-8")
        if PRIVATE.search(text):
            private.add(path.name)
        if PRIVATE_OF_COMMAND.search(text):
            of_command.add(path.name)
    assert private == set(OF_INTERNALS)
    assert of_command == set(OF_THE_COMMAND)
