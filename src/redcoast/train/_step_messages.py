"""Errors of compiled steps: what does not match, at which path, and what would work."""

from collections.abc import Callable

import jax
from jax.extend.core import JaxprEqn
from jax.sharding import Mesh, NamedSharding
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from ..core._control_flow import AnyJaxpr, Manual, control_flow
from ..core._donation import is_concrete, refuse_deleted
from ..core._errors import listed, several
from ..core._jaxpr import iter_equations
from ..core._pytree import ARRAYS, NUMBERS, Static, show_path
from ..distributed._mesh import batch_shards
from ..sharding.report._text import mesh_text


def path_name(path: KeyPath) -> str:
    return show_path(path, "the root")


def refuse_donated(state: PyTree, args: tuple[PyTree, ...]) -> None:
    """Raises an error that names the arrays that were donated to an earlier step."""
    refuse_deleted(
        state,
        "The state that the step was called with",
        "Call it with the state that the last step returned: `state, aux = step(state, ...)`.",
    )
    for i, arg in enumerate(args):
        refuse_deleted(
            arg,
            f"Argument {i + 1} of the step, counted after the state,",
            "Before passing a state to a step, copy the parts that are used later: "
            "`jax.tree.map(lambda x: jnp.copy(x) if eqx.is_array(x) else x, state.model)`.",
        )


_OR_A_PREFIX = (
    "Pass the result of `infer_shardings(state, mesh)`, or a prefix of the state: a sharding in "
    "place of a subtree applies to all of its arrays, and `NamedSharding(mesh, PartitionSpec())` "
    "replicates them."
)


def refuse_elsewhere(args: tuple[PyTree, ...], mesh: Mesh) -> None:
    """Raises an error that names an array on other devices than those of the mesh."""
    devices = set(mesh.devices.flat)
    for i, arg in enumerate(args):
        for path, x in jax.tree_util.tree_leaves_with_path(arg):
            if not is_concrete(x) or not x.committed or x.sharding.device_set == devices:
                continue
            place = listed(sorted(device.id for device in x.sharding.device_set))
            raise ValueError(
                f"Argument {i + 1} of the step, counted after the state, has an array at "
                f"{path_name(path)} on the devices {place}, and the step is compiled for "
                f"{listed([device.id for device in mesh.devices.flat])}. Move it, "
                "`jax.device_put(x, redcoast.batch_shardings(x, mesh))`, or pass an array of NumPy."
            )


def match_shardings(
    shardings: dict[KeyPath, NamedSharding],
    state: PyTree,
    *,
    name: str = "state_shardings",
    advice: str = _OR_A_PREFIX,
) -> list[NamedSharding]:
    """Returns the sharding of each array of the state, from its path or a prefix of it.

    `name` is the argument that has the shardings, and `advice` says what to pass if they do not
    match the state.
    """
    # Places without arrays count as known: a sharding there is for nothing, but no mistake.
    is_end = lambda x: x is None or not jax.tree.leaves(x)
    matched: list[tuple[str, PyTree, NamedSharding]] = []
    missing: list[str] = []
    known = {()}  # the root is a prefix of every path, and there if the state is empty
    for path, x in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_end):
        # The longest one first: a sharding of an array counts more than one of a subtree.
        prefixes = [path[:length] for length in range(len(path), -1, -1)]
        known.update(prefixes)
        if not isinstance(x, ARRAYS):
            continue
        sharding = next((shardings[prefix] for prefix in prefixes if prefix in shardings), None)
        if sharding is None:
            missing.append(path_name(path))
        else:
            matched.append((path_name(path), x, sharding))
    unexpected = [path_name(path) for path in shardings if path not in known]
    if missing or unexpected:
        raise ValueError(_no_match(name, missing, unexpected, advice))
    for where, x, sharding in matched:
        try:
            # The first finds more entries than dimensions, the second sizes that do not divide.
            sharding.check_compatible_aval(x.shape)
            sharding.shard_shape(x.shape)
        except ValueError as error:
            raise ValueError(
                f"The array at {where}, of shape {x.shape}, cannot be sharded as "
                f"{sharding.spec} over {dict(sharding.mesh.shape)}, as `{name}` specifies."
                " Each entry is for one dimension, and the sizes of its axes must divide it."
            ) from error
    return [sharding for _, _, sharding in matched]


def _no_match(name: str, missing: list[str], unexpected: list[str], advice: str) -> str:
    text = f"`{name}` does not match the state. "
    if missing:
        text += f"It has no sharding for {several(missing)}. "
    if unexpected:
        text += f"The state has nothing at {several(unexpected)}. "
    return text + advice


def check_hashable(static: Static, tree: Callable[[], PyTree]) -> None:
    """Raises an error for unhashable leaves that are not arrays: they are static arguments."""
    try:
        hash(static)
    except TypeError:
        for path, x in jax.tree_util.tree_leaves_with_path(tree()):
            # Arrays are not hashable, and are no constants.
            if isinstance(x, NUMBERS):
                continue
            try:
                hash(x)
            except TypeError as error:
                raise TypeError(
                    f"The step was called with a {type(x).__name__} at {path_name(path)}, which is "
                    "neither an array nor hashable, so the step cannot be compiled for it. Pass "
                    "arrays, numbers, strings or functions, or close over it."
                ) from error
        raise


def state_and_aux(out: PyTree, static: Static) -> tuple[PyTree, PyTree]:
    rest = "It must return `(state, aux)`, where aux is any PyTree, such as `{}`."
    # A state may be a pair itself, which would be taken for a state and its aux.
    if jax.tree.structure(out) == static.structure:
        raise ValueError(f"The step returned only the state. {rest}")
    if not isinstance(out, tuple | list):
        kind = "None"
        if out is not None:
            kind = f"a {type(out).__name__}"
        raise ValueError(f"The step returned {kind}. {rest}")
    if len(out) != 2:
        raise ValueError(f"The step returned a {type(out).__name__} of length {len(out)}. {rest}")
    return out[0], out[1]


def first_difference(argument: PyTree, returned: PyTree) -> str:
    """Describes the first difference between two trees, ignoring the values of arrays."""
    # The values of arrays may change. All else is part of the compiled program, and may not.

    def show(x: object) -> str:
        if isinstance(x, ARRAYS):
            return "an array"
        return repr(x)

    before = jax.tree_util.tree_leaves_with_path(argument)
    after = jax.tree_util.tree_leaves_with_path(returned)
    for (path, x), (other, y) in zip(before, after, strict=False):
        if path != other or show(x) != show(y):
            return (
                f"It was given {show(x)} at {path_name(path)} and returned {show(y)} at "
                f"{path_name(other)}. Values that change from step to step must be JAX arrays."
            )
    # The shorter one is the beginning of the longer one.
    longer = before[len(after) :] + after[len(before) :]
    changed = ", ".join(sorted(path_name(path) for path, _ in longer))
    counts = f"It was given {len(before)} leaves and returned {len(after)}."
    return f"{counts} Only one of them has {changed}."


def refuse_wrong_gradients(jaxpr: AnyJaxpr, mesh: Mesh) -> None:
    """Raises if the jaxpr has a convolution that XLA partitions wrongly on this mesh.

    `sharding/constrain/_split_conv.py` describes the defect. Inside `jax.shard_map` XLA
    partitions nothing.
    """
    # The defect needs both kinds of axes.
    if mesh.shape["model"] == 1 or batch_shards(mesh) == 1:
        return
    for equation in iter_equations(jaxpr, skip=_is_manual):
        groups = equation.params.get("batch_group_count", 1)
        if equation.primitive.name == "conv_general_dilated" and groups > 1:
            raise ValueError(
                f"The gradient of a convolution in {groups} groups would be wrong on a mesh of "
                f"{mesh_text(mesh.shape)}, because of a defect of the XLA compiler if `model` is "
                "used together with `data` or `fsdp`. Constrain the loss: "
                "`plan.constrain(loss_fn)` of a plan from `rc.plan_shardings` avoids the defect. "
                "Or use a mesh with model=1."
            )


def _is_manual(equation: JaxprEqn) -> bool:
    return isinstance(control_flow(equation), Manual)
