"""`redcoast dry-run`: a training step, compiled for accelerators that you do not have."""

import contextlib
import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp

import redcoast as rc
from redcoast.dryrun._chips import CHIPS, Chip
from redcoast.dryrun._compare_targets import price_of
from redcoast.dryrun._devices import missing_compiler
from redcoast.dryrun._step_time import TrainingCost
from redcoast.dryrun._target_name import TargetDevices, parse_target
from redcoast.sharding.report._text import paragraph

from ._options import DryRunCommand
from ._phase_display import show_phases
from ._reach import dry_run_to_fit, longest_sequence, sizes_of
from ._usage import mesh_sizes, refuse, refuse_impossible_size
from ._workload import Workload, make_workload, state_bytes

# The figures of a dry run, or its options, by name: numbers, texts, and dicts of them.
Figures = Mapping[str, Any]


@dataclass(frozen=True)
class Attempt:
    """A dry run, its settings (model, batch and options), and what a training run costs."""

    run: rc.DryRun
    settings: Figures
    cost: TrainingCost | None = None

    @property
    def fits(self) -> bool:
        return self.run.fits

    @property
    def report(self) -> Figures:
        report = {**self.settings, **self.run.report}
        if self.cost is not None:
            report["cost"] = asdict(self.cost)
        return report


def main(c: DryRunCommand) -> None:
    """Prints the requested dry run, and exits with 0 if the step fits, and 1 otherwise."""
    with refusing():
        check_training_run(c)
        if c.targets is not None:
            comparison = print_comparison(c)
            raise SystemExit(not any(run.fits for run in comparison.runs.values()))
        if missing := missing_compiler(chip_of(c)):
            print(*paragraph(missing), sep="\n", file=sys.stderr, flush=True)
        check_page(c)
        if c.compare:
            raise SystemExit(not any(best.fits for best in compare(c)))
        requested = with_cost(c, answer(c))
    if c.json:
        print(json.dumps(requested.report, indent=1))
    else:
        show_attempt(c, requested)
    if c.html is not None:
        Path(c.html).write_text(requested.run.to_html(), "utf-8")
    raise SystemExit(not requested.fits)


def check_training_run(c: DryRunCommand) -> None:
    """Refuses --tokens and --price that make no sense, before anything is compiled."""
    if c.tokens is None:
        if c.price is not None:
            refuse("--price needs --tokens, the length of the training run.")
        return
    if not 0 < c.tokens < math.inf:
        refuse(f"--tokens must be a positive number, but is {c.tokens:g}.")
    if make_workload(c.model, c.seq).seq is None:
        refuse(f"{c.model} reads images: --tokens needs a model that reads text.")
    prices = prices_of(c)
    if c.smallest:
        # Targets of several sizes are tried, so the price must be that of the chip.
        targets = sizes_of(chip_of(c))[:1]
    else:
        targets = [parse_target(name) for name in (c.targets or c.target).split(",")]
    for target in targets:
        price_of(prices, target)


def check_page(c: DryRunCommand) -> None:
    """Refuses a page of --html that cannot be written, before anything is compiled."""
    if c.html is None:
        return
    if c.compare:
        refuse("--html writes a page of one mesh, but --compare compiles several: leave out one.")
    try:
        Path(c.html).open("a").close()
    except OSError as error:
        refuse(f"--html cannot be written: {error}. Name a file in a folder that exists.")


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Ends the process with the message of an error and exit code 2."""
    try:
        yield
    except (ValueError, TypeError, RuntimeError) as error:
        # A RuntimeError means that a compiler failed. Python would exit with 1, as for no fit.
        refuse(str(error))


def answer(c: DryRunCommand) -> Attempt:
    """The requested dry run."""
    if c.smallest and c.longest:
        refuse("Only one of --smallest and --longest can be used.")
    if c.smallest:
        return smallest(c)
    if c.longest:
        return longest(c)
    return attempt(c, parse_target(c.target), c.seq, suggest=True)


def smallest(c: DryRunCommand) -> Attempt:
    """The dry run on the smallest number of chips on which the step fits."""
    if c.mesh != "auto":
        refuse("--smallest chooses the number of devices: leave out --mesh.")
    chip = chip_of(c)
    least = state_bytes(make_workload(c.model, c.seq))
    for target in sizes_of(chip):
        # There is no need to compile if not even the training state fits.
        if least <= target.count * chip.usable and (dry_run := attempt(c, target, c.seq)).fits:
            return dry_run
    words = f"{c.model} does not fit on any number of {chip.name} that was tried."
    print(words, file=sys.stderr, flush=True)
    raise SystemExit(1)


def chip_of(c: DryRunCommand) -> Chip:
    """The chip of the target, which may have no number of chips with --smallest."""
    return CHIPS.get(c.target.strip().lower()) or parse_target(c.target).chip


def longest(c: DryRunCommand) -> Attempt:
    """The dry run with the longest sequence that fits, or with 128 tokens if none does."""
    if make_workload(c.model, c.seq).seq is None:
        refuse(f"{c.model} reads images: --longest needs a model that reads text.")
    target, attempts = parse_target(c.target), {}

    def fits(seq: int) -> bool:
        attempts[seq] = attempt(c, target, seq)
        return attempts[seq].fits

    most = longest_sequence(fits, start=c.seq or 1024)
    print(f"The longest sequence that fits has {most} tokens.", file=sys.stderr, flush=True)
    return attempts[most or min(attempts)]


def compare(c: DryRunCommand) -> list[Attempt]:
    """Prints the estimates of all meshes, and dry runs of the best with and without stages."""
    if c.mesh != "auto" or c.smallest or c.longest:
        refuse("--compare tries all meshes: leave out --mesh, --smallest and --longest.")
    target = parse_target(c.target)
    workload = make_workload(c.model, c.seq, remat=c.remat, chunk=c.chunk)
    arguments = workload.arguments(rows_of(c, target))
    with show_phases():
        suggestion = rc.suggest_mesh(*arguments, target=target.name, **_step_options(c))
    usable = suggestion.usable_memory or math.inf
    best: dict[str, Mapping[str, int]] = {}
    for candidate in suggestion.candidates:  # the best come first
        fits = candidate.fits
        if fits is None:
            fits = (candidate.estimated_memory or math.inf) <= usable
        if fits and candidate.error is None:
            kind = "without"
            if "pipe" in candidate.mesh:
                kind = "with"
            best.setdefault(kind, candidate.mesh)
    runs = {}
    for kind in sorted(best):
        dry_run = attempt(replace(c, mesh=_written(best[kind])), target, c.seq)
        runs[kind] = with_cost(c, dry_run)
    if c.json:
        candidates = list(map(asdict, suggestion.candidates))
        print(json.dumps({"meshes": candidates, "runs": [x.report for x in runs.values()]}))
        return [*runs.values()]
    print(suggestion)
    for kind, dry_run in runs.items():
        print(f"\nThe best mesh {kind} stages:\n")
        show_attempt(c, dry_run)
    return [*runs.values()]


def show_attempt(c: DryRunCommand, shown: Attempt) -> None:
    """Prints a dry run, with what a training run costs and the lines of code if asked for."""
    print(shown.run)
    if shown.cost is not None:
        print(*paragraph(show_cost(shown.cost, shown.settings)), sep="\n")
    if c.by_line:
        print(f"\n{shown.run.by_line()}")


def with_cost(c: DryRunCommand, requested: Attempt) -> Attempt:
    """Adds the hours and the price of a training run, if --tokens says how long it is."""
    run, settings = requested.run, requested.settings
    if c.tokens is None or run.step is None:
        return requested
    steps = c.tokens / (settings["batch"] * settings["seq"])
    price = price_of(prices_of(c), parse_target(run.target))
    return replace(requested, cost=run.cost(steps, price=price))


def prices_of(c: DryRunCommand) -> float | dict[str, float] | None:
    """The number of --price, or its numbers by chip or target."""
    if c.price is None:
        return None
    wrong = f"--price is {c.price!r}. It must be a number, or numbers such as h100=2.5,v5e=1.2."
    prices: dict[str, float] = {}
    try:
        if "=" not in c.price:
            return float(c.price)
        for setting in c.price.split(","):
            name, _, value = setting.rpartition("=")
            name = name.strip().lower()
            if name in prices:
                refuse(f"--price must have one price for each name, but is {c.price}.")
            prices[name] = float(value)
    except ValueError:
        refuse(wrong)
    if "" in prices:
        refuse(wrong)
    return prices


def show_cost(cost: TrainingCost, settings: Figures) -> str:
    """A sentence about a training run."""
    tokens = settings["batch"] * settings["seq"]
    text = (
        f"{cost.steps * tokens:,.0f} tokens are {cost.steps:,.0f} steps of {tokens:,} tokens: "
        f"{cost.hours:,.4g} hours, {cost.device_hours:,.4g} device hours"
    )
    if cost.price is not None:
        text += f", at a price of {cost.price:,.2f}"
    return f"{text}."


def print_comparison(c: DryRunCommand) -> rc.TargetComparison:
    """Prints a table of the targets of --targets."""
    if c.smallest or c.longest or c.compare or c.by_line or c.html is not None:
        refuse("--targets prints a table: leave out --smallest, --longest, --compare, --by-line "
               "and --html.")  # fmt: skip
    assert c.targets is not None
    targets = [parse_target(name) for name in c.targets.split(",")]
    for target in targets:
        if missing := missing_compiler(target.chip):
            print(*paragraph(missing), sep="\n", file=sys.stderr, flush=True)
    rows = max(rows_of(c, target) for target in targets)
    workload = make_workload(c.model, c.seq, remat=c.remat, chunk=c.chunk)
    options = _step_options(c) | {"price": prices_of(c)}
    if c.tokens is not None and workload.seq is not None:
        options["steps"] = c.tokens / (rows * workload.seq)
    if c.mesh != "auto":
        options["mesh"] = mesh_sizes(c.mesh)
    names = [target.name for target in targets]
    with show_phases():
        comparison = rc.compare_targets(*workload.arguments(rows), targets=names, **options)
    print(show_comparison(c, comparison, workload, rows))
    return comparison


def show_comparison(
    c: DryRunCommand, comparison: rc.TargetComparison, workload: Workload, rows: int
) -> str:
    """The table below a line of settings, or both as JSON."""
    settings = {"model": c.model, "seq": workload.seq, "batch": rows, "dtype": c.dtype}
    if c.json:
        runs = {}
        for name, run in comparison.runs.items():
            runs[name] = dict(run.report)
            if name in comparison.costs:
                runs[name]["cost"] = asdict(comparison.costs[name])
        return json.dumps(settings | {"runs": runs, "errors": comparison.errors}, indent=1)
    size = f"{rows} rows"
    if workload.seq is not None:
        size += f" of {workload.seq:,} tokens"
    return f"{c.model}, {size} for each step, {c.dtype}, remat {c.remat}\n\n{comparison}"


def attempt(
    c: DryRunCommand, target: TargetDevices, seq: int | None, *, suggest: bool = False
) -> Attempt:
    """A dry run, which is also reported in a line on stderr.

    If the step does not fit, `suggest` looks for changes that make it fit. Without it, other meshes
    are tried, unless --mesh is given.
    """
    workload = make_workload(c.model, seq, remat=c.remat, chunk=c.chunk)
    rows = rows_of(c, target)
    options = _step_options(c)
    if c.mesh != "auto":
        options["mesh"] = mesh_sizes(c.mesh)
    with show_phases():
        if suggest or c.mesh != "auto":
            arguments = workload.arguments(rows)
            run = rc.dry_run(*arguments, target=target.name, suggest=suggest, **options)
        else:
            run = dry_run_to_fit(workload, rows, target.name, **options)
    run = replace(run, notes=(*workload.notes, *run.notes))
    settings = {"model": c.model, "seq": workload.seq, "batch": rows, "accumulate": c.accumulate}
    settings |= {"dtype": c.dtype, "remat": c.remat, "chunk": c.chunk}
    print(_line(run, settings), *workload.notes, file=sys.stderr, flush=True)
    return Attempt(run, settings)


def _step_options(c: DryRunCommand) -> dict[str, Any]:
    options: dict[str, Any] = {"accumulate": c.accumulate, "compute_dtype": None}
    # The library never suggests lowering a dtype that was given, as "float32" would be.
    if c.dtype != "float32":
        options["compute_dtype"] = jnp.dtype(c.dtype)
    if c.remat == "auto":
        options["memory"] = "auto"
    return options


def rows_of(c: DryRunCommand, target: TargetDevices) -> int:
    """The global batch size; by default one row for each device and microbatch."""
    # So many rows for each device of the largest target are still a number of 32 bits.
    refuse_impossible_size("accumulate", c.accumulate, 2**14)
    refuse_impossible_size("batch", c.batch)
    return c.batch or target.count * c.accumulate


def _line(run: rc.DryRun, settings: Figures) -> str:
    mesh = _written({axis: size for axis, size in run.mesh.items() if size > 1}) or "one device"
    text = f"{settings['model']} on {run.target} ({mesh})"
    if settings["seq"] is not None:
        text += f", {settings['seq']} tokens"
    return f"{text}: {peak_gib(run.report)} of {in_gib(run.memory['usable'])} GiB"


def _written(mesh: Mapping[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in mesh.items())


def in_gib(size: float) -> str:
    return f"{size / 2**30:.2f}"


def refused(report: Figures) -> bool:
    """Whether the compiler rejected the program because it needs too much memory."""
    # In older files without the key, only rejected programs have no temporaries.
    return report.get("refused", "temporaries" not in report["memory"])


def peak_gib(report: Figures) -> str:
    """The peak memory; for a rejected program, the lower bound."""
    peak = in_gib(report["memory"]["peak"])
    if refused(report):
        return f"at least {peak}"
    return peak
