"""How far the CPU's compiler is off where it stands in for an accelerator's.

The dry runs of the paper's Table 1 that `dry_run.py --table1` kept, done again with nothing but the
CPU's compiler, on the same meshes: peak memory and bytes sent, against those of the targets' own.

    python experiments/dry_run.py --table1 && python experiments/benchmarks/cpu_bias.py

Results are added to those in `--out`, so that a part can be measured again.
"""

import os

# No accelerator is looked for. JAX reads this when it is first imported.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import sys
from pathlib import Path
from typing import Any

import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
from _cells import gigabytes, markdown, peak_gib, read_cells, refused, sent_bytes, write_cell
from _table1 import COLUMNS, choose, choose_rows, in_order, measure

CLOSE = 0.1  # of the peak


def main(
    rows: tuple[str, ...] = (),
    columns: tuple[str, ...] = (),
    out: Path = Path("runs/dry_run"),
) -> None:
    """Prints a table with a line for each dry run, and those that are off by more than 10 %.

    Args:
        rows: Models of the table, such as opt-66b; all by default.
        columns: Which of its dry runs: paper, bfloat16, twice, half; all by default.
        out: Directory with the results as JSON.
    """
    known = {(cell["model"], cell["column"]): cell for cell in read_cells(out / "table1.json")}
    forget_accelerators()
    for row in choose_rows(rows):
        for column in choose(columns, COLUMNS):
            cell = known.get((row.model, column))
            if cell is None or cell["compiler"] == "cpu":
                print(f"{row.model}, {column}: not measured with its own compiler", file=sys.stderr)
                continue
            write_cell(out / "cpu_bias.json", measure(row, column, mesh=cell["mesh"]))
            print(f"{row.model}, {column}: done", file=sys.stderr, flush=True)
    print(report(*(in_order(read_cells(out / f"{n}.json")) for n in ("table1", "cpu_bias"))))


def forget_accelerators() -> None:
    """From here on as on a machine where their compilers are not installed."""
    os.environ.pop("TPU_LIBRARY_PATH", None)
    # What is None in `sys.modules` cannot be imported, nor be found.
    for name in ("libtpu", "jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"):
        sys.modules[name] = None  # pyright: ignore[reportArgumentType]


def report(targets: list[dict[str, Any]], cpus: list[dict[str, Any]]) -> str:
    known = {name(cell): cell for cell in targets}
    pairs = [(known[name(cell)], cell) for cell in cpus if name(cell) in known]
    heads = ["", "on", "peak, GiB", "by the CPU's", "off by", "GB sent", "by the CPU's", "times"]
    table = markdown(heads, [line(target, cpu) for target, cpu in pairs])
    far = [name(cpu) for target, cpu in pairs if abs(off(target, cpu) or 0) > CLOSE]
    words = [f"Peak memory is off by more than {CLOSE:.0%} for: {', '.join(far) or 'none'}."]
    # What is compared with nothing may still be known to be too low.
    if low := [name(cpu) for target, cpu in pairs if below(target, cpu)]:
        words.append(f"Below the least of a program that was refused: {', '.join(low)}.")
    return "\n\n".join([table, *words, summary(pairs)])


def summary(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    """The least and the most that the CPU's compiler was off by, of each kind of programs."""
    groups: dict[str, list[list[float | None]]] = {}
    for target, cpu in pairs:
        split = "with" if cpu["mesh"]["fsdp"] > 1 else "without"
        kind = "bfloat16" if cpu["column"] == "bfloat16" else f"float32, {split} `fsdp`"
        groups.setdefault(kind, []).append([off(target, cpu), times(target, cpu)])
    body = []
    for kind, rows in groups.items():
        offs, sent = ([x for x in column if x is not None] for column in zip(*rows, strict=True))
        body.append([kind, str(len(offs)), span(offs, "+.1%"), span(sent, ".2f")])
    return markdown(["", "programs", "peak off by", "times as much sent"], body)


def span(values: list[float], form: str) -> str:
    return f"{min(values):{form}} to {max(values):{form}}" if values else "-"


def line(target: dict[str, Any], cpu: dict[str, Any]) -> list[str]:
    share, more = off(target, cpu), times(target, cpu)
    return [
        name(target),
        target["target"],
        peak_gib(target),
        peak_gib(cpu),
        "-" if share is None else f"{share:+.1%}",
        *(gigabytes(sent_bytes(cell)) for cell in (target, cpu)),
        "-" if more is None else f"{more:.2f}",
    ]


def off(target: dict[str, Any], cpu: dict[str, Any]) -> float | None:
    """By which share of the peak; of a program that was refused nobody knows it."""
    if refused(target) or refused(cpu):
        return None
    return cpu["memory"]["peak"] / target["memory"]["peak"] - 1


def below(target: dict[str, Any], cpu: dict[str, Any]) -> bool:
    """Whether the CPU's figure is less than what a program that was refused takes at least."""
    return refused(target) and cpu["memory"]["peak"] < target["memory"]["peak"]


def times(target: dict[str, Any], cpu: dict[str, Any]) -> float | None:
    """How many times as much is sent."""
    sent, by_cpu = sent_bytes(target), sent_bytes(cpu)
    return by_cpu / sent if sent and by_cpu is not None else None


def name(cell: dict[str, Any]) -> str:
    column = "" if cell["column"] == "paper" else f", {cell['column']}"
    return f"{cell['model']} ({cell['seq']}){column}"


if __name__ == "__main__":
    tyro.cli(main)
