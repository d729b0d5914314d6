"""Plans in files of JSON."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any

from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from ..core._errors import check_kind
from ..core._json import read_json
from ._plan import Plan, check_mesh, make_plan
from .constrain._compute import Compute
from .tree._leaves import Leaf, flat_leaves
from .tree._overrides import spec_axes
from .tree._rows import Row, plan_rows

FORMAT = 1
_OF_ROWS = ("mesh", "rows", "totals", "replicated")  # of a report; all but the mesh are made anew
_ROW = ("path", "shape", "dtype", "spec", "reason", "role")


def save_plan(plan: Plan, path: str | PathLike[str]) -> None:
    """Saves a plan as a file of JSON.

    It holds the mesh's sizes; for each array its path, shape, dtype, spec, reason and role; how
    the program computes with them; and the figures of the plan's report. The file appears whole
    or not at all.

    **Arguments:**

    - `plan`: A plan of [`redcoast.plan_shardings`][].
    - `path`: The file; directories above it are made.

    **Raises:**

    `ValueError` if there is something else at `path`: a plan is not overwritten by another.

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
            f"{path} exists already and is not this plan, and a plan is never overwritten. Choose "
            "another path, or remove it first."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        unfinished.write_text(text, "utf-8")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def load_plan(
    path: str | PathLike[str], tree: PyTree[Any], mesh: Mesh | AbstractMesh | None = None
) -> Plan:
    """Reads a plan that [`redcoast.save_plan`][] wrote, for the same tree and as large a mesh.

    **Arguments:**

    - `path`: The file.
    - `tree`: A tree with the paths, shapes and dtypes of the one planned. Its arrays may be
        abstract.
    - `mesh`: A mesh with the sizes of the one planned for. By default, the ambient one.

    **Returns:**

    A plan equal to the one saved.

    **Raises:**

    `ValueError` if there is no such file, if it holds no plan or one of another format, or if the
    tree's paths, shapes or dtypes, or the mesh's sizes, are others.

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
    mesh = check_mesh(mesh)
    _check_sizes(path, document["mesh"], dict(mesh.shape))
    blank = plan_rows(tree, lambda model: [Row(x, P(), "", "") for x in flat_leaves(model) if x])
    leaves = [row.leaf for row in blank]
    _check_leaves(path, document["rows"], leaves)
    rows = [
        Row(leaf, _spec(path, row, document["mesh"]), row["reason"], row["role"])
        for leaf, row in zip(leaves, document["rows"], strict=True)
    ]
    found: dict[str, Any] = {k: _tuples(v) for k, v in document["compute"].items()}
    return make_plan(tree, mesh, rows, Compute(**found), document["report"])


def _tuples(x: Any) -> Any:
    return tuple(map(_tuples, x)) if isinstance(x, list) else x


def _document(plan: Plan) -> dict[str, Any]:
    report = plan.report
    return {
        "format": FORMAT,
        "mesh": report["mesh"],
        "rows": [{key: row[key] for key in _ROW} for row in report["rows"]],
        "compute": asdict(plan.compute),
        "report": {key: value for key, value in report.items() if key not in _OF_ROWS},
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        document = read_json(path)
    except OSError as error:
        raise ValueError(
            f"There is no plan to be read at {path}: {error.strerror}. `rc.save_plan` writes one."
        ) from error
    except ValueError as error:
        raise ValueError(
            f"{path} holds no plan, for it is no JSON: {error.__cause__}."
            if error.__cause__
            else f"{path} holds no plan: it is JSON of something else. {error}"
        ) from error
    version = document.get("format")
    if not isinstance(version, int):
        raise ValueError(f"{path} holds no plan: it is JSON of something else.")
    if version != FORMAT:
        raise ValueError(
            f"{path} holds a plan of format {version}, and this version of redcoast reads format "
            f"{FORMAT}. Plan again, and save that."
        )
    kinds = {"mesh": dict, "rows": list, "compute": dict, "report": dict}
    odd = {name for name, kind in kinds.items() if not isinstance(document.get(name), kind)}
    odd = odd or {name for row in document["rows"] for name in _odd(row)}
    odd = odd or _odd_compute(document["compute"])
    if odd or not all(type(size) is int and size > 0 for size in document["mesh"].values()):
        odd = odd or {"mesh"}
        raise ValueError(
            f"{path} holds no whole plan: it lacks {', '.join(sorted(odd))}, or has something else "
            "in their place."
        )
    return document


def _odd(row: Any) -> list[str]:
    """What a row lacks, or has something else in the place of."""
    if not isinstance(row, dict):
        return ["rows"]
    sizes = lambda x: isinstance(x, list) and all(type(size) is int for size in x)
    axes = lambda x: x is None or isinstance(x, str) or _is_names(x)
    kinds = {"shape": sizes, "spec": lambda x: isinstance(x, list) and all(map(axes, x))}
    is_text = lambda x: isinstance(x, str)
    return [key for key in _ROW if key not in row or not kinds.get(key, is_text)(row[key])]


def _odd_compute(compute: dict[str, Any]) -> set[str]:
    dims = compute.get("dims")
    right = {
        "dims": isinstance(dims, list) and all(x is None or type(x) is int for x in dims),
        "batch_axes": _is_names(compute.get("batch_axes")),
        "model_axes": _is_names(compute.get("model_axes")),
        "sequence": isinstance(compute.get("sequence"), bool),
        # Plans of before there were any have none.
        "constants": _are_constants(compute.get("constants", [])),
    }
    return {name for name in right | compute if not right.get(name)}


def _are_constants(x: Any) -> bool:
    def is_one(y: Any) -> bool:
        named = isinstance(y, list) and len(y) == 2 and isinstance(y[0], str)
        return named and (y[1] is None or type(y[1]) is int)

    return isinstance(x, list) and all(map(is_one, x))


def _is_names(x: Any) -> bool:
    return isinstance(x, list) and all(isinstance(name, str) for name in x)


def _check_sizes(path: Path, planned: dict[str, int], given: dict[str, int]) -> None:
    if planned != given:
        draw = lambda sizes: ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        raise ValueError(
            f"The plan in {path} is for a mesh of {draw(planned)}, and the mesh given has "
            f"{draw(given)}. Use rc.make_mesh({draw(planned)}), or plan again."
        )


def _check_leaves(path: Path, rows: Sequence[dict[str, Any]], leaves: Sequence[Leaf]) -> None:
    planned, given = [row["path"] for row in rows], [leaf.name for leaf in leaves]
    if planned != given:
        raise ValueError(f"The plan in {path} is of another tree: {_difference(planned, given)}.")
    for row, leaf in zip(rows, leaves, strict=True):
        before = (tuple(row["shape"]), row["dtype"])
        now = (leaf.shape, str(leaf.dtype))
        if before != now:
            raise ValueError(
                f"The plan in {path} is of another tree: {leaf.name or 'the array'} was planned "
                f"with shape {before[0]} and dtype {before[1]}, and has {now[0]} and {now[1]}. "
                "Plan again."
            )


def _difference(planned: Sequence[str], given: Sequence[str]) -> str:
    lacking = [name for name in planned if name not in set(given)]
    new = [name for name in given if name not in set(planned)]
    parts = [f"the tree lacks {_few(lacking)}"] if lacking else []
    parts += [f"the plan does not have {_few(new)}"] if new else []
    if not parts:
        a, b = next(pair for pair in zip(planned, given, strict=False) if pair[0] != pair[1])
        parts = [f"the same paths come in another order, {b!r} in the place of {a!r}"]
    return ", and ".join(parts)


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(repr(name) for name in names[:3]) + more


def _spec(path: Path, row: dict[str, Any], axes: dict[str, int]) -> P:
    """The spec of a row, if it fits: somebody may have edited the file."""
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
    parts = [prod(axes[axis] for axis in spec_axes(entry)) for entry in entries]
    return all(size % count == 0 for size, count in zip(shape, parts, strict=False))
