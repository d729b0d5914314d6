"""Compiles a training step for accelerators that you do not have, and prints what it needs.

This is the command `redcoast dry-run`, and the dry runs of the paper's Table 1.

Examples:
    python experiments/dry_run.py --model opt-66b --target v4:4x4x4 --seq 512
    python experiments/dry_run.py --model config.json --target l4 --smallest
    python experiments/dry_run.py --model opt-66b --target h100:8x8 --compare
    python experiments/dry_run.py --table1
"""

import os

# Keeps JAX from looking for accelerators. JAX reads this when it is first imported.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from dataclasses import dataclass, fields
from pathlib import Path

import _options
from _options import refuse
from _table1 import print_table1

from redcoast_cli import _dry_run_command
from redcoast_cli._options import DryRunCommand


@dataclass(frozen=True)
class Config(DryRunCommand):
    table1: bool = False  # run all models and machines of the paper's Table 1
    rows: tuple[str, ...] = ()  # models of Table 1 to run, such as opt-66b; by default all
    columns: tuple[str, ...] = ()  # columns to run: paper, bfloat16, twice, half; by default all
    out: Path = Path("runs/dry_run")  # directory of the results of --table1, which are added to


def main(c: Config) -> None:
    if not c.table1:
        if parts := chosen(c) & {"rows", "columns"}:
            refuse(f"--rows and --columns need --table1: leave out {written(parts)}.")
        return _dry_run_command.main(c)
    if c.smallest or c.longest or c.compare:
        refuse("Only one of --smallest, --longest, --compare and --table1 can be used.")
    if ignored := chosen(c) - {"table1", "rows", "columns", "out", "json"}:
        refuse(f"--table1 has its own models and settings: leave out {written(ignored)}.")
    with _dry_run_command.refusing():
        print_table1(c.out, rows=c.rows, columns=c.columns, as_json=c.json)


def chosen(c: Config) -> set[str]:
    """The names of the options that differ from their defaults."""
    return {field.name for field in fields(c) if getattr(c, field.name) != field.default}


def written(options: set[str]) -> str:
    return ", ".join(f"--{name}" for name in sorted(options))


if __name__ == "__main__":
    _options.run(main, Config, __doc__)
