"""Saves plans as JSON and loads them."""

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any, get_args

from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from ..core._durable_files import sync
from ..core._errors import check_kind, local_path, several
from ..core._frames import hide_frames
from ..core._read_json import read_json
from ._plan import Plan, make_plan, mesh_or_ambient
from .report._data import ProgramReport
from .tree._leaves import Leaf, flat_leaves
from .tree._overrides import spec_axes, spec_parts
from .tree._plan_rows import OVERRIDE, Compute, Kind, Role, Row, model_of, plan_rows

FORMAT = 1
_Check = Callable[[Any], bool]


def _list_of(is_one: _Check) -> _Check:
    return lambda x: isinstance(x, list) and all(map(is_one, x))


_is_text: _Check = lambda x: isinstance(x, str)
_is_int: _Check = lambda x: type(x) is int
_is_names = _list_of(_is_text)
_is_axes: _Check = lambda x: x is None or _is_text(x) or _is_names(x)
_is_dim: _Check = lambda x: x is None or _is_int(x)
_is_constant: _Check = lambda x: (
    isinstance(x, list) and len(x) == 2 and _is_text(x[0]) and _is_dim(x[1])
)
# What entries of a file must be. Files of earlier versions lack the new ones.
_NEW = ("kind", "together", "constants", "tokens", "microbatches")
_ROW: dict[str, _Check] = {
    "path": _is_text,
    "shape": _list_of(_is_int),
    "dtype": _is_text,
    "spec": _list_of(_is_axes),
    "reason": _is_text,
    "role": lambda x: x in get_args(Role),
    "kind": lambda x: x in get_args(Kind),
    "together": _is_text,
}
_COMPUTE: dict[str, _Check] = {
    "dims": _list_of(_is_dim),
    "batch_axes": _is_names,
    "model_axes": _is_names,
    "sequence": lambda x: isinstance(x, bool),
    "constants": _list_of(_is_constant),
    "tokens": lambda x: isinstance(x, bool),
    "microbatches": lambda x: x is None or (_is_int(x) and x > 0),
}


@hide_frames
def save_plan(plan: Plan, path: str | PathLike[str]) -> None:
    """Saves a plan as a JSON file.

    The file has the sizes of the mesh; the path, shape, dtype, spec, reason and role of each array;
    how the program uses the arrays; and the figures of the plan's report. It is written atomically.

    **Arguments:**

    - `plan`: A plan from [`redcoast.plan_shardings`][].
    - `path`: The file. Missing parent directories are created.

    **Raises:**

    `ValueError` if `path` exists and is not this plan. Plans are never overwritten.

    !!! example

        ```python
        import jax.numpy as jnp
        import redcoast as rc

        model = {"up": jnp.zeros((64, 256)), "down": jnp.zeros((256, 64))}
        rc.save_plan(rc.plan_shardings(model, rc.make_mesh(model=4)), "runs/lm/plan.json")
        ```
    """
    check_kind("plan", plan, Plan, "a plan, as `redcoast.plan_shardings` gives")
    from .report._report_json import array_to_json, program_to_json

    path = local_path("path", path)
    arrays = map(array_to_json, plan.report.arrays)
    document = {
        "format": FORMAT,
        "mesh": dict(plan.report.mesh),
        "rows": [{key: row[key] for key in _ROW} for row in arrays],
        "compute": asdict(plan.compute),
        "report": program_to_json(plan.report.program_or_none),
    }
    text = json.dumps(document, indent=1) + "\n"
    if path.exists():
        if path.is_file() and path.read_text("utf-8", errors="replace") == text:
            return
        raise ValueError(
            f"{path} already exists and is not this plan. Plans are never overwritten: choose "
            "another path, or remove it first."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        unfinished.write_text(text, "utf-8")
        sync(unfinished)
        os.replace(unfinished, path)
        sync(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


@hide_frames
def load_plan(
    path: str | PathLike[str], tree: PyTree[Any], mesh: Mesh | AbstractMesh | None = None
) -> Plan:
    """Loads a plan that [`redcoast.save_plan`][] saved, for the same tree and mesh sizes.

    **Arguments:**

    - `path`: The file.
    - `tree`: A tree with the paths, shapes and dtypes of the planned one. Its arrays may be
        abstract.
    - `mesh`: A mesh with the sizes of the planned one. Defaults to the ambient mesh.

    **Returns:**

    A plan equal to the saved one.

    **Raises:**

    `FileNotFoundError` if the file does not exist. `ValueError` if it is not a plan or has an
    unknown format, or if the paths, shapes or dtypes of the tree, or the sizes of the mesh, differ
    from the plan's.

    !!! example

        ```python
        import jax.numpy as jnp
        import redcoast as rc

        model = {"up": jnp.zeros((64, 256)), "down": jnp.zeros((256, 64))}
        mesh = rc.make_mesh(model=4)
        rc.save_plan(rc.plan_shardings(model, mesh), "runs/lm/saved.json")
        shardings = rc.load_plan("runs/lm/saved.json", model, mesh).shardings
        ```
    """
    path = Path(path).expanduser()
    document = _read(path)
    mesh = mesh_or_ambient(mesh)
    planned, given = document["mesh"], dict(mesh.shape)
    if planned != given:
        draw = lambda sizes: ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        raise ValueError(
            f"The plan in {path} is for a mesh of {draw(planned)}, but the given mesh has "
            f"{draw(given)}. Use rc.make_mesh({draw(planned)}), or plan again."
        )
    leaves = flat_leaves(model_of(tree))
    blank = plan_rows(tree, [Row(leaf, P(), OVERRIDE, "parameter") for leaf in leaves])
    _check_leaves(path, document["rows"], [row.leaf for row in blank])
    compute = Compute(**{name: _tuples(value) for name, value in document["compute"].items()})
    rows = _rows(path, document, blank, compute)
    return make_plan(tree, mesh, rows, compute, _program(path, document["report"]))


def _rows(
    path: Path, document: dict[str, Any], blank: Sequence[Row], compute: Compute
) -> list[Row]:
    from .report._report_json import reason_from_json

    dims, rows = iter(compute.dims), []
    for one, row in zip(blank, document["rows"], strict=True):
        # `compute` is about the arrays of the model, which are "parameter" in `blank`.
        computed = one.role == "parameter" and next(dims, None) is not None
        spec = _spec(path, row, document["mesh"])
        rows.append(Row(one.leaf, spec, reason_from_json(row, computed), row["role"]))
    return rows


def _program(path: Path, data: dict[str, Any]) -> ProgramReport | None:
    from .report._report_json import program_from_json

    try:
        return program_from_json(data) if data else None
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a complete plan: the figures of its report cannot be read: {error}. "
            "Plan again, and save the new plan."
        ) from error


def _tuples(x: Any) -> Any:
    return tuple(map(_tuples, x)) if isinstance(x, list) else x


def _read(path: Path) -> dict[str, Any]:
    try:
        document = read_json(path)
    except OSError as error:
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError
        raise kind(
            f"Cannot read a plan from {path}: {error.strerror}. Save one with `rc.save_plan`."
        ) from error
    except ValueError as error:
        raise ValueError(f"{path} is not a plan. {error}") from error
    version = document.get("format")
    if not isinstance(version, int):
        raise ValueError(f"{path} is not a plan: it has no `format`.")
    if version != FORMAT:
        raise ValueError(
            f"{path} is a plan of format {version}, but this version of redcoast reads format "
            f"{FORMAT}. Plan again, and save the new plan."
        )
    if wrong := _wrong(document):
        raise ValueError(
            f"{path} is not a complete plan: {', '.join(sorted(wrong))} must be present and of the "
            "right type. Plan again, and save the new plan."
        )
    return document


def _wrong(document: dict[str, Any]) -> set[str]:
    """The names of entries that are missing or have a wrong type."""
    kinds = {"mesh": dict, "rows": list, "compute": dict, "report": dict}
    sizes = lambda: all(_is_int(size) and size > 0 for size in document["mesh"].values())
    return (
        {name for name, kind in kinds.items() if not isinstance(document.get(name), kind)}
        or {name for row in document["rows"] for name in _wrong_among(row, _ROW)}
        or _wrong_among(document["compute"], _COMPUTE) | (document["compute"].keys() - _COMPUTE)
        or (set() if sizes() else {"mesh"})
    )


def _wrong_among(found: Any, checks: dict[str, _Check]) -> set[str]:
    if not isinstance(found, dict):
        return {"rows"}
    fits = lambda name: checks[name](found[name]) if name in found else name in _NEW
    return {name for name in checks if not fits(name)}


def _check_leaves(path: Path, rows: Sequence[dict[str, Any]], leaves: Sequence[Leaf]) -> None:
    planned, given = [row["path"] for row in rows], [leaf.name for leaf in leaves]
    if planned != given:
        raise ValueError(f"The plan in {path} is for another tree: {_difference(planned, given)}.")
    for row, leaf in zip(rows, leaves, strict=True):
        before = (tuple(row["shape"]), row["dtype"])
        now = (leaf.shape, str(leaf.dtype))
        if before != now:
            raise ValueError(
                f"The plan in {path} is for another tree: {leaf.name or 'the array'} was planned "
                f"with shape {before[0]} and dtype {before[1]}, but has {now[0]} and {now[1]}. "
                "Plan again."
            )


def _difference(planned: Sequence[str], given: Sequence[str]) -> str:
    lacking = [repr(name) for name in planned if name not in set(given)]
    new = [repr(name) for name in given if name not in set(planned)]
    parts = [f"the tree lacks {several(lacking, 3)}"] if lacking else []
    parts += [f"the plan does not have {several(new, 3)}"] if new else []
    twice = [repr(name) for name, count in Counter(planned).items() if count > 1]
    parts += [f"the plan has {several(twice, 3)} several times"] if twice else []
    if not parts:
        a, b = next(pair for pair in zip(planned, given, strict=False) if pair[0] != pair[1])
        parts = [f"the paths are in another order, {b!r} in the place of {a!r}"]
    return ", and ".join(parts)


def _spec(path: Path, row: dict[str, Any], axes: dict[str, int]) -> P:
    """The spec of a row. Raises if it does not fit, because the file may have been edited."""
    entries = [tuple(entry) if isinstance(entry, list) else entry for entry in row["spec"]]
    used, shape = [axis for entry in entries for axis in spec_axes(entry)], row["shape"]
    fits = len(entries) <= len(shape) and len(used) == len(set(used)) and set(used) <= set(axes)
    sizes = zip(shape, entries, strict=False)
    if not fits or any(size % spec_parts(P(entry), axes) for size, entry in sizes):
        raise ValueError(
            f"In {path} the spec {row['spec']} of {row['path'] or 'the array'} does not fit its "
            f"shape {row['shape']} on the mesh {axes}."
        )
    return P(*entries)
