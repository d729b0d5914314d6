"""Compiles a step ahead of time, and reads memory and communication from the program."""

import contextlib
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import jax
from jax.sharding import Mesh

from ..core._frames import own_or_model_frame
from ..sharding import Plan
from ._flops import contractions
from ._job import Job, trace_job
from ._phases import enter_phase
from .hlo import (
    Collective,
    HeldBuffer,
    collectives,
    peak_buffers,
    peak_bytes,
    temporary_bytes,
)
from .hlo._events import Event, read_schedule
from .hlo._source_lines import Frame

_NOWHERE: Frame = ("", 0)
# Generates machine code faster; buffers and collectives are the same.
_CPU_OPTIONS: dict[str, Any] = {"xla_backend_optimization_level": 0}
# By default the CPU compiler schedules for concurrency, which takes more memory than accelerators
# need.
# Barriers of `jax.checkpoint`, which accelerators keep, are kept too. This compiler would sum all
# gradients of a layer together, however large; those for accelerators sum large ones apart.
_STAND_IN = _CPU_OPTIONS | {
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
    "xla_disable_hlo_passes": "cse_barrier_expander,cpu-all-reduce-combiner",
}
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# The two messages in which the TPU compiler reports how much memory is needed. The second includes
# arguments and results, and is a lower bound.
_USED = re.compile(r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm", re.IGNORECASE)
_TEMPORARIES = re.compile(r"required for HLO temporaries \(([\d.]+)([KMGT]?)\)")


class TrafficRow(TypedDict):
    """Communication over some axes, `times` times in a step, in `bytes` that a device sends."""

    axis: str  # several are joined with `+`
    kind: str
    cause: str
    times: int
    bytes: int


class CompiledLine(TypedDict):
    """A line of code: what a device sends for it, its temporaries at the peak, and why it sends."""

    file: str
    line: int
    bytes: int
    memory_bytes: int
    causes: list[str]
    planned_bytes: int  # that it sends by the plan


@dataclass(frozen=True)
class Compiled:
    """The compiler's figures: bytes of memory on each device, and the communication.

    If the compiler rejects the program because it needs too much memory (`refused`), only a lower
    bound on `peak` is known.
    """

    peak: int
    temporaries: int | None  # at the peak
    moved: int | None  # arguments and results
    traffic: tuple[TrafficRow, ...] | None
    seconds: float
    refused: bool = False
    flops: dict[str, float] = field(default_factory=dict)  # of a device, by dtype
    open_loops: int = 0  # loops of unknown length, counted as one iteration
    lines: tuple[CompiledLine, ...] = ()  # communication and memory by line of code
    events: tuple[Event, ...] = ()  # kernels and transfers in the order of their start

    @property
    def sent(self) -> Counter[str]:
        """Bytes that a device communicates over each set of axes."""
        sent: Counter[str] = Counter()
        for row in self.traffic or ():
            sent[row["axis"]] += row["bytes"]
        return sent


def compile_job(
    job: Job, plan: Plan, mesh: Mesh, *, stands_in: bool = False, with_lines: bool = False
) -> Compiled:
    """Compiles the step for the mesh's devices.

    They are CPU devices in place of an accelerator's if `stands_in`. With `with_lines`, the program
    has all lines of code that its operations come from, and is compiled again if only these have
    changed. Raises `RuntimeError` if the compiler fails, unless the step needs too much memory.
    """
    what = f"the step on the mesh {show_sizes(mesh.shape)}"
    enter_phase("Tracing", what)
    traced = trace_job(job, plan, mesh)
    counted = contractions(traced.jaxpr)
    program = plan.report.program_or_none
    share = 1.0  # of the program's operations, those of one device
    if program is not None:
        share = program.arithmetic.per_device / max(1, program.arithmetic.flops)
    flops = {dtype: share * count for dtype, count in counted.flops.items()}
    platform = mesh.devices.flat[0].platform
    options = None
    if stands_in:
        options = _STAND_IN
    elif platform == "cpu":
        options = _CPU_OPTIONS
    settings: Mapping[str, object] = {}
    if with_lines:
        settings = _ALL_LINES
    # The limit applies where JAX writes lines into the program: when it is lowered.
    with _configured(settings):
        lowered = traced.lower()
        enter_phase("Compiling", what)
        begin = time.perf_counter()
        try:
            compiled = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            peak = None
            if "RESOURCE_EXHAUSTED" in str(error):
                peak = needed_bytes(str(error))
            if peak is None:  # another error, or a message without figures
                raise RuntimeError(
                    "The compiler failed on this program; it may succeed for another mesh or "
                    f"another batch. Its error was: {error}"
                ) from error
            seconds = time.perf_counter() - begin
            loops = counted.open_loops
            return Compiled(peak, None, None, None, seconds, True, flops, loops)
        seconds = time.perf_counter() - begin
    memory: Any = compiled.memory_analysis()
    text = compiled.as_text()
    communication = collectives(text, mesh)
    lines: tuple[CompiledLine, ...] = ()
    if with_lines and text is not None:
        lines = _by_line(communication, peak_buffers(text), plan)
    return Compiled(
        peak=peak_bytes(memory, platform),
        temporaries=temporary_bytes(memory, platform),
        moved=memory.argument_size_in_bytes + memory.output_size_in_bytes,
        traffic=_traffic(communication),
        seconds=seconds,
        flops=flops,
        open_loops=counted.open_loops,
        lines=lines,
        events=read_schedule(text, mesh),
    )


# JAX leaves out all but a few lines of a program, and takes one with other lines for the same.
_ALL_LINES = {
    "jax_traceback_in_locations_limit": -1,
    "jax_compilation_cache_include_metadata_in_key": True,
}


@contextlib.contextmanager
def _configured(settings: Mapping[str, object]) -> Iterator[None]:
    """Sets options of JAX, and resets them afterwards."""
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def show_sizes(sizes: Mapping[str, int]) -> str:
    """The sizes of a mesh, such as `"data=1, fsdp=8, model=8"`."""
    return ", ".join(f"{axis}={size}" for axis, size in sizes.items())


def needed_bytes(message: str) -> int | None:
    """The memory on a device that a compiler's out-of-memory message says a program needs."""
    needed = _USED.search(message) or _TEMPORARIES.search(message)
    if needed is None:
        return None
    return round(float(needed[1]) * _UNITS[needed[2]])


def _traffic(communication: Sequence[Collective]) -> tuple[TrafficRow, ...]:
    """The communication of one device in a step, grouped by axis, kind and cause, largest first."""
    times: Counter[tuple[str, str, str]] = Counter()
    sent: Counter[tuple[str, str, str]] = Counter()
    for each in communication:
        key = "+".join(each.axes), each.kind, cause(each.source)
        times[key] += each.count
        sent[key] += each.count * each.sent_bytes
    rows: list[TrafficRow] = []
    for key, size in sent.most_common():
        axis, kind, why = key
        rows.append({"axis": axis, "kind": kind, "cause": why, "times": times[key], "bytes": size})
    return tuple(rows)


def _by_line(
    communication: Sequence[Collective], buffers: Sequence[HeldBuffer], plan: Plan
) -> tuple[CompiledLine, ...]:
    """The communication of one device in a step, as compiled and as planned, and its temporary
    memory at the peak, by line.

    A line is the innermost one in the user's code, or in a model of redcoast.
    """
    sent: Counter[Frame] = Counter()
    planned: Counter[Frame] = Counter()
    memory: Counter[Frame] = Counter()
    causes: dict[Frame, Counter[str]] = defaultdict(Counter)
    for each in communication:
        line = own_or_model_frame(each.frames) or _NOWHERE
        size = each.count * each.sent_bytes
        sent[line] += size
        causes[line][f"{each.kind}, {cause(each.source)}"] += size
    for buffer in buffers:
        memory[own_or_model_frame(buffer.frames) or _NOWHERE] += buffer.bytes
    program = plan.report.program_or_none
    if program is not None:
        for cost in program.lines:
            # Compiled programs have no lines of redcoast's models.
            planned[cost.caller] += cost.sent_bytes
    # Lines that send and lines that hold memory may be different ones.
    costs = {line: sent[line] + memory[line] for line in (*sent, *memory)}
    lines: list[CompiledLine] = []
    for line, size in sorted(costs.items(), key=lambda item: -item[1]):
        if not size:
            continue
        compiled_line = CompiledLine(
            file=line[0],
            line=line[1],
            bytes=sent[line],
            memory_bytes=memory[line],
            causes=[why for why, part in causes[line].most_common() if part],
            planned_bytes=planned[line],
        )
        lines.append(compiled_line)
    return tuple(lines)


def cause(source: str | None) -> str:
    """Returns the part of a step that an operation belongs to, by its name in the traced
    program."""
    if source is None:
        return "not named by the compiler"
    # The names of merged operations are in brackets: "while/body/(add:dot_general)".
    merged = ""
    if source.endswith(")"):
        merged = source.rpartition("(")[2].rstrip(")")
    names: set[str] = set()
    for path in (merged or source).split(":"):
        name = path.rpartition("/")[2]
        if re.fullmatch(r"[a-z][\w-]*", name):
            names.add(name)
    operations = ", ".join(sorted(names)[:3]) or "several"
    # A rematerialised operation is also within `transpose`, and that within `jvp`.
    parts = {"rematted_computation": "rematerialised", "transpose(": "backward", "jvp(": "forward"}
    for mark, part in parts.items():
        if mark in source:
            return f"{part}: {operations}"
    return f"outside the gradient: {operations}"
