"""From a tree and a mesh to shardings."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import PyTree

from .overrides import Override
from .report import make_report
from .rows import plan_rows
from .table import draw_table

_AXES = ("data", "fsdp", "model")


@dataclass(frozen=True)
class Plan:
    """How a tree of arrays is laid out over a mesh, and why.

    `str(plan)` is a table of it.

    **Attributes:**

    - `shardings`: A tree like the one planned, with a `NamedSharding` for each array and `None` for
        each leaf that is no array.
    - `mesh`: The mesh.
    - `report`: The table's figures as plain data that `json.dumps` takes. `rows` has, for each
        array, its `path`, `shape`, `dtype`, `spec`, `reason`, `role` ("parameter", "optimizer
        state" or "other"), `parts` (how many devices share it), `bytes` and `bytes_per_device`.
        `totals` has the bytes of "all" and of each role; `replicated` the arrays that are whole
        on every device, with their reasons; `mesh` the size of each axis.
    """

    shardings: PyTree[Any] = field(repr=False)
    mesh: Mesh | AbstractMesh
    report: dict[str, Any] = field(repr=False)

    def __str__(self) -> str:
        return draw_table(self.report)


def infer_shardings(
    tree: PyTree[Any],
    mesh: Mesh | AbstractMesh | None = None,
    *,
    overrides: Sequence[Override] = (),
) -> PyTree[Any]:
    """Finds how to split the arrays of a tree over a mesh, from the structure of the tree.

    The rules are those of RedCoast (arXiv:2310.16355, section 3.1): consecutive matrices are split
    on alternate sides, and attention on the output of its query, key and value and on the input
    of its output matrix. [`redcoast.plan_shardings`][] gives the reason for each array as well.

    **Arguments:**

    - `tree`: Any PyTree: an Equinox module, nested dicts and lists, a [`redcoast.TrainState`][].
        Arrays may be abstract (`jax.ShapeDtypeStruct`).
    - `mesh`: A mesh with the axes `"data"`, `"fsdp"` and `"model"`. By default, the ambient one
        (`jax.set_mesh`).
    - `overrides`: Ordered pairs of a pattern and a spec. The pattern is a regular expression that
        is searched in the paths of arrays, such as `layers/0/attention/wq`; the first that matches
        decides. The spec is a `PartitionSpec`, a tuple or `None` (whole), and is taken as it is. In
        a `TrainState`, paths are those inside the model, and the optimizer's state follows.

    **Returns:**

    A tree of the same structure with a `NamedSharding` for each array and `None` for each leaf
    that is no array.

    **Raises:**

    `ValueError` if there is no mesh or it lacks an axis; and if an override matches nothing, is no
    regular expression, names an unknown axis, uses an axis twice, has more entries than the array
    has dimensions, or does not divide.

    !!! example

        ```python
        import equinox as eqx
        import jax
        import redcoast as rc

        model = eqx.nn.MLP(32, 10, 64, depth=2, key=jax.random.key(0))
        shardings = rc.infer_shardings(model, rc.make_mesh())
        ```
    """
    return plan_shardings(tree, mesh, overrides=overrides).shardings


def plan_shardings(
    tree: PyTree[Any],
    mesh: Mesh | AbstractMesh | None = None,
    *,
    overrides: Sequence[Override] = (),
) -> Plan:
    """Plans how to split the arrays of a tree over a mesh, with the reason for each.

    Over `model`, attention is split on heads, consecutive matrices on alternate sides, and
    embeddings and language-model heads on the vocabulary (arXiv:2310.16355, section 3.1;
    arXiv:1909.08053, section 3). Over `fsdp`, every large array is stored split along its largest
    remaining dimension. Nothing is split along a dimension that does not divide, that counts
    stacked layers, or that is the window of a convolution. An optimizer's state follows its
    parameters.

    **Arguments:**

    - `tree`, `mesh`, `overrides`: As for [`redcoast.infer_shardings`][].

    **Returns:**

    A [`redcoast.Plan`][]; `print` it to see a table.

    **Raises:**

    `ValueError`, as [`redcoast.infer_shardings`][] does.

    !!! example

        ```python
        import equinox as eqx
        import jax
        import redcoast as rc

        model = eqx.nn.MLP(32, 10, 64, depth=2, key=jax.random.key(0))
        plan = rc.plan_shardings(model, rc.make_mesh())
        print(plan)
        ```
    """
    mesh = _check_mesh(mesh)
    rows = plan_rows(tree, dict(mesh.shape), overrides)
    leaves, treedef = jax.tree.flatten(tree)
    shardings: list[NamedSharding | None] = [None] * len(leaves)
    for row in rows:
        shardings[row.leaf.index] = NamedSharding(mesh, row.spec)
    report = make_report(rows, dict(mesh.shape))
    return Plan(jax.tree.unflatten(treedef, shardings), mesh, report)


def _check_mesh(mesh: Mesh | AbstractMesh | None) -> Mesh | AbstractMesh:
    mesh = jax.sharding.get_mesh() if mesh is None else mesh
    if mesh is None or mesh.empty:
        raise ValueError(
            "There is no mesh: pass mesh=rc.make_mesh(), or make one the ambient mesh with "
            "jax.set_mesh(rc.make_mesh())."
        )
    missing = [axis for axis in _AXES if axis not in mesh.axis_names]
    if missing:
        raise ValueError(
            f"The mesh has the axes {tuple(mesh.axis_names)} and lacks {', '.join(missing)}; one "
            "from rc.make_mesh() always has 'data', 'fsdp' and 'model', of size 1 where not used."
        )
    return mesh
