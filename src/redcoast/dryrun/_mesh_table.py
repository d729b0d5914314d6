"""The result of a mesh search, and its table."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
    sent_bytes: int | None = None
    seconds: int | float | None = None
    peak_memory: int | None = None
    fits: bool | None = None
    error: str | None = None


@dataclass(frozen=True, eq=False)
class MeshSuggestion(Mapping[str, Any]):
    """The sizes of `data`, `fsdp`, `model` and maybe `pipe`, ready for `make_mesh(**suggestion)`.

    `str(suggestion)` is a table of all meshes that were compared.

    **Attributes:**

    - `sizes`: The best mesh, as a dict.
    - `fits`: Whether the step fits on it.
    - `target`: The name of the devices.
    - `usable_memory`: Bytes of memory that a program can use on a device; `None` if not known.
    - `candidates`: All factorisations, the best first: those that were compiled, then the others
        by estimated cost. Each has `mesh`, `priced_seconds` and `estimated_memory`; if it was
        compiled, also `sent_bytes`, `seconds`, `peak_memory` and `fits`; and `error` if the step
        cannot be run.
    - `notes`: Caveats about the figures, as sentences.

    !!! example

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

    def __getitem__(self, axis: str) -> Any:  # not `int`: `**suggestion` must fit any argument
        return self.sizes[axis]

    def __iter__(self) -> Iterator[str]:
        return iter(self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    def __str__(self) -> str:
        staged = any(PIPE in one.mesh for one in self.candidates)
        axes = (PIPE, *AXES) if staged else AXES
        heads = (*axes, "est. ms", "est. GB", "comm. MB", "ms", "peak GB", "")
        rows = [heads, *(_cells(one, axes) for one in self.candidates)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join([*map(str.rjust, row[:-1], widths), row[-1]]).rstrip() for row in rows]
        chosen = ", ".join(f"{axis}={size}" for axis, size in self.items())
        head = f"Meshes for {self.target}: {chosen} is the best of {len(self.candidates)}"
        words = _words(self)
        return "\n".join([head, "", *lines, *([""] if words else []), *words])


def _cells(one: Candidate, axes: Sequence[str]) -> tuple[str, ...]:
    words = {True: "fits", False: "does not fit", None: ""}[one.fits]
    return (
        *(str(one.mesh.get(axis, 1)) for axis in axes),
        _scaled(one.priced_seconds, 1e-3),
        _scaled(one.estimated_memory, 1e9),
        _scaled(one.sent_bytes, 1e6),
        _scaled(one.seconds, 1e-3),
        _scaled(one.peak_memory, 1e9),
        words if one.error is None else "cannot be run: " + one.error.splitlines()[0][:60],
    )


def _scaled(value: int | float | None, unit: int | float) -> str:
    if value is None:
        return "-"
    value = value / unit
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _words(found: MeshSuggestion) -> list[str]:
    usable = found.usable_memory
    best = found.candidates[0]
    lines = [] if usable is None else [f"A program can use {usable / 1e9:.4g} GB on a device."]
    if not found.fits and usable is not None and best.peak_memory is not None:
        lines.append(
            f"WARNING: none of the compiled meshes fits. The first needs the least memory: "
            f"{(best.peak_memory - usable) / 1e9:.3g} GB too much."
        )
    lines += found.notes
    return [line for one in lines for line in paragraph(one)]
