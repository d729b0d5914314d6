"""Steps and functions compiled once, with the shardings of their inputs and outputs fixed."""

import copy
import dataclasses
import functools as ft
import itertools as it
import weakref
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.extend.core import JaxprEqn, jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from ..core._axis_types import (
    auto_ambient_mesh,
    auto_array,
    is_explicit,
    on_auto_axes,
    on_mesh,
    with_auto_axes,
)
from ..core._control_flow import AnyJaxpr, Manual, consts_of, control_flow
from ..core._donation import is_concrete, is_deleted, refuse_deleted, separate
from ..core._dtypes import tree_to_jax_dtypes
from ..core._errors import check_functions, several
from ..core._frames import hide_frames
from ..core._jaxpr import iter_equations
from ..core._pytree import ARRAYS, NUMBERS, Static, abstract_array, join, show_path, split
from ..core._tracing import missing_mesh, traced_over
from ..distributed._agreement import agree_on_program
from ..distributed._arrays import abstract_batch, place_array, place_batch, put
from ..distributed._emulation import Overdue, overdue_on
from ..distributed._mesh import batch_shards
from ..tracking._metrics import PackedMetrics


@hide_frames
def compile_step(
    step: Callable[..., tuple[PyTree, PyTree]],
    state_shardings: PyTree,
    *,
    mesh: Mesh | None = None,
) -> "CompiledStep":
    """Compiles a training step for a custom training loop, as [`redcoast.fit`][] does.

    The compiled step returns before the device has finished, so that the next batch can be prepared
    in the meantime; reading a metric waits for the device. The state is donated: its memory is
    reused for the new state, and it can no longer be read. The new state has the given shardings.
    The step is compiled once for each combination of shapes.

    **Arguments:**

    - `step`: a pure function `step(state, *args) -> (state, aux)`, such as
        [`redcoast.train_step`][] with its keyword arguments bound by `functools.partial`.
    - `state_shardings`: a `NamedSharding` for each array of the state, as returned by
        [`redcoast.infer_shardings`][]. It may also be a prefix of the state: a sharding in place of
        a subtree applies to all of its arrays. Bare `PartitionSpec`s refer to `mesh`.
    - `mesh`: the mesh that bare `PartitionSpec`s refer to, in `step` too. The default is the mesh
        of `state_shardings`.

    **Returns:**

    A callable `(state, *args) -> (state, aux)`. NumPy arrays in `args` are copied to the devices,
    with the first dimension sharded over `data` and `fsdp` if it is divisible; JAX arrays keep
    their sharding. If an array is both in `args` and in the state, such as a target network, the
    copy in `args` can still be read after the call. Leaves of `aux` that are neither arrays nor
    numbers keep the values that they had during tracing. Like a jitted function, the callable has a
    method `lower(state, *args)`, which also accepts abstract arguments; abstract arguments without
    a sharding are treated like NumPy arrays.

    **Raises:**

    `TypeError` if a leaf of `state_shardings` is not a sharding. `ValueError` if it has no leaves
    or does not match the state that the step is called with; if an argument was donated to an
    earlier step; or if the step does not return `(state, aux)` with a state of the same structure.

    !!! Example

        ```python
        step = ft.partial(rc.train_step, loss_fn=loss_fn, optimizer=optimizer)
        step = rc.compile_step(step, rc.infer_shardings(state, mesh))
        for batch in batches:
            state, metrics = step(state, batch)
        ```
    """
    check_functions(step=step)
    leaves = jax.tree_util.tree_leaves_with_path(state_shardings)
    for path, x in leaves:
        if not isinstance(x, NamedSharding | P):
            raise TypeError(
                f"`state_shardings` has {x!r} at {_name(path)}, but its leaves must be "
                "`NamedSharding`s, as returned by `infer_shardings(state, mesh)`."
            )
    if not leaves:
        raise ValueError(
            "`state_shardings` has no leaves. Pass the result of `infer_shardings(state, mesh)`."
        )
    meshes = [x.mesh for _, x in leaves if isinstance(x, NamedSharding)]
    if mesh is None and not meshes:
        raise ValueError(
            "All leaves of `state_shardings` are `PartitionSpec`s. Pass the `mesh` they refer to."
        )
    found: Any = meshes[0] if mesh is None else mesh
    if not isinstance(found, Mesh):
        raise TypeError(
            f"The mesh of `state_shardings` is {found}, which has no devices. Plan with a mesh of "
            "devices, as returned by `redcoast.make_mesh`."
        )
    given = {path: NamedSharding(found, x) if isinstance(x, P) else x for path, x in leaves}
    return CompiledStep(step, given, found)


@dataclasses.dataclass(frozen=True)
class _Program:
    """The jitted steps for states of one structure."""

    static: Static
    shardings: list[NamedSharding]  # of the state's arrays, on the mesh with Auto axes
    given: list[NamedSharding]  # on the user's mesh
    outer: Any  # the structure of the state above its frozen modules
    counts: list[int | None]  # of the arrays in each leaf of `outer`; `None` if it is an array
    jitted: dict[Static, Any]  # by the constants of the other arguments


class CompiledStep:
    """The result of [`redcoast.compile_step`][], called like the step itself."""

    def __init__(self, step: Callable[..., Any], shardings: dict[Any, NamedSharding], mesh: Mesh):
        self._shardings = shardings  # by path
        self._given_mesh = mesh
        self._mesh = with_auto_axes(mesh)
        self._step = _flatten_step(step, self._mesh)
        self._programs: dict[Static, _Program] = {}
        self._overdue = overdue_on(mesh)
        # Caches the partition of the last returned state, because partitioning a tree of many
        # modules costs more than a small step. Weak references identify its frozen modules and the
        # arrays outside them. Mutable nodes are flattened again.
        self._last: tuple[list[_Part], _Program] | None = None
        self._constants: Static | None = None  # of the last call
        self._closed_over: dict[Any, list[Any]] = {}  # the arrays of each jitted step's closure

    @hide_frames
    def __call__(self, state: PyTree, /, *args: PyTree) -> tuple[PyTree, PyTree]:
        if not is_explicit(jax.sharding.get_abstract_mesh()):
            return self._call(state, args)
        with auto_ambient_mesh():
            return self._call(state, args)

    def _call(self, state: PyTree, args: tuple[PyTree, ...]) -> tuple[PyTree, PyTree]:
        args = tree_to_jax_dtypes(args, "the arguments after the state")
        given, constants = self._split_arguments(args)
        arrays, program, own = self._split_state(state)
        jitted = program.jitted.get(constants)
        if any(map(is_deleted, arrays)) or any(map(is_deleted, given)):
            _refuse_donated(state, args)
        kept = given
        # The caller may overwrite the batch while the step is still running.
        given = [x.copy() if isinstance(x, np.ndarray) else x for x in given]
        given = [auto_array(place_array(x, self._mesh)) for x in given]
        if is_new := jitted is None or jitted not in self._closed_over:
            jitted, traced = self._traced(program, constants, arrays, given)
            agree_on_program("the program of the step", traced.jaxpr, self._mesh)
            self._closed_over[jitted] = list(consts_of(traced.jaxpr))
        assert jitted is not None
        if is_new or not own:  # arrays that the step closes over stay valid
            kept = [*given, *self._closed_over[jitted]]
        arrays = separate(arrays, kept, distinct=own)
        if not own or self._mesh is not self._given_mesh:
            arrays = list(map(_put, arrays, program.shardings))
        arrays, aux = _called(self._overdue, jitted, arrays, given)
        if self._mesh is not self._given_mesh:
            aux = on_mesh(aux, self._given_mesh)
        state = join(arrays, program.static)
        self._remember(state, arrays, program)
        if isinstance(aux, PackedMetrics):  # it has no constants, and its step may be short
            return state, aux
        is_constant = lambda x: isinstance(x, _Constant)
        return state, jax.tree.map(
            lambda x: x.value if is_constant(x) else x, aux, is_leaf=is_constant
        )

    def fresh(self) -> "CompiledStep":
        """A step for another loop, with the same programs."""
        other = copy.copy(self)
        # The arrays of the other loop may share memory with arrays that the program closes over.
        other._closed_over, other._last, other._constants = {}, None, None
        return other

    def lower(self, state: PyTree, /, *args: PyTree) -> jax.stages.Lowered:
        """Lowers the step, like the method of a jitted function."""
        return self.trace(state, *args).lower()

    def trace(self, state: PyTree, /, *args: PyTree) -> jax.stages.Traced:
        """Traces the step, like the method of a jitted function."""
        args = tree_to_jax_dtypes(args, "the arguments after the state")
        given, constants = self._split_arguments(args)
        arrays, program, _ = self._split_state(state)
        given = abstract_batch(on_auto_axes(given), self._mesh)
        with auto_ambient_mesh():
            return self._traced(program, constants, arrays, given)[1]

    def _split_arguments(self, args: tuple[PyTree, ...]) -> tuple[list[Any], Static]:
        given, constants = split(args, numbers=True)
        last = self._constants
        if last is None or (constants.structure, constants.leaves) != (last.structure, last.leaves):
            _check_hashable(constants, lambda: args)
            self._constants = last = constants
        return given, last

    def _split_state(self, state: PyTree) -> tuple[list[Any], _Program, bool]:
        """Returns the state's arrays, its program, and whether the last call returned them."""
        if self._last is not None:
            parts, program = self._last
            if (arrays := _known_arrays(parts, program.outer, state)) is not None:
                return arrays, program, True
        state = tree_to_jax_dtypes(state, "the state")
        arrays, static = split(state)
        _check_hashable(static, lambda: (state,))
        if static not in self._programs:
            given = _match_shardings(self._shardings, state)
            shardings = on_auto_axes(given)
            is_kept = lambda x: isinstance(x, eqx.Module) and _is_frozen(jax.tree.structure(x))
            parts, outer = jax.tree.flatten(state, is_leaf=is_kept)
            counts = [None if isinstance(x, ARRAYS) else len(split(x)[0]) for x in parts]
            self._programs[static] = _Program(static, shardings, given, outer, counts, {})
        return arrays, self._programs[static], False

    def _traced(
        self, program: _Program, constants: Static, arrays: list[Any], given: list[Any]
    ) -> tuple[Any, jax.stages.Traced]:
        """The jitted step for the constants, and its program for the arrays."""

        def trace(jitted: Any) -> tuple[Any, jax.stages.Traced]:
            traced = jitted.trace(list(map(abstract_array, arrays, program.shardings)), given)
            refuse_wrong_gradients(traced.jaxpr, self._mesh)
            program.jitted[constants] = jitted
            return jitted, traced

        if constants in program.jitted:
            return trace(program.jitted[constants])
        # As in `trace_for`.
        with missing_mesh():
            return trace(self._jit(program, constants, ambient=False))
        return trace(self._jit(program, constants, ambient=True))

    def _jit(self, program: _Program, constants: Static, *, ambient: bool) -> Any:
        step = self._step
        # Static arguments of a jitted function would be hashed and compared at each call.
        return jax.jit(
            lambda arrays, given: step(arrays, program.static, given, constants, ambient),
            in_shardings=(program.shardings, None),
            out_shardings=(program.given, None),
            donate_argnums=0,
        )

    def _remember(self, state: PyTree, arrays: list[Any], program: _Program) -> None:
        rest = iter(arrays)
        parts: list[_Part] = []
        forget = lambda _: parts.clear()
        for x, count in zip(program.outer.flatten_up_to(state), program.counts, strict=True):
            if count is None:
                parts.append((weakref.ref(next(rest)), None))
            elif isinstance(x, eqx.Module):
                parts.append((weakref.ref(x, forget), list(it.islice(rest, count))))
            else:
                parts.append((lambda x=x: x, []))
        self._last = (parts, program)


# A reference to a module, an array or a constant of the last returned state, and its arrays: the
# arrays of a module until it is deleted. An array itself is not stored, since that would keep it
# alive.
_Part = tuple[Callable[[], Any], list[Any] | None]


def _known_arrays(parts: list[_Part], outer: Any, state: PyTree) -> list[Any] | None:
    """Returns the arrays of a state if it consists of the parts that the last call returned."""
    try:
        found = outer.flatten_up_to(state)
    except ValueError:  # it has another structure
        return None
    if len(found) != len(parts):  # a part was deleted
        return None
    arrays: list[Any] = []
    for x, (reference, held) in zip(found, parts, strict=True):
        if reference() is not x:
            return None
        arrays.extend([x] if held is None else held)
    return arrays


def _flatten_arguments(fn: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """Converts `fn(tree, *args)` to a function of the partitions that `split` returns."""

    def call(
        arrays: list[Any], static: Static, given: list[Any], constants: Static, ambient: bool
    ) -> Any:
        with traced_over(mesh, ambient=ambient):
            return fn(join(arrays, static), *join(given, constants))

    return call


def _flatten_step(step: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    call = _flatten_arguments(step, mesh)

    def flat_step(arrays: list[Any], static: Static, *rest: Any) -> tuple[list[Any], PyTree]:
        new_state, aux = _state_and_aux(call(arrays, static, *rest), static)
        new_arrays, new = split(new_state)
        if (new.structure, new.leaves) != (static.structure, static.leaves):
            raise ValueError(
                "The step must return a state of the same structure as its argument. "
                + _first_difference(join(arrays, static), new_state)
            )
        wrap = lambda x: x if isinstance(x, NUMBERS) else _Constant(x)
        return new_arrays, jax.tree.map(wrap, aux)

    return flat_step


def _state_and_aux(out: Any, static: Static) -> tuple[PyTree, PyTree]:
    rest = "It must return `(state, aux)`, where aux is any PyTree, such as `{}`."
    if jax.tree.structure(out) == static.structure:
        raise ValueError(f"The step returned only the state. {rest}")
    if not isinstance(out, tuple | list):
        kind = "None" if out is None else f"a {type(out).__name__}"
        raise ValueError(f"The step returned {kind}. {rest}")
    if len(out) != 2:
        raise ValueError(f"The step returned a {type(out).__name__} of length {len(out)}. {rest}")
    return out[0], out[1]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class _Constant:
    """A leaf of aux that is not an array, as a node without leaves: jitted functions can return
    it."""

    value: Any


def _called(overdue: Overdue | None, jitted: Any, *args: Any) -> Any:
    """Calls a jitted function while emulated devices are watched."""
    if overdue is None:
        return jitted(*args)
    overdue.begin()
    last = None
    try:
        out = jitted(*args)
        # The last output of a step is a metric. The arrays of the state will be donated.
        last = next((x for x in reversed(jax.tree.leaves(out)) if isinstance(x, jax.Array)), None)
        return out
    finally:
        overdue.end(last)


def _put(x: Any, sharding: NamedSharding) -> Any:
    # The jitted call would also move arrays that are elsewhere, but in a separate program.
    if is_concrete(x) and x.committed and x.sharding == sharding:
        return x
    return put(x, sharding, may_alias=False if isinstance(x, np.ndarray) else None)


def _refuse_donated(state: PyTree, args: tuple[PyTree, ...]) -> None:
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


def _match_shardings(shardings: dict[Any, NamedSharding], state: PyTree) -> list[NamedSharding]:
    """Returns the sharding of each array of the state, from its path or a prefix of it."""
    is_end = lambda x: x is None or not jax.tree.leaves(x)
    found, missing, known = [], [], {()}
    for path, x in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_end):
        parts = [path[:n] for n in range(len(path), -1, -1)]
        known.update(parts)
        if isinstance(x, ARRAYS):
            sharding = next((shardings[part] for part in parts if part in shardings), None)
            missing.extend([_name(path)] if sharding is None else [])
            found.append((path, x, sharding))
    unexpected = [_name(path) for path in shardings if path not in known]
    if missing or unexpected:
        lacks = f"It has no sharding for {several(missing)}. " if missing else ""
        extra = f"The state has nothing at {several(unexpected)}. " if unexpected else ""
        raise ValueError(
            f"`state_shardings` does not match the state. {lacks}{extra}Pass the result of "
            "`infer_shardings(state, mesh)`, or a prefix of the state: a sharding in place of a "
            "subtree applies to all of its arrays, and `NamedSharding(mesh, PartitionSpec())` "
            "replicates them."
        )
    for path, x, sharding in found:
        try:
            sharding.check_compatible_aval(x.shape)
            sharding.shard_shape(x.shape)
        except ValueError as error:
            raise ValueError(
                f"The array at {_name(path)}, of shape {x.shape}, cannot be sharded as "
                f"{sharding.spec} over {dict(sharding.mesh.shape)}, as `state_shardings` specifies."
                " Each entry is for one dimension, and the sizes of its axes must divide it."
            ) from error
    return [sharding for _, _, sharding in found]


def _name(path: Any) -> str:
    return show_path(path, "the root")


def _is_frozen(structure: Any) -> bool:
    """Returns whether no node of a tree can be changed in place, unlike lists and dicts."""
    if structure.node_data() is None:
        return True
    kind = structure.node_data()[0]
    frozen = issubclass(kind, tuple | eqx.Module | eqx.nn.State | type(None))
    if dataclasses.is_dataclass(kind):
        frozen = frozen or vars(kind)["__dataclass_params__"].frozen
    return frozen and all(map(_is_frozen, structure.children()))


def _check_hashable(static: Static, tree: Callable[[], PyTree]) -> None:
    """Raises an error for unhashable leaves that are not arrays: they are static arguments."""
    try:
        hash(static)
    except TypeError:
        for path, x in jax.tree_util.tree_leaves_with_path(tree()):
            try:
                hash(None if isinstance(x, NUMBERS) else x)
            except TypeError as error:
                raise TypeError(
                    f"The step was called with a {type(x).__name__} at {_name(path)}, which is "
                    "neither an array nor hashable, so the step cannot be compiled for it. Pass "
                    "arrays, numbers, strings or functions, or close over it."
                ) from error
        raise


def refuse_wrong_gradients(jaxpr: AnyJaxpr, mesh: Mesh) -> None:
    """Raises if the jaxpr has a convolution that XLA partitions wrongly on this mesh.

    `sharding/constrain/_grouped_conv.py` describes the defect. Inside `jax.shard_map` XLA
    partitions nothing.
    """
    if mesh.shape["model"] == 1 or batch_shards(mesh) == 1:
        return
    for equation in iter_equations(jaxpr, skip=_is_manual):
        groups = equation.params.get("batch_group_count", 1)
        if equation.primitive.name == "conv_general_dilated" and groups > 1:
            sizes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
            raise ValueError(
                f"The gradient of a convolution in {groups} groups would be wrong on a mesh of "
                f"{sizes}, because of a defect of the XLA compiler if `model` is used together "
                "with `data` or `fsdp`. Constrain the loss: `plan.constrain(loss_fn)` of a plan "
                "from `rc.plan_shardings` avoids the defect. Or use a mesh with model=1."
            )


def _is_manual(equation: JaxprEqn) -> bool:
    return isinstance(control_flow(equation), Manual)


def _first_difference(given: PyTree, returned: PyTree) -> str:
    """Describes the first difference between two trees, ignoring the values of arrays."""
    show = lambda x: "an array" if isinstance(x, ARRAYS) else repr(x)
    before, after = (jax.tree_util.tree_leaves_with_path(t) for t in (given, returned))
    for (path, x), (other, y) in zip(before, after, strict=False):
        if path != other or show(x) != show(y):
            return (
                f"It was given {show(x)} at {_name(path)} and returned {show(y)} at "
                f"{_name(other)}. Values that change from step to step must be JAX arrays."
            )
    names = [{_name(path) for path, _ in leaves} for leaves in (before, after)]
    changed = ", ".join(sorted(names[0] ^ names[1]))
    counts = f"It was given {len(before)} leaves and returned {len(after)}."
    return f"{counts} Only one of them has {changed}."


class CompiledCall:
    """A compiled `fn(tree, *args)`, which does not donate the tree."""

    def __init__(self, fn: Callable[..., PyTree], shardings: PyTree[NamedSharding], mesh: Any):
        mesh = with_auto_axes(mesh)
        placed = jax.tree.leaves(on_auto_axes(shardings))
        flat = _flatten_arguments(fn, mesh)
        self._jitted = jax.jit(flat, static_argnums=(1, 3, 4), in_shardings=(placed, None))
        self._ambient = False  # whether it is traced with an ambient mesh
        self.mesh = mesh
        self._overdue = overdue_on(mesh)
        self._last: dict[int, tuple[Any, Any]] = {}

    def __call__(self, tree: PyTree, *args: PyTree) -> PyTree:
        call = ft.partial(self._first_of, self._jitted)
        with auto_ambient_mesh():
            return _called(self._overdue, call, *self._split(tree, args))

    def trace(self, tree: PyTree, *args: PyTree) -> jax.stages.Traced:
        """Traces the function, like the method of a jitted function."""
        return self._first_of(self._jitted.trace, *self._split(tree, args))

    def last(self, tree: PyTree, *args: PyTree) -> tuple[PyTree, Any]:
        """Returns the abstract outputs, and the last output array, from a program that computes
        only that."""
        arrays, static, given, constants = self._split(tree, args)
        traced = self._first_of(self._jitted.trace, arrays, static, given, constants)
        jaxpr, mesh = traced.jaxpr, self.mesh

        def compute(*arrays: Any) -> Any:
            with traced_over(mesh):
                return jaxpr_as_fun(jaxpr)(*arrays)[-1]

        if id(jaxpr) not in self._last:
            # JAX removes operations that only the other outputs need.
            self._last[id(jaxpr)] = jaxpr, jax.jit(compute)
        return traced.out_info, self._last[id(jaxpr)][1](*arrays, *given)

    def _first_of(self, call: Callable[..., Any], *args: Any) -> Any:
        """Calls a function that traces the program, with an ambient mesh only if it needs one."""
        if not self._ambient:
            with missing_mesh():
                return call(*args, False)
        result = call(*args, True)
        self._ambient = True
        return result

    def _split(self, tree: PyTree, args: tuple[PyTree, ...]) -> tuple[Any, Static, Any, Static]:
        given, constants = split(on_auto_axes(args), numbers=True)
        return (*split(on_auto_axes(tree)), place_batch(given, self.mesh), constants)


def by_microbatches(
    compiled: Callable[[int], CompiledStep], batch_size: int, accumulate: int
) -> Callable[..., Any]:
    """A step that calls `compiled(accumulate)`, with another number for a short last batch."""
    compiled = ft.cache(compiled)

    def call(state: PyTree, batch: PyTree) -> tuple[PyTree, PackedMetrics]:
        if accumulate == 1:
            return compiled(1)(state, batch)
        rows = jax.tree.leaves(batch)[0].shape[0]
        count = microbatches(rows, batch_size=batch_size, accumulate=accumulate)
        return compiled(count)(state, batch)

    return call


def microbatches(rows: int, *, batch_size: int, accumulate: int) -> int:
    """Returns the number of microbatches of a batch."""
    if rows == batch_size or accumulate == 1:
        return accumulate
    # A short last batch has microbatches that are no larger than those before. Their number must
    # not depend on the mesh, because the random keys of a step depend on it.
    least = -(-rows * accumulate // batch_size)
    return next(k for k in range(least, rows + 1) if rows % k == 0)
