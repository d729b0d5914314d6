"""Meshes side by side: what each costs, and which is the best."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..distributed._mesh import AXES
from ..sharding.report._text import paragraph


@dataclass(frozen=True)
class Candidate:
    """One factorisation of the devices into data x fsdp x model, for one step and one device.

    **Attributes:**

    - `mesh`: The sizes of the axes.
    - `priced_seconds`: Arithmetic at the peak rate and what is sent at the links', one after the
        other, as the planner counts them.
    - `estimated_memory`: Bytes, as the planner counts them.
    - `usual`: Whether the plan uses the axes as they are meant, and not `model` as `fsdp`, or the
        other way round. Of meshes that cost the same, such a one is chosen.
    - `sent_bytes`, `seconds`, `peak_memory`: What is sent in the compiled program, the time with
        that, and the bytes of memory that it takes; `None` if it was not compiled.
    - `fits`: Whether it does, or `None` if it was not compiled.
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
    """The sizes of `data`, `fsdp` and `model`, ready for `make_mesh(**suggestion)`.

    `str(suggestion)` is a table of all meshes that were compared.

    **Attributes:**

    - `sizes`: The best mesh, as a dict.
    - `fits`: Whether the step fits on it.
    - `target`: What it is for.
    - `usable_memory`: Bytes of memory that a program can have on a device; `None` if not known.
    - `candidates`: All factorisations, the best first: those that were compiled, then the others
        by their price. Each has `mesh`, `priced_seconds`, `estimated_memory`; if it was compiled,
        `sent_bytes`, `seconds`, `peak_memory` and `fits`; and `error` if the step cannot be run.
    - `notes`: What a reader of the figures must know.

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

    def __getitem__(self, axis: str) -> Any:  # a size; so that `**` suits any argument
        return self.sizes[axis]

    def __iter__(self) -> Iterator[str]:
        return iter(self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    def __str__(self) -> str:
        return draw(self)


_HEADS = (*AXES, "priced ms", "est. GB", "sent MB", "ms", "peak GB", "")


def draw(found: MeshSuggestion) -> str:
    """The table, and in words what it comes to."""
    rows = [_HEADS, *(_cells(one) for one in found.candidates)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADS))]
    lines = [_line(row, widths) for row in rows]
    chosen = ", ".join(f"{axis}={size}" for axis, size in found.items())
    count = len(found.candidates)
    head = f"Meshes for {found.target}: {chosen} is the best of {count}"
    words = _words(found)
    return "\n".join([head, "", *lines, *([""] if words else []), *words])


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    *figures, words = row
    numbers = (cell.rjust(width) for cell, width in zip(figures, widths, strict=False))
    return "  ".join([*numbers, words]).rstrip()


def _cells(one: Candidate) -> tuple[str, ...]:
    words = {True: "fits", False: "does not fit", None: ""}[one.fits]
    return (
        *(str(one.mesh[axis]) for axis in AXES),
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
    lines = [] if usable is None else [f"A program can have {usable / 1e9:.4g} GB on a device."]
    if not found.fits and usable is not None and best.peak_memory is not None:
        lines.append(
            f"WARNING: none of the meshes that were compiled fits. The first needs least: "
            f"{(best.peak_memory - usable) / 1e9:.3g} GB too much."
        )
    lines += found.notes
    return [line for one in lines for line in paragraph(one)]
