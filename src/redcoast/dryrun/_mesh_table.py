"""The result of a mesh search, and its table."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..distributed._mesh import AXES, PIPE
from ..sharding.report._text import paragraph
from ._compile_job import show_sizes


@dataclass(frozen=True)
class Candidate:
    """One factorisation of the devices into the axes of a mesh; figures are per device and step.

    - `priced_seconds`: The planner's estimate of the time: arithmetic at the peak rate plus
        communication at the full bandwidth of the links.
    - `usual`: Whether the plan uses the axes for their purpose, and not `model` for FSDP or `fsdp`
        for tensor parallelism. Among meshes of equal cost, such a mesh is preferred.
    - `repeated`: Whether every device computes the whole step, which is too small to be divided.
    - `sent_bytes`, `seconds`, `peak_memory`: The bytes that the compiled program communicates, the
        time estimated from them, and the bytes of memory that it needs; `None` if it was not
        compiled.
    - `fits`: Whether the compiled program fits in memory; `None` if it was not compiled.
    - `recomputed`: The arithmetic that the backward pass recomputes because of `memory`, as a share
        of the step's.
    """

    mesh: dict[str, int]  # the sizes of the axes
    priced_seconds: int | float | None = None
    estimated_memory: int | None = None  # the planner's estimate of the memory, in bytes
    usual: bool = True
    repeated: bool = False
    sent_bytes: int | None = None
    seconds: int | float | None = None
    peak_memory: int | None = None
    fits: bool | None = None
    error: str | None = None  # why the step cannot be run on this mesh, or `None`
    recomputed: float = 0.0


# `Mapping` compares: a suggestion equals a dict with its sizes.
@dataclass(frozen=True, eq=False)
class MeshSuggestion(Mapping[str, Any]):
    """The sizes of `data`, `fsdp`, `model` and optionally `pipe`, for `make_mesh(**suggestion)`.

    `str(suggestion)` is a table of all meshes that were compared. Meshes with the same figures
    share a line. The columns below `planned` are the planner's estimates. Those below `compiled`
    are from the compiled program: the bytes communicated, the time that is estimated from them, and
    the memory. Nothing is run, and no time is measured.

    **Attributes:**

    - `sizes`: The best mesh, as a dict.
    - `fits`: Whether the step fits on it.
    - `target`: The name of the devices.
    - `usable_memory`: Bytes of memory that a program can use on a device; `None` if not known.
    - `candidates`: All factorisations, the best first: first the compiled ones, then the others by
        estimated cost. Each has `mesh`, `priced_seconds` and `estimated_memory`; if it was
        compiled, also `sent_bytes`, `seconds`, `peak_memory` and `fits`; and `error` if the step
        cannot be run.
    - `notes`: Caveats about the figures, as sentences.
    - `speeds_assumed`: Whether the speeds of the devices are unknown. The times are then estimated
        for an A100.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import optax
        import redcoast as rc

        init_fn = lambda key: jnp.zeros((64, 256))
        loss_fn = lambda weights, batch, key: jnp.mean((batch @ weights) ** 2)
        batch = jax.ShapeDtypeStruct((32, 64), jnp.float32)
        suggestion = rc.suggest_mesh(init_fn, loss_fn, batch, optax.sgd(0.1))
        mesh = rc.make_mesh(**suggestion)
        first = suggestion.candidates[0].mesh  # the sizes of this mesh, as a dict
        ```
    """

    sizes: dict[str, int]
    fits: bool
    target: str
    usable_memory: int | None
    candidates: tuple[Candidate, ...] = field(repr=False)
    notes: tuple[str, ...] = ()
    speeds_assumed: bool = False

    def __getitem__(self, axis: str) -> Any:  # not `int`: `**suggestion` must fit any argument
        return self.sizes[axis]

    def __iter__(self) -> Iterator[str]:
        return iter(self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    def __str__(self) -> str:
        count = len(self.candidates)
        head = f"Meshes for {self.target}: {show_sizes(self)} is the best of {count}"
        sources = _SOURCES
        if self.speeds_assumed:
            sources += _ASSUMED
        lines = [head, *paragraph(sources), "", *_table(self.candidates)]
        remarks = _remarks(self)
        if remarks:
            lines += ["", *remarks]
        return "\n".join(lines)


# In seconds, bytes, and bytes; the largest first.
_TIMES = (("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
_SIZES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_SENT = (("MB sent", 1e6), ("kB sent", 1e3))
# The figures of a candidate, and the units that each may be shown in.
_PLANNED = {"priced_seconds": _TIMES, "estimated_memory": _SIZES}
_COMPILED = {"seconds": _TIMES, "peak_memory": _SIZES, "sent_bytes": _SENT}


def _table(candidates: Sequence[Candidate]) -> list[str]:
    """The lines of the table; meshes with the same figures share one.

    A mesh that was not compiled counts as equal to the first one with the same estimates.
    """
    axes = AXES
    if any(PIPE in candidate.mesh for candidate in candidates):
        axes = (PIPE, *AXES)
    names: list[str] = []
    columns: list[list[str]] = []
    for figure, units in (_PLANNED | _COMPILED).items():
        values = [getattr(candidate, figure) for candidate in candidates]
        name, unit = _unit(values, units)
        names.append(name)
        columns.append([_scaled(value, unit) for value in values])
    first: dict[_TableLine, Candidate] = {}
    count: Counter[_TableLine] = Counter()
    # As text: meshes whose figures look the same share a line.
    for candidate, *figures in zip(candidates, *columns, strict=True):
        line = _TableLine(tuple(figures), candidate.fits, candidate.error)
        if candidate.fits is None and candidate.error is None:
            planned = line.figures[: len(_PLANNED)]
            for other in first:
                if other.error is None and other.figures[: len(_PLANNED)] == planned:
                    line = other
                    break
        first.setdefault(line, candidate)
        count[line] += 1
    rows = [(*axes, *names, "")]
    for line, candidate in first.items():
        sizes = [str(candidate.mesh.get(axis, 1)) for axis in axes]
        rows.append((*sizes, *line.figures, _remark(candidate, count[line] - 1)))
    # The remarks, in the last column, are not aligned.
    *aligned, _ = zip(*rows, strict=True)
    widths = [max(map(len, column)) for column in aligned]
    # Two spaces before each column but the first.
    planned = sum(widths[: len(axes) + len(_PLANNED)]) + 2 * (len(axes) + len(_PLANNED) - 1)
    compiled = sum(widths) + 2 * (len(widths) - 1)
    lines = ["planned".rjust(planned) + "compiled".rjust(compiled - planned)]
    for *cells, remark in rows:
        cells = map(str.rjust, cells, widths)
        lines.append("  ".join([*cells, remark]).rstrip())
    return lines


def _unit(
    values: Sequence[int | float | None], units: Sequence[tuple[str, float]]
) -> tuple[str, float]:
    """The largest unit of which some value is at least a tenth."""
    most = max((value or 0 for value in values), default=0)
    if most == 0:
        return units[0]
    for name, unit in units:
        if most >= 0.1 * unit:
            return name, unit
    return units[-1]


class _TableLine(NamedTuple):
    """What decides whether two meshes share a line of the table."""

    figures: tuple[str, ...]  # as text, in the order of the columns
    fits: bool | None
    error: str | None


def _remark(candidate: Candidate, alike: int) -> str:
    if candidate.error is not None:
        return "cannot be run: " + candidate.error.splitlines()[0][:60]
    remarks = []
    if candidate.fits is not None:
        remarks.append("fits" if candidate.fits else "does not fit")
    if candidate.recomputed:
        remarks.append(f"recomputes {candidate.recomputed:.1%}")
    if alike:
        remarks.append(f"{alike} more with these figures")
    return ", ".join(remarks)


def _scaled(value: int | float | None, unit: int | float) -> str:
    if value is None:
        return "-"
    value = value / unit
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


_SOURCES = (
    "No time is measured. The planner estimates it (planned), and again from what the compiled "
    "program computes and sends (compiled)."
)
_ASSUMED = " The speeds of the devices are not known: the estimates are for an A100."


def _remarks(suggestion: MeshSuggestion) -> list[str]:
    """The lines below the table."""
    usable = suggestion.usable_memory
    best = suggestion.candidates[0]
    remarks = []
    if usable is not None:
        remarks.append(f"A program can use {usable / 1e9:.4g} GB on a device.")
    if not suggestion.fits and usable is not None and best.peak_memory is not None:
        remarks.append(
            f"WARNING: none of the compiled meshes fits. The first needs the least memory: "
            f"{(best.peak_memory - usable) / 1e9:.3g} GB too much."
        )
    if best.repeated:
        remarks.append(
            "The step is too small to be divided: on the best mesh, every device computes all of "
            "it, because communication would take longer. One device is as fast."
        )
    lines = []
    for remark in (*remarks, *suggestion.notes):
        lines += paragraph(remark)
    return lines
