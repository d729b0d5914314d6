"""Reads the options of the console command, and runs one of its commands."""

import importlib
import os
import sys
from importlib import metadata
from typing import Annotated, Any, Union

import tyro

from ._options import DoctorCommand, DryRunCommand, PlanCommand, ServeCommand
from ._usage import quiet_pipe, refuse, wrap_help

EXAMPLES = """Plans, compiles and diagnoses distributed training, and serves language models.

Examples:
    redcoast plan --model llama-7b --mesh fsdp=8,model=8
    redcoast dry-run --model opt-66b --target v4:4x4x4 --seq 512
    redcoast serve --weights path/to/model
    redcoast doctor
    redcoast --version
"""
COMMANDS = {
    DryRunCommand: "dry-run",
    PlanCommand: "plan",
    ServeCommand: "serve",
    DoctorCommand: "doctor",
}
# The option that a user may mean by a value without one.
FIRST_OPTION = {"dry-run": "--model", "plan": "--model", "serve": "--weights"}
STYLE = (tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)


def main(args: list[str] | None = None) -> None:
    """Runs a command; by default, `args` are the arguments of the process."""
    if args is None:
        args = sys.argv[1:]
    if args == ["--version"]:
        with quiet_pipe():
            print(f"redcoast {installed_version()}")
        return
    if len(args) > 1 and args[0] in FIRST_OPTION and not args[1].startswith("-"):
        name, value, *_ = args
        option = FIRST_OPTION[name]
        refuse(f"`{value}` follows no option. Write `redcoast {name} {option} {value}`.")
    kind = commands(complete=bool(args) and args[0] in COMMANDS.values())
    with quiet_pipe():
        command = tyro.cli(kind, prog="redcoast", description=EXAMPLES, args=args, config=STYLE)
    if isinstance(command, DryRunCommand | PlanCommand):
        # Keeps JAX from looking for accelerators. JAX reads this when it is first imported.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Imported here, because they import JAX.
    name = COMMANDS[type(command)].replace("-", "_")
    importlib.import_module(f"._{name}_command", __package__).main(command)


def installed_version() -> str:
    # `redcoast.core` has this too, but its import takes seconds.
    try:
        return metadata.version("redcoast")
    except metadata.PackageNotFoundError:  # run from its source, without an installation
        return "(not installed)"


def commands(*, complete: bool) -> Any:
    """The commands, described by their whole docstrings, or by the first sentence of each."""

    def named(name: str, kind: type) -> object:
        first, _, rest = (kind.__doc__ or "").partition("\n\n")
        # tyro wraps the texts in the list of commands, but not in a command's own help.
        text = " ".join(first.split())
        if complete:
            text = wrap_help(" ".join(f"{first} {rest}".split()))
        return Annotated[kind, tyro.conf.subcommand(name, description=text)]

    return Union[*(named(name, kind) for kind, name in COMMANDS.items())]
