"""The options of experiments, read before anything that takes seconds is imported.

A script imports this module first. Then `--help` and messages about options need only the standard
library and tyro: JAX, redcoast and others are imported afterwards.
"""

import ast
import dataclasses
import json
import sys
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from redcoast_cli._usage import mesh_sizes as mesh_sizes
from redcoast_cli._usage import quiet_pipe, wrap_help
from redcoast_cli._usage import refuse as refuse

T = TypeVar("T")
# An optional value; the text of the option says what is used by default.
Maybe = Annotated[T | None, tyro.conf.arg(help_behavior_hint="")]
Mesh = Annotated[str, tyro.conf.arg(metavar="MESH")]


@dataclass(frozen=True)
class Least:
    """The smallest number that an option may be; without it, that is 1 for an integer."""

    number: int


@dataclass(frozen=True)
class Exists:
    """Says of a path that it must exist, unless it is one of these names."""

    names: tuple[str, ...] = ()

    def is_met(self, value: str) -> bool:
        return value in self.names or Path(value).exists()


FromZero = Annotated[int, Least(0)]
Seed = Annotated[int, Least(-(2**63))]
Existing = Annotated[Path, Exists()]
Weights = Annotated[str, Exists(("smollm2",))]
Images = Annotated[str, Exists(("digits", "mnist"))]
Encoder = Annotated[Path, Exists(("minilm",))]
STYLE = (tyro.conf.DisallowNone,)
# Modules with options; all others that a script imports, except Python's own, are slow.
FAST = ("tyro", "_options", "redcoast_cli._options")


@dataclass(frozen=True)
class Hosts:
    """Options for several processes that run one script together; see docs/hosts.md."""

    coordinator: Maybe[str] = None  # host:port of process 0; by default from the launcher
    processes: Maybe[int] = None  # number of processes; by default from the launcher
    process_id: Maybe[FromZero] = None  # index of this process; by default from the launcher
    local_devices: Maybe[int] = None  # emulate this many CPU devices in each process


HostsOptions = tyro.conf.OmitArgPrefixes[Hosts]


@dataclass(frozen=True)
class Run:
    """Options of every experiment."""

    mesh: Mesh = "data=-1"  # mesh of devices: 8, 2x4 (data x model), pipe=2,fsdp=4 or auto
    directory: Maybe[Path] = None  # directory with one directory per run; by default runs/SCRIPT
    resume: bool = False  # resume the newest run with its options, unless you pass others
    wandb: bool = False  # log to Weights & Biases (to a local file without an account)
    tensorboard: bool = False  # write event files for TensorBoard to the run's directory
    seed: Seed = 0  # random seed for the parameters, the data order and all else that is random
    hosts: HostsOptions = field(default_factory=Hosts)


RunOptions = tyro.conf.OmitArgPrefixes[Run]


def parse(config: Any, doc: str | None, args: list[str] | None = None) -> Any:
    """Reads the options of a script; to resume, those of the run are the defaults."""
    script = Path(sys.modules[config.__module__].__file__ or "")
    usage = {"prog": f"python {sys.argv[0]}", "description": description(doc, script)}

    def read_options(**default: Any) -> Any:
        with quiet_pipe():
            return tyro.cli(config, config=STYLE, args=args, **usage, **default)

    c = read_options()
    refuse_impossible(c)
    if not (hasattr(c, "run") and c.run.resume):
        return c
    root = c.run.directory or Path("runs") / script.stem
    stored = json.loads((newest_run(root) / "config.json").read_text())
    stored["run"] |= {"resume": True, "directory": c.run.directory}
    # Another process, or another launcher, has another address and index.
    stored["run"]["hosts"] = {"local_devices": stored["run"]["hosts"].get("local_devices")}
    return read_options(default=from_json(config, stored))


def refuse_impossible(options: Any) -> None:
    """Ends the program if a number is out of range, or a file is missing that must exist."""
    hints = typing.get_type_hints(type(options), include_extras=True)
    for option in dataclasses.fields(options):
        value = getattr(options, option.name)
        name = f"--{option.name.replace('_', '-')}"
        least, exists = limits(hints[option.name])
        if dataclasses.is_dataclass(value):
            refuse_impossible(value)
        elif isinstance(value, float) and not value >= 0:  # NaN is neither
            refuse(f"{name} must be a number from 0 on, but is {value}.")
        elif type(value) is int and value < least.number:
            refuse(f"{name} must be at least {least.number}, but is {value}.")
        elif exists and value is not None and not exists.is_met(str(value)):
            refuse(f"{name} is {value}, which does not exist.")


def limits(hint: Any) -> tuple[Least, Exists | None]:
    """What the annotations of an option say of its values."""
    least, exists = Least(1), None
    for mark in marks(hint):
        if isinstance(mark, Least):
            least = mark
        if isinstance(mark, Exists):
            exists = mark
    return least, exists


def marks(hint: Any) -> list[Any]:
    """The annotations of a type, also those of an optional value."""
    annotations = list(getattr(hint, "__metadata__", ()))
    for inner in typing.get_args(hint):
        annotations += marks(inner)
    return annotations


def newest_run(root: Path) -> Path:
    """The newest run in a directory of runs, whose names are times."""
    return existing_run(root, newest_name(root))


def newest_name(root: Path) -> str:
    """The name of the newest run in a directory of runs, empty if there is none."""
    return max((path.parent.name for path in root.glob("*/config.json")), default="")


def existing_run(root: Path, name: str) -> Path:
    """The directory of a run. Ends the program if there is no name."""
    if not name:
        raise SystemExit(f"There is no run to resume in {root}. Leave out --resume to start one.")
    return root / name


def from_json(kind: Any, values: dict[str, Any]) -> Any:
    """A dataclass of options from a `config.json`; what it lacks has its default."""
    hints = typing.get_type_hints(kind)
    options = {}
    for option in dataclasses.fields(kind):
        if option.name in values:
            options[option.name] = _convert(hints[option.name], values[option.name])
    return kind(**options)


def _convert(kind: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(kind):
        return from_json(kind, value)
    if value is not None and (kind is Path or Path in typing.get_args(kind)):
        return Path(value)
    if isinstance(value, list):
        return tuple(value)
    return value


def description(doc: str | None, script: Path) -> str:
    """The text of a script, with an example of its use."""
    text = wrap_help(doc or "")
    if f"{script.name} " in text:
        return text
    return f"{text}\n\nExample:\n    python {sys.argv[0]} --local-devices 8 --mesh 2x4"


def resume_command() -> str:
    """The command that resumes the newest run of this script."""
    words = ["python", sys.argv[0], "--resume"]
    for place, word in enumerate(sys.argv):
        if word == "--directory":
            words += sys.argv[place : place + 2]
        elif word.startswith("--directory="):
            words.append(word)
    return " ".join(words)


def read_early(script: Path) -> None:
    """Reads the options of a script that is being started, to refuse them or to print its help."""
    tree = ast.parse(script.read_text("utf-8"))
    imports = [node for node in tree.body if _is_fast(node)]
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    classes = [node for node in classes if node.name == "Config"]
    if not classes:
        return
    names: dict[str, Any] = {"__name__": "__main__", "_options": sys.modules[__name__]}
    exec(compile(ast.Module([*imports, *classes], []), str(script), "exec"), names)
    parse(names["Config"], ast.get_docstring(tree))


def _is_fast(node: ast.stmt) -> bool:
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        modules = [node.module or ""]
    else:
        return False
    for name in modules:
        if name not in FAST and name.partition(".")[0] not in sys.stdlib_module_names:
            return False
    return True


started = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
if started.parent.resolve() == Path(__file__).parent.resolve():
    read_early(started)
