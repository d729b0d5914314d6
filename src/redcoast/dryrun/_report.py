"""The result of a dry run, as data and as a table."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from linecache import getline
from typing import Any

from ..core._errors import in_units
from ..sharding import Plan
from ..sharding.report._data import LineCost
from ..sharding.report._source_page import draw_source_page
from ..sharding.report._text import hanging, megabytes, paragraph
from ._compile_job import CompiledLine, TrafficRow, show_sizes
from ._roofline import Bounds
from ._step_time import StepTime, TrainingCost, check_positive, show_step_time
from ._target_name import parse_target


@dataclass(frozen=True)
class Change:
    """A change that makes a step fit, confirmed by compiling it.

    - `mesh`, `remat`, `accumulate`, `compute_dtype`: The step's settings with the change.
    """

    what: str  # such as `"accumulate=4"`
    peak: int  # bytes of memory that a device needs with the change
    mesh: dict[str, int]
    remat: bool
    accumulate: int
    compute_dtype: str | None


@dataclass(frozen=True)
class DryRun:
    """The figures of a training step that was compiled for devices that need not be present.

    `str(run)` is a table. All figures are for one device and one step.

    **Attributes:**

    - `target`, `devices`: The name of the devices, and their number.
    - `compiler`: The compiler that the figures are from: `"tpu"`, `"cuda"` or `"cpu"`.
    - `own_compiler`: Whether this is the target's own compiler. If not, the figures are estimates.
    - `notes`: Caveats about the figures, as sentences.
    - `mesh`: The sizes of `data`, `fsdp` and `model`, and of `pipe` if there are stages.
    - `fits`: Whether the peak is within the usable memory.
    - `refused`: Whether the compiler rejected the program because it needs too much memory, as TPU
        compilers do. The communication is then unknown, and the peak is a lower bound.
    - `memory`: Bytes of `"parameters"` (and other floating-point arrays of the model),
        `"optimizer_state"`, `"other"` arrays, `"batch"`, `"gradients"` (as planned; included in the
        temporaries), `"temporaries"` (everything else at the peak; missing if refused), the
        `"peak"`, and the `"usable"` memory.
    - `traffic`: The communication, by mesh `axis`, `kind` of collective and `cause`: the number of
        `times`, and the `bytes` communicated; the largest first. Empty if refused.
    - `lines`: For each line of code, the `bytes` that it communicates, with their `causes`, and the
        `memory_bytes` of its temporaries at the peak; the most bytes first. The `file` is `""` for
        operations that come from no line. `planned_bytes` is the plan's estimate of `bytes`; it is
        0 for communication that the compiler added. `by_line()` is a table of them.
    - `sent_bytes`: The total number of bytes communicated; `None` if refused.
    - `arithmetic`: Floating point operations of contractions, by dtype.
    - `bounds`: Lower bounds on the seconds for arithmetic, memory and each network, which of them
        is the largest, and the utilisation of the peak rate that it allows; `None` if refused.
    - `step`: The estimated time of a step in `seconds`, read from the schedule of the compiled
        program: of matrix `products`, `attention` and `other` kernels, of communication that is
        `exposed` or `hidden` behind them by mesh axes, of `waiting` for the slowest host; `None`
        if refused. `cost()` multiplies it.
    - `rows`: The number of examples in the global batch.
    - `compile_seconds`: The compilation time.
    - `plan`: The [`redcoast.Plan`][].
    - `changes`: If the step does not fit, the smallest changes found that make it fit.

    !!! Example

        ```python
        import json
        import jax
        import jax.numpy as jnp
        import optax
        import redcoast as rc

        init_fn = lambda key: {"w": jnp.zeros((64, 64))}
        loss_fn = lambda model, x, key: jnp.mean((x @ model["w"]) ** 2)
        batch = jax.ShapeDtypeStruct((32, 64), jnp.float32)
        run = rc.dry_run(init_fn, loss_fn, batch, optax.adamw(1e-3), target="cpu:2")
        print(run.fits, run.memory["peak"], run.bounds.binding)
        print(json.dumps(run.report["traffic"]))
        ```
    """

    target: str
    devices: int
    compiler: str
    notes: tuple[str, ...]
    mesh: dict[str, int]
    fits: bool
    refused: bool
    memory: dict[str, int]
    traffic: tuple[TrafficRow, ...]
    sent_bytes: int | None
    arithmetic: dict[str, float]
    bounds: Bounds | None
    compile_seconds: float
    plan: Plan = field(repr=False)
    changes: tuple[Change, ...] = ()
    lines: tuple[CompiledLine, ...] = ()
    step: StepTime | None = None
    rows: int = 0

    def cost(self, steps: int | float, *, price: int | float | None = None) -> TrainingCost:
        """The time and the price of a training run, at the estimated time of a step.

        **Arguments:**

        - `steps`: The number of steps: for `n` tokens, `n` divided by the tokens of a batch.
        - `price`: The price of a device for an hour, in any currency.

        **Returns:**

        `hours`, `device_hours`, and the `price` of all of them, or `None` without a price.

        **Raises:**

        `ValueError` if an argument is not positive, or if the compiler rejected the program, so
        that no time is known.
        """
        check_positive("steps", steps)
        if price is not None:
            check_positive("price", price)
        if self.step is None:
            raise ValueError(
                "The time of a step is not known, because the compiler rejected the program. Make "
                "it fit first: with more devices, a smaller batch, or rematerialisation."
            )
        # Of the steps alone: evaluations and saves are not in them.
        hours = float(steps) * self.step.seconds / 3600
        device_hours = self.devices * hours
        total = None
        if price is not None:
            total = price * device_hours
        return TrainingCost(float(steps), hours, device_hours, total)

    @property
    def own_compiler(self) -> bool:
        """Whether the figures are from the target's own compiler, and not from the CPU's."""
        return self.compiler != "cpu" or parse_target(self.target).chip.kind == "cpu"

    @property
    def report(self) -> dict[str, Any]:
        """The same as plain data, for `json.dumps`."""
        data = dict(vars(self))
        del data["plan"], data["changes"]  # which follow the figures
        for name in ("notes", "traffic", "lines"):
            data[name] = list(data[name])
        for name in ("bounds", "step"):
            # Not known of a program that the compiler rejected.
            if data[name] is not None:
                data[name] = asdict(data[name])
        data["plan"] = self.plan.report.to_json()
        data["changes"] = list(map(asdict, self.changes))
        return data

    def by_line(self) -> str:
        """Lists the lines of code that need most memory and communication, as compiled.

        A line is the innermost one in your code, or in a model of redcoast. Its memory are the
        temporaries when most memory is in use. Communication that the plan does not have is marked
        as added by the compiler.

        **Returns:**

        Lines of at most 80 columns.
        """
        lines = ["Per device and step, as compiled, by line of code"]
        lines += [f"{'memory MB':>10}  {'sent MB':>10}  {'planned MB':>10}  line"]
        for line in self.lines[:_SHOWN_LINES]:
            # Such as the optimizer's, and what the compiler adds.
            place = "no line of your code"
            if line["file"]:
                code = getline(line["file"], line["line"]).strip()
                place = f"{os.path.basename(line['file'])}:{line['line']}  {code}"
            figures = _line_figures([line])
            lines += hanging(figures, place)
            causes = "; ".join(line["causes"])
            if line["bytes"] and not line["planned_bytes"]:
                causes = f"added by the compiler: {causes}"
            if causes:
                lines += hanging(" " * len(figures) + "  ", causes)
        if rest := self.lines[_SHOWN_LINES:]:
            lines.append(f"{_line_figures(rest)}{len(rest)} other lines")
        program = self.plan.report.program_or_none
        if program is not None:
            lines += ["", "As planned", self.plan.table(by="line")]
        return "\n".join(lines)

    def to_html(self) -> str:
        """A web page that shows the code with the compiled cost of each line beside it.

        **Returns:**

        The text of an HTML file, which needs no other files.
        """
        lines = []
        for line in self.lines:
            place = line["file"], line["line"]
            causes = tuple(line["causes"])
            lines.append(LineCost(*place, line["memory_bytes"], line["bytes"], causes, place))
        return draw_source_page(lines, f"Dry run for {self.target}", str(self))

    def __str__(self) -> str:
        devices = "1 device"
        if self.devices > 1:
            devices = f"{self.devices} devices"
        head = (
            f"Dry run for {self.target}: {devices}, mesh {show_sizes(self.mesh)}; compiled by the "
            f"{self.compiler.upper()} compiler in {self.compile_seconds:.1f} s"
        )
        lines = []
        if not self.own_compiler:
            lines.append(_ESTIMATED)
        lines += [*paragraph(head), "", *paragraph(_verdict(self)), ""]
        lines += [*_memory(self), "", *_traffic(self), "", *_time(self)]
        if not self.fits:
            lines += ["", *_changes(self)]
        for note in self.notes:
            lines += ["", *paragraph(note)]
        return "\n".join(lines)


def _line_figures(lines: Sequence[CompiledLine]) -> str:
    """The first columns of a table of lines of code: the sums over some of them, in megabytes."""
    columns = ""
    for name in ("memory_bytes", "bytes", "planned_bytes"):
        size = sum(line[name] for line in lines)
        columns += f"{megabytes(size):>10}  "
    return columns


_ESTIMATED = "Estimates by the CPU compiler, in place of the compiler for the target."
_SHOWN = 8  # causes of communication
_NEAR = 0.1  # a plan whose communication differs by a smaller share is not said to differ
_SHOWN_LINES = 20  # of code
_LITTLE = 1e-3  # a network that takes less than this share of the largest bound is not shown


def _verdict(run: DryRun) -> str:
    peak, usable = run.memory["peak"], run.memory["usable"]
    of = f"{gib(peak)} of {gib(usable)} GiB of memory"
    if run.fits:
        return f"It fits: {of}, {gib(usable - peak)} GiB to spare."
    least = ""
    # A compiler that refuses a program may not have counted all of it.
    if run.refused:
        least = "at least "
    return f"It does not fit: {least}{of}, {least}{gib(peak - usable)} GiB too much."


def _memory(run: DryRun) -> list[str]:
    memory = run.memory
    rows = ["parameters", "optimizer_state", "other", "batch", "temporaries", "peak", "usable"]
    lines = [f"{'Memory per device':<30}{'GiB':>10}"]
    for name in rows:
        # Counters and keys are too small for a line.
        if name not in memory or (name == "other" and memory[name] < 2**20):
            continue
        more = ""
        if name == "temporaries":
            gradients = gib(memory["gradients"])
            more = f"  (including gradients: {gradients})"
            # Compilers may need less memory for gradients than is planned.
            if memory["gradients"] > memory[name]:
                more = f"  (gradients: {gradients} if all were kept)"
        lines.append(f"  {name.replace('_', ' '):<28}{gib(memory[name]):>10}{more}")
    return lines


def _traffic(run: DryRun) -> list[str]:
    if run.sent_bytes is None:
        return ["The communication is not known, because the compiler rejected the program."]
    if not run.traffic:
        return ["Devices do not communicate."]
    lines = [f"Communication per device and step: {megabytes(run.sent_bytes)} MB"]
    program = run.plan.report.program_or_none
    if program is not None:
        planned = sum(cost.bytes for cost in program.traffic)
        if abs(run.sent_bytes - planned) > _NEAR * run.sent_bytes:
            # Beside the loss, the optimizer and metrics communicate, of which a plan has nothing.
            added = 0
            for line in run.lines:
                if not line["planned_bytes"]:
                    added += line["bytes"]
            text = f"The plan has {megabytes(planned)} MB"
            if added:
                text += f"; {megabytes(added)} MB are on lines where it has none (`by_line()`)"
            lines += paragraph(f"{text}.", "  ", "  ")
    lines.append(f"  {'MB':>12}  {'times':>5}  axis, kind, cause")
    for row in run.traffic[:_SHOWN]:
        words = f"{row['axis']}: {row['kind']}, {row['cause']}"
        lines += hanging(f"  {megabytes(row['bytes']):>12}  {row['times']:>5}  ", words)
    if rest := run.traffic[_SHOWN:]:
        size = megabytes(sum(row["bytes"] for row in rest))
        times = sum(row["times"] for row in rest)
        lines.append(f"  {size:>12}  {times:>5}  {len(rest)} smaller")
    return lines


def _scaled(count: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9)):
        if count >= 0.1 * size:
            return f"{count / size:.4g} {unit}"
    return f"{count / 1e6:.4g} M"


def _time(run: DryRun) -> list[str]:
    flops = ", ".join(f"{_scaled(count)}FLOP in {name}" for name, count in run.arithmetic.items())
    bounds = run.bounds
    if bounds is None:
        return paragraph(f"Arithmetic per device and step: {flops or 'none'}.")
    every = {"arithmetic": bounds.arithmetic, "memory": bounds.memory}
    for axes, seconds in bounds.network.items():
        every[f"network ({axes})"] = seconds
    lines = ["Lower bounds on the time of a step:"]
    for name, seconds in every.items():
        # Of the networks, only those that could matter are shown.
        if name.startswith("network") and seconds < _LITTLE * every[bounds.binding]:
            continue
        row = f"  {seconds * 1e3:>12,.4g} ms  {name}"
        if name == "arithmetic" and flops:
            row += f": {flops}"
        if name == bounds.binding:
            row += "  <- the bottleneck"
        lines.append(row)
    # `utilisation` is without what several devices repeat, and `arithmetic` is with it.
    largest = every[bounds.binding]
    repeated = 0.0
    if bounds.arithmetic:
        repeated = 1 - bounds.utilisation * largest / bounds.arithmetic
    text = f"Upper bound on utilisation: {bounds.utilisation:.0%}"
    if repeated >= _LITTLE:
        text += f"; {repeated:.0%} of the arithmetic is repeated by several devices"
    lines.append(text)
    if run.step is not None:
        lines += ["", *show_step_time(run.step)]
    return lines


def _changes(run: DryRun) -> list[str]:
    if not run.changes:
        return paragraph(
            "None of the compiled changes of mesh, remat, accumulation or precision makes it fit. "
            "Use more devices or a smaller batch."
        )
    lines = ["Each of these changes makes it fit, and was compiled:"]
    for change in run.changes:
        lines += paragraph(f"{change.what}: {gib(change.peak)} GiB", "  ", "    ")
    return lines


def gib(size: int | float) -> str:
    """Formats a size in GiB."""
    return in_units(size, 2**30)
