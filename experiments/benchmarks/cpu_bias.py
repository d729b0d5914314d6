"""The error of the CPU compiler when it is used in place of an accelerator's.

The dry runs of `dry_run.py --table1` are repeated with the CPU compiler on the same meshes. Their
peak memory and communication are compared with those of the targets' own compilers.

    python experiments/dry_run.py --table1 && python experiments/benchmarks/cpu_bias.py

Results are added to those in `--out`, so that a part can be measured again.
"""

import os

# Keeps JAX from looking for accelerators. JAX reads this when it is first imported.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import sys
from pathlib import Path
from typing import Any

import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
from _cells import gigabytes, markdown, peak_gib, read_cells, refused, sent_bytes, write_cell
from _pages import number
from _table1 import COLUMNS, choose, choose_rows, in_order, measure

CLOSE = 0.1  # the relative error of the peak that counts as close


def main(
    rows: tuple[str, ...] = (),
    columns: tuple[str, ...] = (),
    out: Path = Path("runs/dry_run"),
) -> None:
    """Prints a table with a line for each dry run, and lists those that are off by more than 10 %.

    Args:
        rows: Models of Table 1, such as opt-66b; all by default.
        columns: Columns of its dry runs: paper, bfloat16, twice, half; all by default.
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
    """Hides the accelerators' compilers, as if they were not installed."""
    os.environ.pop("TPU_LIBRARY_PATH", None)
    # A module that is None in `sys.modules` cannot be imported or found.
    for name in ("libtpu", "jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"):
        sys.modules[name] = None  # pyright: ignore[reportArgumentType]


def report(targets: list[dict[str, Any]], cpus: list[dict[str, Any]]) -> str:
    known = {name(cell): cell for cell in targets}
    pairs = [(known[name(cell)], cell) for cell in cpus if name(cell) in known]
    heads = ["", "on", "peak, GiB", "by the CPU's", "off by"]
    heads += ["GB communicated", "by the CPU's", "times"]
    table = markdown(heads, [line(target, cpu) for target, cpu in pairs])
    far = [name(cpu) for target, cpu in pairs if abs(off(target, cpu) or 0) > CLOSE]
    words = [f"Peak memory is off by more than {CLOSE:.0%} for: {', '.join(far) or 'none'}."]
    # A peak without a figure to compare with may still be below its lower bound.
    if low := [name(cpu) for target, cpu in pairs if below(target, cpu)]:
        words.append(f"Below the lower bound of a rejected program: {', '.join(low)}.")
    return "\n\n".join([table, *words, summary(pairs)])


def summary(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    """The range of the CPU compiler's errors, for each kind of program."""
    groups: dict[str, list[list[float | None]]] = {}
    for target, cpu in pairs:
        word = "with" if cpu["mesh"]["fsdp"] > 1 else "without"
        kind = "bfloat16" if cpu["column"] == "bfloat16" else f"float32, {word} `fsdp`"
        groups.setdefault(kind, []).append([off(target, cpu), times(target, cpu)])
    body = []
    for kind, rows in groups.items():
        offs, sent = ([x for x in column if x is not None] for column in zip(*rows, strict=True))
        body.append([kind, str(len(offs)), span(offs, "+.1%"), span(sent, ".2f")])
    return markdown(["", "programs", "peak off by", "times as much communication"], body)


def span(values: list[float], form: str) -> str:
    if not values:
        return "-"
    return f"{min(values):{form}} to {max(values):{form}}"


def line(target: dict[str, Any], cpu: dict[str, Any]) -> list[str]:
    share, more = off(target, cpu), times(target, cpu)
    return [
        name(target),
        target["target"],
        peak_gib(target),
        peak_gib(cpu),
        number(share, "+.1%"),
        *(gigabytes(sent_bytes(cell)) for cell in (target, cpu)),
        number(more, ".2f"),
    ]


def off(target: dict[str, Any], cpu: dict[str, Any]) -> float | None:
    """The relative error of the peak; `None` if a compiler rejected the program."""
    if refused(target) or refused(cpu):
        return None
    return cpu["memory"]["peak"] / target["memory"]["peak"] - 1


def below(target: dict[str, Any], cpu: dict[str, Any]) -> bool:
    """Whether the CPU compiler's peak is below the lower bound of a rejected program."""
    return refused(target) and cpu["memory"]["peak"] < target["memory"]["peak"]


def times(target: dict[str, Any], cpu: dict[str, Any]) -> float | None:
    """The ratio of the bytes communicated."""
    sent, by_cpu = sent_bytes(target), sent_bytes(cpu)
    if not sent or by_cpu is None:
        return None
    return by_cpu / sent


def name(cell: dict[str, Any]) -> str:
    text = f"{cell['model']} ({cell['seq']})"
    if cell["column"] == "paper":
        return text
    return f"{text}, {cell['column']}"


if __name__ == "__main__":
    tyro.cli(main)
