"""Reads the options of the console command, and runs one of its commands."""

import importlib
import os
from typing import Annotated

import tyro

from ._options import Doctor, DryRun, Plan
from ._usage import wrapped

EXAMPLES = """Plans, compiles and diagnoses distributed training.

    redcoast plan --model llama-7b --mesh fsdp=8,model=8
    redcoast dry-run --model opt-66b --target v4:4x4x4 --seq 512
    redcoast doctor
"""
COMMANDS = {DryRun: "_dry_run", Plan: "_plan", Doctor: "_doctor"}
named = lambda name, kind: tyro.conf.subcommand(name, description=wrapped(kind.__doc__ or ""))
Command = (
    Annotated[DryRun, named("dry-run", DryRun)]
    | Annotated[Plan, named("plan", Plan)]
    | Annotated[Doctor, named("doctor", Doctor)]
)
STYLE = (tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)


def main(args: list[str] | None = None) -> None:
    """Runs a command; `args` are those of the process by default."""
    command = tyro.cli(Command, prog="redcoast", description=EXAMPLES, args=args, config=STYLE)
    if not isinstance(command, Doctor):
        # Keeps JAX from looking for accelerators. JAX reads this when it is first imported.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Imported here, because they import JAX.
    importlib.import_module(f".{COMMANDS[type(command)]}", __package__).main(command)
