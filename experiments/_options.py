"""The options of experiments, read before anything that takes seconds is imported.

A script imports this module first. Then `--help` and messages about options need only the standard
library and tyro: JAX, redcoast and others are imported afterwards.
"""

import ast
import dataclasses
import json
import math
import re
import sys
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from redcoast_cli._usage import mesh_sizes as mesh_sizes
from redcoast_cli._usage import quiet_pipe, wrap_help
from redcoast_cli._usage import refuse as refuse

T = TypeVar("T")
# An optional value; the text of the option says what is used by default.
Maybe = Annotated[T | None, tyro.conf.arg(help_behavior_hint="")]
Mesh = Annotated[str, tyro.conf.arg(metavar="MESH")]


LARGEST = 2**31 - 1  # of 32 bits


@dataclass(frozen=True)
class Range:
    """The smallest and the largest number that an option may be."""

    least: float
    most: float


# Of options without another range.
USUAL = {int: Range(1, LARGEST), float: Range(0, 1e30)}


@dataclass(frozen=True)
class Multiple:
    """The number that an option must be a multiple of."""

    of: int


@dataclass(frozen=True)
class Exists:
    """Says of a path that it must exist, unless it is one of these names."""

    names: tuple[str, ...] = ()

    def is_met(self, value: str) -> bool:
        return value in self.names or Path(value).exists()


@dataclass(frozen=True)
class Pattern:
    """Says of a text that it is a regular expression."""


FromZero = Annotated[int, Range(0, LARGEST)]
Seed = Annotated[int, Range(0, 2**32 - 1)]  # what JAX, NumPy and scikit-learn all take
Regex = Annotated[str, Pattern()]
Positive = Annotated[float, Range(1e-30, 1e30)]
MaybeInfinite = Annotated[float, Range(0, math.inf)]
Share = Annotated[float, Range(0, 1)]
Even = Annotated[int, Multiple(2)]
MultipleOf32 = Annotated[int, Multiple(32)]
Existing = Annotated[Path, Exists()]
Weights = Annotated[str, Exists(("smollm2",))]
Images = Annotated[str, Exists(("digits", "mnist"))]
Pictures = Annotated[str, Exists(("glyphs", "digits", "mnist"))]
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


def run(main: Callable[[Any], None], config: Any, doc: str | None) -> None:
    """Calls a script's `main` with its options. Options that do not fit the checkpoint of a resumed
    run end the program."""
    c = parse(config, doc)
    from redcoast import CheckpointMismatch  # the script has imported it

    try:
        main(c)
    except CheckpointMismatch as error:
        refuse(f"The run cannot be resumed with these options. {error}")


def script_of(config: Any) -> Path:
    """The file of the script that has a class of options."""
    return Path(sys.modules[config.__module__].__file__ or "")


def parse(config: Any, doc: str | None, args: list[str] | None = None) -> Any:
    """Reads the options of a script; to resume, those of the run are the defaults."""
    script = script_of(config)
    usage = {"prog": f"python {sys.argv[0]}", "description": description(doc, script)}

    def read_options(**default: Any) -> Any:
        with quiet_pipe():
            return tyro.cli(config, config=STYLE, args=args, **usage, **default)

    c = read_options()
    refuse_impossible(c)
    if not (hasattr(c, "run") and c.run.resume):
        return c
    root = c.run.directory or Path("runs") / script.stem
    stored = stored_options(config, newest_run(root) / "config.json")
    # Another process, or another launcher, has another address and index.
    hosts = Hosts(local_devices=stored.run.hosts.local_devices)
    run = dataclasses.replace(stored.run, resume=True, directory=c.run.directory, hosts=hosts)
    c = read_options(default=dataclasses.replace(stored, run=run))
    refuse_impossible(c)
    return c


def refuse_impossible(options: Any) -> None:
    """Ends the program if a number is out of range, or a file is missing that must exist."""
    hints = typing.get_type_hints(type(options), include_extras=True)
    for option in dataclasses.fields(options):
        value = getattr(options, option.name)
        name = f"--{option.name.replace('_', '-')}"
        if dataclasses.is_dataclass(value):
            refuse_impossible(value)
        elif value is not None:
            refuse_value(name, value, marks(hints[option.name]))


def refuse_value(name: str, value: Any, limits: list[Any]) -> None:
    """Ends the program if the value of an option is not within the limits of its type."""
    allowed = USUAL.get(type(value))
    for limit in limits:
        if isinstance(limit, Range):
            allowed = limit
        elif isinstance(limit, Multiple) and value % limit.of:
            refuse(f"{name} must be a multiple of {limit.of}, but is {value}.")
        elif isinstance(limit, Pattern):
            refuse_no_pattern(name, value)
        elif isinstance(limit, Exists) and not limit.is_met(str(value)):
            refuse(f"{name} is {value}, which does not exist.")
    if allowed is None:
        return
    if not value >= allowed.least:  # NaN is not either
        words = f"at least {allowed.least}"
        if 0 < allowed.least < 1:
            words = "more than 0"
        refuse(f"{name} must be {words}, but is {value}.")
    if value > allowed.most:
        refuse(f"{name} must be at most {allowed.most:,}, but is {value:,}.")


def refuse_no_pattern(name: str, value: str) -> None:
    """Ends the program if the value of an option is no regular expression."""
    try:
        re.compile(value)
    except re.error as error:
        refuse(f"{name} must be a regular expression, but is {value!r}: {error}.")


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
        refuse(f"There is no run to resume in {root}. Leave out --resume to start one.")
    return root / name


def stored_options(config: Any, file: Path) -> Any:
    """The options in the `config.json` of a run. Ends the program if they are not of this
    script."""
    advice = "Restore the file, or leave out --resume to start a new run."
    try:
        stored = json.loads(file.read_text("utf-8"))
        if isinstance(stored, dict):
            own = script_of(config).stem
            if stored.get("script", own) != own:
                raise TypeError(f"it is a run of {stored['script']}.py")
            if "run" not in stored:
                raise TypeError("it has none that all scripts have")
        return from_json(config, stored)
    except (OSError, ValueError, RecursionError) as error:
        refuse(f"The options of the run to resume, {file}, cannot be read: {error}. {advice}")
    except TypeError as error:
        refuse(f"{file} does not have the options of a run of this script: {error}. {advice}")


def from_json(kind: Any, values: Any) -> Any:
    """A dataclass of options from a `config.json`; what it lacks has its default.

    Raises `TypeError` for a value of another type.
    """
    if not isinstance(values, dict):
        raise TypeError(f"it has {values!r} in place of options")
    hints = typing.get_type_hints(kind)
    options = {}
    for option in dataclasses.fields(kind):
        if option.name in values:
            hint, value = hints[option.name], values[option.name]
            if dataclasses.is_dataclass(hint):
                options[option.name] = from_json(hint, value)
            elif not has_type(hint, value):
                raise TypeError(f"its {option.name} is {value!r}")
            elif isinstance(value, str) and Path in (hint, *typing.get_args(hint)):
                options[option.name] = Path(value)
            elif isinstance(value, list):
                options[option.name] = tuple(value)
            else:
                options[option.name] = value
    return kind(**options)


def has_type(hint: Any, value: Any) -> bool:
    """Whether a value from JSON is one of an option's type."""
    kind, arguments = typing.get_origin(hint), typing.get_args(hint)
    if kind is Literal:
        return value in arguments
    if kind in (typing.Union, types.UnionType):
        return any(has_type(one_of, value) for one_of in arguments)
    if kind is tuple:
        return isinstance(value, list) and all(has_type(arguments[0], item) for item in value)
    if hint is Path:
        return isinstance(value, str)
    if hint is float:
        return type(value) in (int, float)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))


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


started = getattr(sys.modules["__main__"], "__file__", None)  # a notebook has none
if started and Path(started).parent.resolve() == Path(__file__).parent.resolve():
    read_early(Path(started))
