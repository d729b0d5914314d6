"""Saves plans as JSON and loads them."""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from os import PathLike
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from ..core._durable_files import sync
from ..core._errors import check_kind, local_path, several
from ..core._frames import hide_frames
from ..core._read_json import read_json
from ._plan import Plan, make_plan, mesh_or_ambient
from .report._data import ProgramReport
from .tree._leaf_plans import (
    OVERRIDE,
    Compute,
    Kind,
    LeafPlan,
    Recompute,
    Role,
    model_of,
    plan_leaves,
)
from .tree._leaves import Leaf, flat_leaves
from .tree._overrides import axes_of_spec, spec_parts

FORMAT = 1
Json = dict[str, Any]
# The types of the entries of a file, in which a tuple is a list. Files of earlier versions lack
# the new ones.
_NEW = ("kind", "together", "constants", "tokens", "microbatches", "split", "recompute")
_ARRAY = {
    "path": str,
    "shape": list[int],
    "dtype": str,
    "spec": list[str | list[str] | None],
    "reason": str,
    "role": Role,
    "kind": Kind,
    "together": str,
}
_COMPUTE = {
    "dims": list[int | None],
    "batch_axes": list[str],
    "model_axes": list[str],
    "sequence": bool,
    "constants": list[tuple[str, int | None]],
    "tokens": bool,
    "microbatches": int | None,
    "split": list[tuple[list[str], list[tuple[int, int]]]],
    "recompute": dict | None,
}
_RECOMPUTE = {
    "parts": int,
    "price": float,
    "higher": float,
    "blocks": int,
    "trained": list[bool],
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
        "rows": [{key: row[key] for key in _ARRAY} for row in arrays],
        "compute": _compute_to_json(plan.compute),
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


def _compute_to_json(compute: Compute) -> Json:
    """Without what no earlier version has, if the plan does not need it."""
    entries = asdict(compute)
    if not compute.split:
        del entries["split"]
    if compute.recompute is None:
        del entries["recompute"]
    return entries


@hide_frames
def load_plan(
    path: str | PathLike[str], tree: PyTree, mesh: Mesh | AbstractMesh | None = None
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
    if document["mesh"] != dict(mesh.shape):
        planned, current = _axis_sizes(document["mesh"]), _axis_sizes(mesh.shape)
        raise ValueError(
            f"The plan in {path} is for a mesh of {planned}, but the given mesh has {current}. "
            f"Use rc.make_mesh({planned}), or plan again."
        )
    leaves = flat_leaves(model_of(tree))
    # The paths, roles and indices of the arrays, with specs that are read from the file below.
    replicated = [LeafPlan(leaf, P(), OVERRIDE, "parameter") for leaf in leaves]
    unsharded = plan_leaves(tree, replicated)
    _check_leaves(path, document["rows"], [plan.leaf for plan in unsharded])
    compute = _read_compute(document["compute"])
    plans = _read_plans(path, document, unsharded, compute)
    return make_plan(tree, mesh, plans, compute, _read_program(path, document["report"]))


def _read_compute(entries: Json) -> Compute:
    recompute = entries.get("recompute")
    rest = {name: _tuples(value) for name, value in entries.items() if name != "recompute"}
    compute = Compute(**rest)
    if recompute is None:
        return compute
    fields = {name: _tuples(value) for name, value in recompute.items()}
    return replace(compute, recompute=Recompute(**fields))


def _axis_sizes(mesh: Mapping[str, int]) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in mesh.items())


def _read_plans(
    path: Path, document: Json, unsharded: Sequence[LeafPlan], compute: Compute
) -> list[LeafPlan]:
    from .report._report_json import reason_from_json

    dims = iter(compute.dims)
    plans: list[LeafPlan] = []
    for plan, row in zip(unsharded, document["rows"], strict=True):
        # `compute` is about the arrays of the model, which are the parameters of `unsharded`.
        dim = None
        if plan.role == "parameter":
            dim = next(dims, None)
        reason = reason_from_json(row, dim is not None)
        spec = _read_spec(path, row, document["mesh"])
        plans.append(LeafPlan(plan.leaf, spec, reason, row["role"]))
    return plans


def _read_program(path: Path, report: Json) -> ProgramReport | None:
    from .report._report_json import program_from_json

    if not report:  # the plan was made without a function
        return None
    try:
        return program_from_json(report)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a complete plan: the figures of its report cannot be read: {error}. "
            "Plan again, and save the new plan."
        ) from error


def _tuples(x: object) -> Any:
    """Replaces lists, which JSON has, by tuples."""
    if isinstance(x, list):
        return tuple(map(_tuples, x))
    return x


def _read(path: Path) -> Json:
    try:
        document = read_json(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(_cannot_read(path, error)) from error
    except OSError as error:
        raise ValueError(_cannot_read(path, error)) from error
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
    if wrong := _wrong_entries(document):
        raise ValueError(
            f"{path} is not a complete plan: {', '.join(sorted(wrong))} must be present and of the "
            "right type. Plan again, and save the new plan."
        )
    return document


def _cannot_read(path: Path, error: OSError) -> str:
    return f"Cannot read a plan from {path}: {error.strerror}. Save one with `rc.save_plan`."


def _wrong_entries(document: Json) -> set[str]:
    """The names of entries that are missing or have a wrong type."""
    kinds = {"mesh": dict, "rows": list, "compute": dict, "report": dict}
    wrong = {name for name, kind in kinds.items() if not isinstance(document.get(name), kind)}
    if wrong:
        return wrong
    for row in document["rows"]:
        wrong |= _wrong_among(row, _ARRAY)
    if wrong:
        return wrong
    compute = document["compute"]
    wrong = _wrong_among(compute, _COMPUTE) | (compute.keys() - _COMPUTE)
    microbatches = compute.get("microbatches")
    if isinstance(microbatches, int) and microbatches < 1:
        wrong.add("microbatches")
    recompute = compute.get("recompute")
    if recompute is not None and (
        not isinstance(recompute, dict)
        or _wrong_among(recompute, _RECOMPUTE)
        or recompute.keys() - _RECOMPUTE
        or recompute["parts"] < 1
        or recompute["blocks"] < 0
    ):
        wrong.add("recompute")
    # Sizes divide the dimensions of arrays below.
    sizes = list(document["mesh"].values())
    if not wrong and not (_is_of_type(sizes, list[int]) and min(sizes, default=1) > 0):
        return {"mesh"}
    return wrong


def _wrong_among(entries: object, types: Mapping[str, object]) -> set[str]:
    if not isinstance(entries, dict):
        return {"rows"}
    wrong: set[str] = set()
    for name, kind in types.items():
        if name not in entries:
            if name not in _NEW:
                wrong.add(name)
        elif not _is_of_type(entries[name], kind):
            wrong.add(name)
    return wrong


def _is_of_type(value: object, kind: object) -> bool:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return value in arguments
    if origin in (Union, UnionType):
        return any(_is_of_type(value, argument) for argument in arguments)
    if origin is list:
        (of_items,) = arguments
        return isinstance(value, list) and all(_is_of_type(item, of_items) for item in value)
    if origin is tuple:
        if not isinstance(value, list) or len(value) != len(arguments):
            return False
        return all(map(_is_of_type, value, arguments))
    return type(value) is kind  # a bool is not an integer here


def _check_leaves(path: Path, rows: Sequence[Json], leaves: Sequence[Leaf]) -> None:
    planned, paths = [row["path"] for row in rows], [leaf.name for leaf in leaves]
    if planned != paths:
        raise ValueError(f"The plan in {path} is for another tree: {_difference(planned, paths)}.")
    for row, leaf in zip(rows, leaves, strict=True):
        shape, dtype = tuple(row["shape"]), row["dtype"]
        if (shape, dtype) != (leaf.shape, str(leaf.dtype)):
            raise ValueError(
                f"The plan in {path} is for another tree: {leaf.name or 'the array'} was planned "
                f"with shape {shape} and dtype {dtype}, but has {leaf.shape} and {leaf.dtype}. "
                "Plan again."
            )


def _difference(planned: Sequence[str], paths: Sequence[str]) -> str:
    differences: list[str] = []
    lacking = [repr(name) for name in planned if name not in set(paths)]
    if lacking:
        differences.append(f"the tree lacks {several(lacking, 3)}")
    new = [repr(name) for name in paths if name not in set(planned)]
    if new:
        differences.append(f"the plan does not have {several(new, 3)}")
    repeated = [repr(name) for name, count in Counter(planned).items() if count > 1]
    if repeated:
        differences.append(f"the plan has {several(repeated, 3)} several times")
    if differences:
        return ", and ".join(differences)
    for name, other in zip(planned, paths, strict=False):
        if name != other:
            return f"the paths are in another order, {other!r} in the place of {name!r}"
    raise AssertionError("The paths are equal.")


def _read_spec(path: Path, row: Json, axes: dict[str, int]) -> P:
    """The spec of a row. Raises if it does not fit, because the file may have been edited."""
    spec, shape = P(*_tuples(row["spec"])), row["shape"]
    used = axes_of_spec(spec)
    fits = len(spec) <= len(shape) and len(used) == len(set(used)) and set(used) <= set(axes)
    if fits:
        sizes = zip(shape, spec, strict=False)
        fits = all(size % spec_parts([entry], axes) == 0 for size, entry in sizes)
    if not fits:
        raise ValueError(
            f"In {path} the spec {row['spec']} of {row['path'] or 'the array'} does not fit its "
            f"shape {row['shape']} on the mesh {axes}."
        )
    return spec
