"""The result of a mesh search, and its table."""

import itertools as it
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..distributed._mesh import AXES, PIPE
from ..sharding.report._text import paragraph


@dataclass(frozen=True)
class Candidate:
    """One factorisation of the devices into the axes of a mesh; figures are per device and step.

    **Attributes:**

    - `mesh`: The sizes of the axes.
    - `priced_seconds`: The planner's estimate of the time: arithmetic at the peak rate plus
        communication at the full bandwidth of the links.
    - `estimated_memory`: The planner's estimate of the memory, in bytes.
    - `usual`: Whether the plan uses the axes for their purpose, and not `model` for FSDP or `fsdp`
        for tensor parallelism. Among meshes of equal cost, such a mesh is preferred.
    - `repeated`: Whether every device computes the whole step, which is too small to be divided.
    - `sent_bytes`, `seconds`, `peak_memory`: The bytes that the compiled program communicates, the
        time estimated from them, and the bytes of memory that it needs; `None` if it was not
        compiled.
    - `fits`: Whether the compiled program fits in memory; `None` if it was not compiled.
    - `error`: Why the step cannot be run on this mesh, or `None`.
    """

    mesh: dict[str, int]
    priced_seconds: int | float | None = None
    estimated_memory: int | None = None
    usual: bool = True
    repeated: bool = False
    sent_bytes: int | None = None
    seconds: int | float | None = None
    peak_memory: int | None = None
    fits: bool | None = None
    error: str | None = None


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
        found = rc.suggest_mesh(init_fn, loss_fn, batch, optax.sgd(0.1))
        mesh = rc.make_mesh(**found)
        first = found.candidates[0].mesh  # the sizes of this mesh, as a dict
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
        chosen = ", ".join(f"{axis}={size}" for axis, size in self.items())
        head = f"Meshes for {self.target}: {chosen} is the best of {len(self.candidates)}"
        sources = _SOURCES + (_ASSUMED if self.speeds_assumed else "")
        words = _words(self)
        lines = [head, *paragraph(sources), "", *_table(self.candidates)]
        return "\n".join([*lines, *([""] if words else []), *words])


class _Column(NamedTuple):
    """A figure of a candidate: its name, and the units that it may be shown in, largest first."""

    name: str
    units: tuple[tuple[str, float], ...]


_TIMES = (("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
_SIZES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_PLANNED = (_Column("priced_seconds", _TIMES), _Column("estimated_memory", _SIZES))
_COMPILED = (
    _Column("seconds", _TIMES),
    _Column("peak_memory", _SIZES),
    _Column("sent_bytes", (("MB sent", 1e6), ("kB sent", 1e3))),
)


def _table(candidates: Sequence[Candidate]) -> list[str]:
    """The lines of the table; meshes with the same figures share one."""
    axes = (PIPE, *AXES) if any(PIPE in one.mesh for one in candidates) else AXES
    columns = (*_PLANNED, *_COMPILED)
    units = [_unit(candidates, column) for column in columns]
    rows = [(*axes, *(name for name, _ in units), "")]
    for one, figures, alike in _groups(candidates, [unit for _, unit in units]):
        sizes = (str(one.mesh.get(axis, 1)) for axis in axes)
        rows.append((*sizes, *figures, _remark(one, alike)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([*map(str.rjust, row[:-1], widths), row[-1]]).rstrip() for row in rows]
    ends = [end + 2 * place for place, end in enumerate(it.accumulate(widths))]
    planned, compiled = ends[len(axes) + len(_PLANNED) - 1], ends[-2]
    return ["planned".rjust(planned) + "compiled".rjust(compiled - planned), *lines]


def _unit(candidates: Sequence[Candidate], column: _Column) -> tuple[str, float]:
    """The largest unit of which some mesh has at least a tenth."""
    most = max((getattr(one, column.name) or 0 for one in candidates), default=0)
    fitting = (unit for unit in column.units if most >= 0.1 * unit[1])
    return next(fitting, column.units[0] if most == 0 else column.units[-1])


def _groups(
    candidates: Sequence[Candidate], units: Sequence[float]
) -> list[tuple[Candidate, tuple[str, ...], int]]:
    """The meshes with different figures, the figures as text, and the number of meshes that share
    them.

    A mesh that was not compiled counts as equal to the first one with the same estimates.
    """
    first: dict[Any, Candidate] = {}
    texts: dict[Any, tuple[str, ...]] = {}
    alike: Counter[Any] = Counter()
    for one in candidates:
        values = (getattr(one, column.name) for column in (*_PLANNED, *_COMPILED))
        figures = tuple(map(_scaled, values, units))
        planned = figures[: len(_PLANNED)]
        key = (figures, one.fits, one.error)
        if one.fits is None and one.error is None:
            same = (
                k for k, x in first.items() if x.error is None and k[0][: len(planned)] == planned
            )
            key = next(same, key)
        first.setdefault(key, one)
        texts.setdefault(key, figures)
        alike[key] += 1
    return [(one, texts[key], alike[key] - 1) for key, one in first.items()]


def _remark(one: Candidate, alike: int) -> str:
    if one.error is not None:
        return "cannot be run: " + one.error.splitlines()[0][:60]
    words = {True: "fits", False: "does not fit", None: ""}[one.fits]
    more = f"{alike} more with these figures" if alike else ""
    return ", ".join(filter(None, (words, more)))


def _scaled(value: int | float | None, unit: int | float) -> str:
    if value is None:
        return "-"
    value = value / unit
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


_SOURCES = (
    "No time is measured. The planner estimates it (planned), and again from what the compiled "
    "program computes and sends (compiled)."
)
_ASSUMED = " The speeds of the devices are not known: the estimates are for an A100."


def _words(found: MeshSuggestion) -> list[str]:
    usable = found.usable_memory
    best = found.candidates[0]
    lines = [] if usable is None else [f"A program can use {usable / 1e9:.4g} GB on a device."]
    if not found.fits and usable is not None and best.peak_memory is not None:
        lines.append(
            f"WARNING: none of the compiled meshes fits. The first needs the least memory: "
            f"{(best.peak_memory - usable) / 1e9:.3g} GB too much."
        )
    if best.repeated:
        lines.append(
            "The step is too small to be divided: on the best mesh, every device computes all of "
            "it, because communication would take longer. One device is as fast."
        )
    lines += found.notes
    return [line for one in lines for line in paragraph(one)]
