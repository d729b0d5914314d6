"""Saves plans as JSON and loads them."""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import filterfalse
from operator import attrgetter, mod
from os import PathLike
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from ..core._durable_files import sync
from ..core._errors import check_kind, local_path, several
from ..core._frames import hide_frames
from ..core._read_json import read_json
from ._plan import Plan, make_plan
from ._plan_arguments import mesh_or_ambient
from .report._data import ProgramReport
from .report._text import mesh_text
from .tree._leaf_plans import OVERRIDE, Compute, LeafPlan, Reason, Role
from .tree._leaves import Leaf, flat_leaves
from .tree._overrides import axes_of_spec, spec_parts
from .tree._state_plans import model_of, plan_leaves

# Of the file. It changes with the fields of what a file has, and other formats are refused.
FORMAT = 2
Entry = str | tuple[str, ...] | None  # of a spec


@dataclass(frozen=True)
class _SavedArray:
    """What a file has of one array."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: tuple[Entry, ...]
    reason: Reason
    role: Role


@dataclass(frozen=True)
class _SavedPlan:
    """What a file has of a plan. Without a function, a plan has no report of a program."""

    format: int
    mesh: dict[str, int]
    rows: tuple[_SavedArray, ...]
    compute: Compute
    report: ProgramReport | None


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
    path = local_path("path", path)
    # What is derived from these, such as bytes and totals, is computed again.
    rows: list[_SavedArray] = []
    for array in plan.report.arrays:
        spec = tuple(array.spec)
        rows.append(
            _SavedArray(array.path, array.shape, array.dtype, spec, array.reason, array.role)
        )
    mesh, program = dict(plan.report.mesh), plan.report.program_or_none
    document = asdict(_SavedPlan(FORMAT, mesh, tuple(rows), plan.compute, program))
    text = json.dumps(document, indent=1) + "\n"
    if path.exists():
        if path.is_file() and path.read_text("utf-8", errors="replace") == text:
            return
        raise ValueError(
            f"{path} already exists and is not this plan. Plans are never overwritten: choose "
            "another path, or remove it first."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written beside the file and moved, so that no reader sees a part of it.
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
    path = local_path("path", path)
    saved = _read(path)
    mesh = mesh_or_ambient(mesh)
    if saved.mesh != dict(mesh.shape):
        planned, current = mesh_text(saved.mesh), mesh_text(mesh.shape)
        raise ValueError(
            f"The plan in {path} is for a mesh of {planned}, but the given mesh has {current}. "
            f"Use rc.make_mesh({planned}), or plan again."
        )
    leaves = flat_leaves(model_of(tree))
    # The paths, roles and indices of the arrays, with specs that are read from the file below.
    replicated = [LeafPlan(leaf, P(), OVERRIDE, "parameter") for leaf in leaves]
    unsharded = plan_leaves(tree, replicated, {})
    _check_leaves(path, saved.rows, list(map(attrgetter("leaf"), unsharded)))
    plans: list[LeafPlan] = []
    for plan, row in zip(unsharded, saved.rows, strict=True):
        spec = _read_spec(path, row, saved.mesh)
        plans.append(LeafPlan(plan.leaf, spec, row.reason, row.role))
    return make_plan(tree, mesh, plans, saved.compute, saved.report)


def _read(path: Path) -> _SavedPlan:
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
    # Fields that are missing or unknown would be reported one by one otherwise.
    if version != FORMAT:
        raise ValueError(
            f"{path} is a plan of format {version}, but this version of redcoast reads format "
            f"{FORMAT}. Plan again, and save the new plan."
        )
    try:
        saved = from_json(_SavedPlan, document)
        compute = saved.compute
        # A file may have been edited, and its numbers are used without further checks.
        if min(saved.mesh.values(), default=1) < 1:  # sizes divide dimensions of arrays
            raise WrongEntries("mesh")
        if compute.microbatches is not None and compute.microbatches < 1:
            raise WrongEntries("microbatches")
        recompute = compute.recompute
        if recompute is not None and (recompute.parts < 1 or not recompute.share >= 0):
            raise WrongEntries("recompute")
    except WrongEntries as error:
        raise ValueError(
            f"{path} is not a complete plan: {', '.join(sorted(error.names))} must be present and "
            "of the right type. Plan again, and save the new plan."
        ) from error
    return saved


def _cannot_read(path: Path, error: OSError) -> str:
    return f"Cannot read a plan from {path}: {error.strerror}. Save one with `rc.save_plan`."


def _check_leaves(path: Path, rows: Sequence[_SavedArray], leaves: Sequence[Leaf]) -> None:
    planned = list(map(attrgetter("path"), rows))
    paths = list(map(attrgetter("name"), leaves))
    if planned != paths:
        raise ValueError(f"The plan in {path} is for another tree: {_difference(planned, paths)}.")
    for row, leaf in zip(rows, leaves, strict=True):
        # The estimates of a plan are of its dtypes too, though its specs would fit.
        if (row.shape, row.dtype) != (leaf.shape, str(leaf.dtype)):
            raise ValueError(
                f"The plan in {path} is for another tree: {leaf.name or 'the array'} was planned "
                f"with shape {row.shape} and dtype {row.dtype}, but has {leaf.shape} and "
                f"{leaf.dtype}. "
                "Plan again."
            )


def _difference(planned: Sequence[str], paths: Sequence[str]) -> str:
    """What differs between the paths of a plan and those of a tree."""
    only_planned = filterfalse(set(paths).__contains__, planned)
    only_in_tree = filterfalse(set(planned).__contains__, paths)
    missing = several(list(map(repr, only_planned)), 3)
    unplanned = several(list(map(repr, only_in_tree)), 3)
    differences: list[str] = []
    if missing:
        differences.append(f"the tree lacks {missing}")
    if unplanned:
        differences.append(f"the plan does not have {unplanned}")
    return ", and ".join(differences) or "the paths are in another order, or come several times"


def _read_spec(path: Path, row: _SavedArray, axes: Mapping[str, int]) -> P:
    """The spec of a row. Raises if it does not fit, because the file may have been edited."""
    used = axes_of_spec(row.spec)
    # No more entries than dimensions, each axis once, and no other axes than the mesh has.
    fits = len(row.spec) <= len(row.shape) and len(used) == len(set(used)) and set(used) <= {*axes}
    if fits:
        parts = [spec_parts([entry], axes) for entry in row.spec]
        # Dimensions without an entry are not sharded.
        fits = not any(map(mod, row.shape, parts))
    if not fits:
        raise ValueError(
            f"In {path} the spec {row.spec} of {row.path or 'the array'} does not fit "
            f"its shape {list(row.shape)} on the mesh {axes}."
        )
    return P(*row.spec)


T = TypeVar("T")


class WrongEntries(ValueError):
    """Raised if entries are missing, unknown, or of another type; `names` are those of fields."""

    def __init__(self, *names: str):
        super().__init__(", ".join(map(repr, sorted(names))))
        self.names = frozenset(names)


def from_json(kind: type[T], entries: object) -> T:
    """A dataclass from a JSON object; fields with a default may be missing.

    Lists become tuples, and objects become dataclasses, where the type of a field says so. Raises
    `WrongEntries` with the names of the fields that are wrong, and of entries that are no fields.
    """
    if not isinstance(entries, dict):
        raise WrongEntries
    types = get_type_hints(kind)
    wrong = set(entries.keys() - types.keys())
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):  # pyright: ignore[reportArgumentType]
        if field.name in entries:
            try:
                values[field.name] = _read_value(types[field.name], entries[field.name])
            except WrongEntries as error:
                wrong |= error.names or {field.name}
        elif field.default is field.default_factory is dataclasses.MISSING:
            wrong.add(field.name)
    if wrong:
        raise WrongEntries(*wrong)
    return kind(**values)


def _read_value(kind: Any, value: object) -> object:
    """A value as a type. Raises `WrongEntries` if it is of another type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        return from_json(kind, value)  # pyright: ignore[reportArgumentType]
    if kind is Any:
        return value
    if origin in (Union, UnionType):
        return _read_one_of(arguments, value)
    if origin is Literal and value in arguments:
        return value
    if origin is tuple and isinstance(value, list):
        types = arguments
        if arguments[-1] is Ellipsis:
            types = arguments[:1] * len(value)
        if len(types) == len(value):
            items = []
            for of, item in zip(types, value, strict=True):
                items.append(_read_value(of, item))
            return tuple(items)
    if origin in (dict, Mapping) and isinstance(value, dict):  # keys of JSON are text
        entries = {}
        for key, item in value.items():
            entries[key] = _read_value(arguments[1], item)
        return entries
    # A bool is not an integer here, and a whole number may be a float.
    if type(value) is kind or (kind is float and type(value) is int):
        return value
    raise WrongEntries


def _read_one_of(kinds: tuple[Any, ...], value: object) -> object:
    if value is None and type(None) in kinds:
        return None
    wrong: set[str] = set()
    for kind in kinds:
        try:
            return _read_value(kind, value)
        except WrongEntries as error:
            wrong |= error.names
    raise WrongEntries(*wrong)
