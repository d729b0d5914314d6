"""Saves plans as JSON and loads them."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any, get_args

from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from ..core._errors import check_kind, several
from ..core._frames import hide_frames
from ..core._read_json import read_json
from ._plan import Plan, make_plan, mesh_or_ambient
from .constrain._compute import Compute
from .report._data import ProgramReport
from .tree._leaves import Leaf, flat_leaves
from .tree._overrides import spec_axes, spec_parts
from .tree._plan_rows import Role, Row, plan_rows
from .tree._reason import OVERRIDE, Kind

FORMAT = 1
_Check = Callable[[Any], bool]


def _list_of(is_one: _Check) -> _Check:
    return lambda x: isinstance(x, list) and all(map(is_one, x))


_is_text: _Check = lambda x: isinstance(x, str)
_is_int: _Check = lambda x: type(x) is int
_is_names = _list_of(_is_text)
_is_axes: _Check = lambda x: x is None or _is_text(x) or _is_names(x)
_is_dim: _Check = lambda x: x is None or _is_int(x)
_is_pair: _Check = lambda x: isinstance(x, list) and len(x) == 2
_is_constant: _Check = lambda x: _is_pair(x) and _is_text(x[0]) and _is_dim(x[1])
# What entries of a file must be. Files of earlier versions lack the new ones.
_ROW: dict[str, _Check] = {
    "path": _is_text,
    "shape": _list_of(_is_int),
    "dtype": _is_text,
    "spec": _list_of(_is_axes),
    "reason": _is_text,
    "role": lambda x: x in get_args(Role),
}
_NEW_IN_ROWS: dict[str, _Check] = {"kind": lambda x: x in get_args(Kind), "together": _is_text}
_COMPUTE: dict[str, _Check] = {
    "dims": _list_of(_is_dim),
    "batch_axes": _is_names,
    "model_axes": _is_names,
    "sequence": lambda x: isinstance(x, bool),
}
_NEW_IN_COMPUTE: dict[str, _Check] = {
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
    path = Path(path).expanduser()
    text = json.dumps(_document(plan), indent=1) + "\n"
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
        os.replace(unfinished, path)
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
    _check_sizes(path, document["mesh"], dict(mesh.shape))
    of_model = lambda model: [Row(x, P(), OVERRIDE, "parameter") for x in flat_leaves(model) if x]
    blank = plan_rows(tree, of_model)
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


def _document(plan: Plan) -> dict[str, Any]:
    from .report._report_json import array_to_json, program_to_json

    arrays = map(array_to_json, plan.report.arrays)
    return {
        "format": FORMAT,
        "mesh": dict(plan.report.mesh),
        "rows": [{key: row[key] for key in (*_ROW, *_NEW_IN_ROWS)} for row in arrays],
        "compute": asdict(plan.compute),
        "report": program_to_json(plan.report.program_or_none),
    }


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
        or {name for row in document["rows"] for name in _wrong_in_row(row)}
        or _wrong_among(document["compute"], _COMPUTE, _NEW_IN_COMPUTE)
        | (document["compute"].keys() - {*_COMPUTE, *_NEW_IN_COMPUTE})
        or (set() if sizes() else {"mesh"})
    )


def _wrong_in_row(row: Any) -> set[str]:
    return _wrong_among(row, _ROW, _NEW_IN_ROWS) if isinstance(row, dict) else {"rows"}


def _wrong_among(
    found: dict[str, Any], needed: dict[str, _Check], new: dict[str, _Check]
) -> set[str]:
    given = (needed | new).keys() & found.keys()
    return needed.keys() - found.keys() | {x for x in given if not (needed | new)[x](found[x])}


def _check_sizes(path: Path, planned: dict[str, int], given: dict[str, int]) -> None:
    if planned != given:
        draw = lambda sizes: ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        raise ValueError(
            f"The plan in {path} is for a mesh of {draw(planned)}, but the given mesh has "
            f"{draw(given)}. Use rc.make_mesh({draw(planned)}), or plan again."
        )


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
    if not parts:
        a, b = next(pair for pair in zip(planned, given, strict=False) if pair[0] != pair[1])
        parts = [f"the paths are in another order, {b!r} in the place of {a!r}"]
    return ", and ".join(parts)


def _spec(path: Path, row: dict[str, Any], axes: dict[str, int]) -> P:
    """The spec of a row. Raises if it does not fit, because the file may have been edited."""
    entries = [tuple(entry) if isinstance(entry, list) else entry for entry in row["spec"]]
    if not _fits(entries, row["shape"], axes):
        raise ValueError(
            f"In {path} the spec {row['spec']} of {row['path'] or 'the array'} does not fit its "
            f"shape {row['shape']} on the mesh {axes}."
        )
    return P(*entries)


def _fits(entries: Sequence[Any], shape: Sequence[int], axes: dict[str, int]) -> bool:
    used = [axis for entry in entries for axis in spec_axes(entry)]
    if len(entries) > len(shape) or len(used) > len(set(used)) or not set(used) <= set(axes):
        return False
    parts = [spec_parts(P(entry), axes) for entry in entries]
    return all(size % count == 0 for size, count in zip(shape, parts, strict=False))
