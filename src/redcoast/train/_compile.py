"""Steps that are compiled once, with the shardings of their inputs and outputs fixed."""

import dataclasses
import functools as ft
import operator
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from ..core._axis_types import (
    auto_ambient_mesh,
    auto_array,
    is_explicit,
    on_auto_axes,
    on_mesh,
    with_auto_axes,
)
from ..core._control_flow import consts_of
from ..core._donation import is_concrete, is_deleted, separate
from ..core._dtypes import tree_to_jax_dtypes
from ..core._errors import check_functions, wrong_type
from ..core._frames import hide_frames
from ..core._pytree import Arrays, Static, abstract_array, join, split
from ..core._stored_specs import stored_as, stored_specs
from ..core._tracing import missing_mesh, refuse_traced
from ..distributed._agreement import agree_on_program
from ..distributed._arrays import abstract_batch, place_array, put, stays_on_host
from ..distributed._emulation import call_watched, overdue_on
from ..sharding import Plan
from ..tracking._metrics import PackedMetrics
from ._compiler_options import Option, Options, check_compiler_options, compiler_options_for
from ._debug_settings import call_debugged, is_debugged
from ._flat_function import flatten_step, type_of, unwrap_constants
from ._last_state import FlatState, LastState, Outline, as_tree
from ._programs import Run, compiled_once, jit_donating
from ._step_messages import (
    check_hashable,
    match_shardings,
    path_name,
    refuse_donated,
    refuse_elsewhere,
    refuse_wrong_gradients,
)

Jitted = Callable[..., PyTree]
_TRACE_THE_FUNCTION = (
    "It is compiled already, with memory that it reuses. Transform the function that was compiled: "
    "`redcoast.train_step`, with the constrained loss of a plan, `plan.constrain(loss_fn)`."
)
_was_deleted = operator.methodcaller("is_deleted")


@hide_frames
def compile_step(
    step: Callable[..., tuple[PyTree, PyTree]],
    state_shardings: PyTree,
    *,
    mesh: Mesh | None = None,
    compiler_options: Mapping[str, Option] | None = None,
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
    - `compiler_options`: options of XLA, such as `{"xla_gpu_enable_while_loop_unrolling": 1}`, in
        place of the [defaults](../howto/accelerators.md#options) for the kind of device; `{}` for
        none. Options that the compiler does not know are left out with a warning.

    **Returns:**

    A callable `(state, *args) -> (state, aux)`. NumPy arrays in `args` are copied to the devices,
    with the first dimension sharded over `data` and `fsdp` if it is divisible; JAX arrays keep
    their sharding. If an array is both in `args` and in the state, such as a target network, the
    copy in `args` can still be read after the call. Leaves of `aux` that are neither arrays nor
    numbers keep the values that they had during tracing. Like a jitted function, the callable has a
    method `lower(state, *args)`, which also accepts abstract arguments; abstract arguments without
    a sharding are treated like NumPy arrays.

    **Raises:**

    `TypeError` if a leaf of `state_shardings` is not a sharding, or an option is not a boolean, a
    number or a string. `ValueError` if `state_shardings` has no leaves or does not match the state
    that the step is called with; if an argument was donated to an earlier step; or if the step does
    not return `(state, aux)` with a state of the same structure.

    !!! Example

        ```python
        step = ft.partial(rc.train_step, loss_fn=loss_fn, optimizer=optimizer)
        step = rc.compile_step(step, rc.infer_shardings(state, mesh))
        for batch in batches:
            state, metrics = step(state, batch)
        ```
    """
    check_functions(step=step)
    check_compiler_options(compiler_options)
    shardings, mesh = _shardings_by_path(state_shardings, mesh)
    options = compiler_options_for(mesh, compiler_options)
    return CompiledStep(step, shardings, mesh, options=options)


def compile_reusable_step(
    step: Callable[..., tuple[PyTree, PyTree]],
    state_shardings: PyTree[NamedSharding],
    loss_fn: Callable[..., object],
    *,
    rows_axis: int = 0,
    options: Options = (),
) -> "CompiledStep":
    """A compiled step whose programs later steps use again, as `compiled_once` describes.

    `loss_fn` is the user's function that the step calls. `rows_axis` is the dimension of the NumPy
    arrays among its arguments that has the rows of a batch: 1 if several batches are stacked.
    `options` are those of the compiler.
    """
    shardings, mesh = _shardings_by_path(state_shardings, None)
    return CompiledStep(
        step, shardings, mesh, reuse_for=loss_fn, rows_axis=rows_axis, options=options
    )


def _shardings_by_path(
    state_shardings: PyTree, mesh: Mesh | None
) -> tuple[dict[KeyPath, NamedSharding], Mesh]:
    """The shardings of the leaves of a tree, with bare specs on the mesh, and the mesh."""
    if isinstance(state_shardings, Plan):
        raise wrong_type("state_shardings", state_shardings, "the plan's, `plan.shardings`")
    leaves = jax.tree_util.tree_leaves_with_path(state_shardings)
    for path, x in leaves:
        if not isinstance(x, NamedSharding | P):
            raise TypeError(
                f"`state_shardings` has {x!r} at {path_name(path)}, but its leaves must be "
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
    own_mesh = mesh
    if mesh is None:
        own_mesh = meshes[0]
    if not isinstance(own_mesh, Mesh):
        raise TypeError(
            f"The mesh of `state_shardings` is {own_mesh}, which has no devices. Plan with a mesh "
            "of devices, as returned by `redcoast.make_mesh`."
        )
    shardings: dict[KeyPath, NamedSharding] = {}
    for path, x in leaves:
        if isinstance(x, P):
            x = NamedSharding(own_mesh, x)
        shardings[path] = x
    return shardings, own_mesh


@dataclass(frozen=True)
class _StateKind:
    """What states of one structure have in common."""

    static: Static
    new_state_shardings: list[NamedSharding]  # on the user's mesh
    shardings: list[NamedSharding]  # the same on a mesh with Auto axes, for the arguments
    outline: Outline
    # The step to trace for such states, by the constants among the other arguments.
    jitted: dict[Static, Jitted] = field(default_factory=dict)


@dataclass(frozen=True)
class _CompiledProgram:
    """A step that was compiled for arguments of some shapes."""

    run: Callable[[Arrays, Arrays], tuple[Arrays, PyTree]]
    closed_over: Arrays  # arrays that the step refers to
    kind: _StateKind
    constants: Static
    keeps_types: bool  # whether the new state has arrays of the same types
    types: list[Hashable] = field(default_factory=list)  # of the arguments in the last call

    def fits(self, kind: _StateKind, structure: object, types: list[Hashable]) -> bool:
        """Whether it is the program for a state that a step returned, and other arguments."""
        return (
            self.keeps_types
            and self.kind is kind
            and self.constants.only_arrays
            and self.constants.structure == structure
            and self.types == types
        )


class CompiledStep:
    """The result of [`redcoast.compile_step`][], called like the step itself."""

    def __init__(
        self,
        step: Callable[..., PyTree],
        shardings: dict[KeyPath, NamedSharding],
        mesh: Mesh,
        *,
        reuse_for: Callable[..., object] | None = None,
        rows_axis: int = 0,
        options: Options = (),
    ):
        self.compiler_options = dict(options)
        self._shardings = shardings  # by path
        self._user_mesh = mesh
        # A user's mesh may have explicit axes, on which a loss would have to declare every
        # sharding. Inside, the compiler chooses.
        self._mesh = with_auto_axes(mesh)
        self._step = flatten_step(step, self._mesh)
        self._reuse_for = reuse_for  # the user's function, if programs are used again
        self._rows_axis = rows_axis
        self._kinds: dict[Static, _StateKind] = {}  # by the constants of a state
        self._programs: dict[Hashable, _CompiledProgram] = {}  # by the types of all arguments
        self._stays_on_host = stays_on_host(self._mesh)
        self._overdue = overdue_on(mesh)
        # Of the last call, which the next one usually repeats.
        self._last_state: tuple[LastState, _StateKind] | None = None
        self._last_constants: Static | None = None
        self._last_program: _CompiledProgram | None = None

    @hide_frames
    def __call__(self, state: PyTree, /, *args: PyTree) -> tuple[PyTree, PyTree]:
        # Entering another ambient mesh takes longer than the rest of a call.
        if not is_explicit(jax.sharding.get_abstract_mesh()):
            return self._call(state, args)
        with auto_ambient_mesh():
            return self._call(state, args)

    def _call(self, state: PyTree, args: tuple[PyTree, ...]) -> tuple[PyTree, PyTree]:
        flat, aux = self._take(state, args, copies=True)
        kind = self._kinds[flat.static]
        self._last_state = LastState(kind.outline, flat.tree, flat.arrays), kind
        return flat.tree, aux

    def take(self, state: PyTree | FlatState, *args: PyTree) -> tuple[FlatState, PyTree]:
        """Takes a step as a call does, but returns a flat state, and accepts one.

        It is for loops whose ambient mesh has no Explicit axes, and that do not write into the
        arguments before the devices have taken the step.
        """
        return self._take(state, args, copies=False)

    def _take(
        self, state: PyTree | FlatState, args: tuple[PyTree, ...], *, copies: bool
    ) -> tuple[FlatState, PyTree]:
        arrays, kind, is_last = self._split_state(state)
        leaves, structure = jax.tree.flatten(args)
        program, constants = self._last_program, None
        types = list(map(type_of, leaves))
        repeats = program is not None and is_last and program.fits(kind, structure, types)
        # Skipped where a call repeats the last one, since small steps take less time than it does.
        if not repeats:
            args = tree_to_jax_dtypes(args, "the arguments after the state")
            leaves, constants = self._split_arguments(args)
        # JAX's own error names neither the array nor the step that it was donated to.
        # Those of a flat state are arrays of JAX, which are asked faster.
        was_deleted = is_deleted
        if isinstance(state, FlatState):
            was_deleted = _was_deleted
        try:
            is_donated = any(map(was_deleted, arrays)) or any(map(is_deleted, leaves))
        except jax.errors.ConcretizationTypeError:  # tracers have no memory
            refuse_traced((state, args), "step", _TRACE_THE_FUNCTION)
            raise
        if is_donated:
            refuse_donated(as_tree(state), args)
        to_keep = leaves
        if copies:  # the caller may overwrite the batch while the step is still running
            leaves = list(map(_copy_numpy, leaves))
        others = list(map(self._argument, leaves))
        if constants is not None:  # the last call had other arguments
            program, is_new = self._program(kind, constants, arrays, leaves, others)
            if is_new or not is_last:  # arrays that the step closes over stay valid
                to_keep = [*others, *program.closed_over]
        assert program is not None
        # Donated memory must not be shared with what stays.
        arrays = separate(arrays, to_keep, distinct=is_last)
        # Arrays that the last step returned are where they belong.
        if not is_last or self._mesh is not self._user_mesh:
            arrays = list(map(_put, arrays, kind.shardings))
        try:
            arrays, aux = call_watched(self._overdue, program.run, arrays, others)
        except ValueError as error:
            if "incompatible devices" in str(error):
                refuse_elsewhere(args, self._user_mesh)
            raise
        if self._mesh is not self._user_mesh:
            aux = on_mesh(aux, self._user_mesh)
        if not isinstance(aux, PackedMetrics):  # which has no constants, and may be of a short step
            aux = unwrap_constants(aux)
        return FlatState(arrays, kind.static, self), aux

    def _argument(self, x: PyTree) -> PyTree:
        """An array or a number among the arguments, on the devices of the step."""
        if isinstance(x, np.ndarray) and self._stays_on_host:
            return x
        return auto_array(place_array(x, self._mesh, axis=self._rows_axis))

    def lower(self, state: PyTree, /, *args: PyTree) -> jax.stages.Lowered:
        """Lowers the step, like the method of a jitted function."""
        return self.trace(state, *args).lower()

    def trace(self, state: PyTree, /, *args: PyTree) -> jax.stages.Traced:
        """Traces the step, like the method of a jitted function."""
        args = tree_to_jax_dtypes(args, "the arguments after the state")
        passed, constants = self._split_arguments(args)
        arrays, kind, _ = self._split_state(state)
        others = abstract_batch(on_auto_axes(passed), self._mesh, self._rows_axis)
        with auto_ambient_mesh():
            return self._trace(kind, constants, arrays, others)[1]

    def _split_arguments(self, args: tuple[PyTree, ...]) -> tuple[Arrays, Static]:
        arrays, constants = split(args, numbers=True)
        # Equal constants are one object, so that programs are found by a cheap comparison.
        last = self._last_constants
        if last is None or (constants.structure, constants.leaves) != (last.structure, last.leaves):
            check_hashable(constants, lambda: args)
            self._last_constants = last = constants
        return arrays, last

    def _split_state(self, state: PyTree) -> tuple[Arrays, _StateKind, bool]:
        """Returns the state's arrays, its kind, and whether the last call returned the arrays."""
        # Nobody has looked at the state since the last step, so it was never put together.
        if isinstance(state, FlatState) and state.maker is self:
            return state.arrays, self._kinds[state.static], True
        state = as_tree(state)
        if self._last_state is not None:
            last, kind = self._last_state
            arrays = last.arrays_of(state)
            if arrays is not None:
                return arrays, kind, True
        state = tree_to_jax_dtypes(state, "the state")
        arrays, static = split(state)
        check_hashable(static, lambda: (state,))
        # Matching shardings by path takes longer than a step. A state has the same structure at
        # each.
        if static not in self._kinds:
            shardings = match_shardings(self._shardings, state)
            self._kinds[static] = _StateKind(
                static, shardings, on_auto_axes(shardings), Outline(state)
            )
        return arrays, self._kinds[static], False

    def _program(
        self, kind: _StateKind, constants: Static, arrays: Arrays, leaves: Arrays, others: Arrays
    ) -> tuple[_CompiledProgram, bool]:
        """Returns the program for these arguments, and whether this call is the first of it.

        `others` are the `leaves` of the other arguments on the devices.
        """
        types = tuple(map(type_of, others))
        # What `jax.jit` would compile the step for, too; here the shardings of outputs are a part
        # of it.
        key = kind.static, constants, tuple(map(type_of, arrays)), types
        program = self._programs.get(key)
        is_new = program is None
        if program is None:
            program = self._compile(kind, constants, arrays, others)
            self._programs[key] = program
        # With the types as the caller passes them, before they are converted and placed.
        self._last_program = dataclasses.replace(program, types=list(map(type_of, leaves)))
        return program, is_new

    def _compile(
        self, kind: _StateKind, constants: Static, arrays: Arrays, others: Arrays
    ) -> _CompiledProgram:
        jitted, traced = self._trace(kind, constants, arrays, others)
        jaxpr, (new_state, aux) = traced.jaxpr, traced.out_info
        # Processes with different programs would wait for each other's collectives for ever.
        agree_on_program("the program of the step", jaxpr, self._mesh)
        closed_over = list(consts_of(jaxpr))
        options = tuple(self.compiler_options.items())
        places = self._mesh, kind.shardings, kind.new_state_shardings
        structure = jax.tree.structure(aux)
        # A program that uses a value of another trace has it as an argument more, and JAX explains
        # that when it is called.
        is_whole = len(jaxpr.in_avals) == len(jax.tree.leaves((arrays, others)))
        if is_debugged() or not is_whole:
            run = ft.partial(call_debugged, jitted)
        elif self._reuse_for is None:
            run = _with_aux(jit_donating(jaxpr, *places, options), structure)
        else:
            # It may be the program of an earlier step, with the constants of this one.
            compiled, closed_over = compiled_once(
                jaxpr, self._reuse_for, *places, donates=True, options=options
            )
            run = _with_aux(compiled, structure)
        # A step that changes a dtype is compiled again for its own result.
        new_types = [(x.shape, x.dtype) for x in new_state]
        keeps_types = new_types == [(x.shape, x.dtype) for x in arrays]
        return _CompiledProgram(run, closed_over, kind, constants, keeps_types)

    def _trace(
        self, kind: _StateKind, constants: Static, arrays: Arrays, others: Arrays
    ) -> tuple[Jitted, jax.stages.Traced]:
        """The jitted step for the constants, and its program for the arrays."""

        def trace(jitted: PyTree) -> tuple[Jitted, jax.stages.Traced]:
            traced = jitted.trace(list(map(abstract_array, arrays, kind.shardings)), others)
            # Before the compiler, which would accept the program and compute it wrongly.
            refuse_wrong_gradients(traced.jaxpr, self._mesh)
            kind.jitted[constants] = jitted
            return jitted, traced

        if constants in kind.jitted:
            return trace(kind.jitted[constants])
        # As in `trace_for`.
        with missing_mesh():
            return trace(self._jit(kind, constants, ambient=False))
        return trace(self._jit(kind, constants, ambient=True))

    def _jit(self, kind: _StateKind, constants: Static, *, ambient: bool) -> Jitted:
        def step(arrays: Arrays, others: Arrays) -> tuple[Arrays, PyTree]:
            # For gradients of what is stored in parts, and optimizers that send parts of arrays.
            specs = stored_specs(join(kind.shardings, kind.static), join(arrays, kind.static))
            with stored_as(specs):
                return self._step(arrays, kind.static, others, constants, ambient)

        # Static arguments of a jitted function would be hashed and compared at each call.
        return jax.jit(
            step,
            in_shardings=(kind.shardings, None),
            # Of the new state only: metrics are where the compiler leaves them.
            out_shardings=(kind.new_state_shardings, None),
            # The new state takes the memory of the old one, or both would have to fit.
            donate_argnums=0,
            compiler_options=self.compiler_options or None,
        )


def _with_aux(compiled: Run, structure: PyTree) -> Run:
    """A program that returns aux as a tree."""

    def run(arrays: Arrays, others: Arrays) -> tuple[Arrays, PyTree]:
        arrays, aux = compiled(arrays, others)
        return arrays, structure.unflatten(aux)

    return run


def _copy_numpy(x: PyTree) -> PyTree:
    if isinstance(x, np.ndarray):
        return x.copy()
    return x


def _put(x: PyTree, sharding: NamedSharding) -> PyTree:
    # The jitted call would also move arrays that are elsewhere, but in a separate program.
    if is_concrete(x) and x.committed and x.sharding == sharding:
        return x
    may_alias = None
    if isinstance(x, np.ndarray):  # which the caller may overwrite
        may_alias = False
    return put(x, sharding, may_alias=may_alias)
