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
from redcoast.dryrun._target_name import TargetDevices, parse_target
from redcoast.dryrun._training_cost import TrainingCost
from redcoast.sharding.report._text import paragraph

from ._options import DryRunCommand
from ._phase_display import show_phases
from ._reach import dry_run_to_fit, longest_sequence, sizes_of
from ._usage import mesh_sizes, refuse
from ._workload import Workload, make_workload, state_bytes


@dataclass(frozen=True)
class Attempt:
    """A dry run, and its settings: model, batch and options."""

    run: rc.DryRun
    settings: dict[str, Any]

    @property
    def fits(self) -> bool:
        return self.run.fits

    cost: TrainingCost | None = None

    @property
    def report(self) -> dict[str, Any]:
        cost = {} if self.cost is None else {"cost": asdict(self.cost)}
        return self.settings | self.run.report | cost


def main(c: DryRunCommand) -> None:
    """Prints the requested dry run, and exits with 0 if the step fits, and 1 otherwise."""
    with refusing():
        if c.targets is not None:
            found = print_comparison(c)
            raise SystemExit(0 if any(run.fits for run in found.runs.values()) else 1)
        if missing := missing_compiler(chip_of(c)):
            print(*paragraph(missing), sep="\n", file=sys.stderr, flush=True)
        if c.compare:
            found = compare(c)
            raise SystemExit(0 if any(one.fits for one in found) else 1)
        found = with_cost(c, answer(c))
    if c.json:
        print(json.dumps(found.report, indent=1))
    else:
        print(found.run)
    if found.cost is not None and not c.json:
        print(*paragraph(show_cost(found.cost, found.settings)), sep="\n")
    if c.by_line and not c.json:
        print(f"\n{found.run.by_line()}")
    if c.html is not None:
        Path(c.html).write_text(found.run.to_html(), "utf-8")
    raise SystemExit(0 if found.fits else 1)


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
    return longest(c) if c.longest else attempt(c, parse_target(c.target), c.seq, suggest=True)


def smallest(c: DryRunCommand) -> Attempt:
    """The dry run on the smallest number of chips on which the step fits."""
    if c.mesh != "auto":
        refuse("--smallest chooses the number of devices: leave out --mesh.")
    chip = chip_of(c)
    least = state_bytes(make_workload(c.model, c.seq))
    for target in sizes_of(chip):
        # There is no need to compile if not even the training state fits.
        if least <= target.count * chip.usable and (found := attempt(c, target, c.seq)).fits:
            return found
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
    target, found = parse_target(c.target), {}

    def fits(seq: int) -> bool:
        found[seq] = attempt(c, target, seq)
        return found[seq].fits

    most = longest_sequence(fits, start=c.seq or 1024)
    print(f"The longest sequence that fits has {most} tokens.", file=sys.stderr, flush=True)
    return found[most or min(found)]


def compare(c: DryRunCommand) -> list[Attempt]:
    """Prints the estimates of all meshes, and dry runs of the best with and without stages."""
    if c.mesh != "auto" or c.smallest or c.longest:
        refuse("--compare tries all meshes: leave out --mesh, --smallest and --longest.")
    target = parse_target(c.target)
    workload = make_workload(c.model, c.seq, remat=c.remat, chunk=c.chunk)
    arguments = workload.arguments(rows_of(c, target))
    with show_phases():
        found = rc.suggest_mesh(*arguments, target=target.name, **_step_options(c))
    usable = found.usable_memory or math.inf
    foretold = lambda one: (one.estimated_memory or math.inf) <= usable
    fits = lambda one: foretold(one) if one.fits is None else one.fits
    meshes = [one.mesh for one in found.candidates if one.error is None and fits(one)]
    best = {  # the candidates are sorted
        kind: next((mesh for mesh in meshes if ("pipe" in mesh) == (kind == "with")), None)
        for kind in ("with", "without")
    }
    runs = {
        kind: attempt(replace(c, mesh=_written(mesh)), target, c.seq)
        for kind, mesh in best.items()
        if mesh
    }
    if c.json:
        candidates = [asdict(one) for one in found.candidates]
        print(json.dumps({"meshes": candidates, "runs": [x.report for x in runs.values()]}))
        return [*runs.values()]
    print(found)
    for kind, one in runs.items():
        print(f"\nThe best mesh {kind} stages:\n\n{one.run}")
    return [*runs.values()]


def with_cost(c: DryRunCommand, found: Attempt) -> Attempt:
    """Adds the hours and the price of a training run, if --tokens says how long it is."""
    if c.tokens is None:
        if c.price is not None:
            refuse("--price needs --tokens, the length of the training run.")
        return found
    target = parse_target(found.run.target)
    if found.run.step is None:
        return found
    steps = steps_of_tokens(c, found.settings["batch"], found.settings["seq"])
    return replace(found, cost=found.run.cost(steps, price=price_of(prices_of(c), target)))


def steps_of_tokens(c: DryRunCommand, rows: int, seq: int | None) -> float:
    """The number of steps that --tokens takes."""
    assert c.tokens is not None
    if seq is None:
        refuse(f"{c.model} reads images: --tokens needs a model that reads text.")
    if not 0 < c.tokens < math.inf:
        refuse(f"--tokens must be a positive number, but is {c.tokens:g}.")
    return c.tokens / (rows * seq)


def prices_of(c: DryRunCommand) -> float | dict[str, float] | None:
    """The number of --price, or its numbers by chip or target."""
    if c.price is None:
        return None
    try:
        if "=" not in c.price:
            return float(c.price)
        pairs = [one.rpartition("=") for one in c.price.split(",")]
        return {name.strip().lower(): float(value) for name, _, value in pairs}
    except ValueError:
        refuse(f"--price is {c.price!r}. It must be a number, or numbers such as h100=2.5,v5e=1.2.")


def show_cost(cost: TrainingCost, settings: Mapping[str, Any]) -> str:
    """A sentence about a training run."""
    tokens = settings["batch"] * settings["seq"]
    text = (
        f"{cost.steps * tokens:,.0f} tokens are {cost.steps:,.0f} steps of {tokens:,} tokens: "
        f"{cost.hours:,.4g} hours, {cost.device_hours:,.4g} device hours"
    )
    return f"{text}." if cost.price is None else f"{text}, at a price of {cost.price:,.2f}."


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
    if c.price is not None and c.tokens is None:
        refuse("--price needs --tokens, the length of the training run.")
    options = _step_options(c) | {"price": prices_of(c)}
    if c.tokens is not None:
        options["steps"] = steps_of_tokens(c, rows, workload.seq)
    if c.mesh != "auto":
        options["mesh"] = mesh_sizes(c.mesh)
    names = [target.name for target in targets]
    with show_phases():
        found = rc.compare_targets(*workload.arguments(rows), targets=names, **options)
    print(show_comparison(c, found, workload, rows))
    return found


def show_comparison(
    c: DryRunCommand, found: rc.TargetComparison, workload: Workload, rows: int
) -> str:
    settings = {"model": c.model, "seq": workload.seq, "batch": rows, "dtype": c.dtype}
    if not c.json:
        length = "" if workload.seq is None else f" of {workload.seq:,} tokens"
        return (
            f"{c.model}, {rows} rows{length} for each step, {c.dtype}, remat {c.remat}\n\n{found}"
        )
    runs = {}
    for name, run in found.runs.items():
        cost = found.costs.get(name)
        runs[name] = run.report | ({} if cost is None else {"cost": asdict(cost)})
    return json.dumps(settings | {"runs": runs, "errors": found.errors}, indent=1)


def attempt(
    c: DryRunCommand, target: TargetDevices, seq: int | None, *, suggest: bool = False
) -> Attempt:
    """A dry run, which is also reported in a line on stderr.

    If the step does not fit, `suggest` looks for changes that make it fit. Without it, other meshes
    are tried, unless --mesh is given.
    """
    workload = make_workload(c.model, seq, remat=c.remat, chunk=c.chunk)
    rows = rows_of(c, target)
    mesh = None if c.mesh == "auto" else mesh_sizes(c.mesh)
    options = _step_options(c)
    with show_phases():
        if suggest or mesh is not None:
            options |= {"target": target.name, "mesh": mesh, "suggest": suggest}
            run = rc.dry_run(*workload.arguments(rows), **options)
        else:
            run = dry_run_to_fit(workload, rows, target.name, **options)
    run = replace(run, notes=(*workload.notes, *run.notes))
    settings = {"model": c.model, "seq": workload.seq, "batch": rows, "accumulate": c.accumulate}
    settings |= {"dtype": c.dtype, "remat": c.remat, "chunk": c.chunk}
    print(_line(run, settings), *workload.notes, file=sys.stderr, flush=True)
    return Attempt(run, settings)


def _step_options(c: DryRunCommand) -> dict[str, Any]:
    # None and not "float32": the library never suggests lowering a dtype that was given.
    dtype = None if c.dtype == "float32" else jnp.dtype(c.dtype)
    return {"accumulate": c.accumulate, "compute_dtype": dtype}


def rows_of(c: DryRunCommand, target: TargetDevices) -> int:
    """The global batch size; by default one row for each device and microbatch."""
    if c.accumulate < 1:
        refuse(f"--accumulate must be at least 1, but is {c.accumulate}.")
    rows = target.count * c.accumulate if c.batch is None else c.batch
    if rows < 1:
        refuse(f"--batch must be at least 1, but is {rows}.")
    return rows


def _line(run: rc.DryRun, settings: dict[str, Any]) -> str:
    mesh = _written({axis: size for axis, size in run.mesh.items() if size > 1}) or "one device"
    length = "" if settings["seq"] is None else f", {settings['seq']} tokens"
    sizes = f"{peak_gib(run.report)} of {in_gib(run.memory['usable'])} GiB"
    return f"{settings['model']} on {run.target} ({mesh}){length}: {sizes}"


def _written(mesh: Mapping[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in mesh.items())


def in_gib(size: float) -> str:
    return f"{size / 2**30:.2f}"


def refused(report: Any) -> bool:
    """Whether the compiler rejected the program because it needs too much memory."""
    # In older files without the key, only rejected programs have no temporaries.
    return report.get("refused", "temporaries" not in report["memory"])


def peak_gib(report: Any) -> str:
    """The peak memory; for a rejected program, the lower bound."""
    return f"{'at least ' if refused(report) else ''}{in_gib(report['memory']['peak'])}"
