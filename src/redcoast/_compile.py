import functools as ft
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

from ._abstract import traced_over
from ._arguments import check_functions
from ._distribute import place_batch, put
from ._grouped import refuse_wrong_gradients
from ._parts import ARRAYS, Static, join, split


def compile_step(
    step: Callable[..., tuple[PyTree, PyTree]],
    state_shardings: PyTree[NamedSharding],
    *,
    mesh: Mesh | None = None,
) -> "CompiledStep":
    """Compiles a training step for loops of one's own, as `fit` does for its loop.

    The compiled step returns before the device is done, so that the next batch can be
    prepared meanwhile; reading a metric waits for it. The state that is passed in is donated:
    its memory holds the new state, and the old one can no longer be read. State keeps the
    given shardings from step to step, and there is one compilation for each shape.

    **Arguments:**

    - `step`: a pure function `step(state, *args) -> (state, aux)`, such as
        [`redcoast.train_step`][] with its keyword arguments bound by `functools.partial`.
    - `state_shardings`: a `NamedSharding` for each array of the state, as
        [`redcoast.infer_shardings`][] gives them.
    - `mesh`: the mesh that bare `PartitionSpec`s in `step` refer to; that of
        `state_shardings` by default.

    **Returns:**

    A callable `(state, *args) -> (state, aux)`. NumPy arrays among `args` are placed with
    their first dimension split over `data` and `fsdp`, where it divides; JAX arrays stay where
    they are. It has `lower(state, *args)`, as jitted functions do, which takes abstract
    arguments too.

    **Raises:**

    `ValueError` if `state_shardings` holds no sharding, or does not match the state that the
    step is called with, or if the step returns a state of another structure.

    !!! Example

        ```python
        step = ft.partial(rc.train_step, loss_fn=loss_fn, optimizer=optimizer)
        step = rc.compile_step(step, rc.infer_shardings(state, mesh))
        for batch in batches:
            state, metrics = step(state, batch)
        ```
    """
    check_functions(step=step)
    shardings = jax.tree.leaves(state_shardings)
    if not shardings:
        raise ValueError(
            "`state_shardings` holds no sharding. Pass what `infer_shardings(state, mesh)` returns."
        )
    return CompiledStep(step, shardings, shardings[0].mesh if mesh is None else mesh)


class CompiledStep:
    """A compiled step: called like the step it was made from, or lowered to look inside."""

    def __init__(self, step: Callable[..., Any], shardings: list[NamedSharding], mesh: Mesh):
        self._shardings = shardings
        self._mesh = mesh
        self._jitted = jax.jit(
            _on_state(step, mesh),
            static_argnums=(1, 3),
            in_shardings=(shardings, None),
            out_shardings=(shardings, None),
            donate_argnums=0,
        )
        # The state that was returned last, in parts: taking a tree of many modules apart costs more
        # than running a small step. It is known by a weak reference, and forgotten with the state.
        self._last: tuple[weakref.ref[Any], list[Any], Static] | None = None
        self._checked: set[tuple[Static, Static]] = set()

    def __call__(self, state: PyTree, /, *args: PyTree) -> tuple[PyTree, PyTree]:
        arrays, static = self._split_state(state)
        given, constants = split(args, numbers=True)
        given = place_batch(given, self._mesh)
        if (static, constants) not in self._checked:
            program = self._jitted.trace(arrays, static, given, constants).jaxpr
            refuse_wrong_gradients(program.jaxpr, self._mesh)
            self._checked.add((static, constants))
        arrays, aux = self._jitted(arrays, static, given, constants)
        state = join(arrays, static)
        self._remember(state, arrays, static)
        return state, aux

    def lower(self, state: PyTree, /, *args: PyTree) -> jax.stages.Lowered:
        """As `jax.jit(...).lower`."""
        return self.trace(state, *args).lower()

    def trace(self, state: PyTree, /, *args: PyTree) -> jax.stages.Traced:
        """As `jax.jit(...).trace`."""
        traced = self._jitted.trace(*self._split_state(state), *split(args, numbers=True))
        refuse_wrong_gradients(traced.jaxpr.jaxpr, self._mesh)
        return traced

    def _split_state(self, state: PyTree) -> tuple[list[Any], Static]:
        if self._last is not None and self._last[0]() is state:
            return self._last[1:]
        arrays, static = split(state)
        if len(arrays) != len(self._shardings):
            raise ValueError(
                f"The state holds {len(arrays)} arrays, but `state_shardings` has "
                f"{len(self._shardings)} shardings. They must come from the same tree: "
                "`infer_shardings(state, mesh)`."
            )
        return list(map(_put, _unaliased(arrays), self._shardings)), static

    def _remember(self, state: PyTree, arrays: list[Any], static: Static) -> None:
        def forget(reference: Any) -> None:
            if self._last is not None and self._last[0] is reference:
                self._last = None

        try:
            self._last = (weakref.ref(state, forget), arrays, static)
        except TypeError:  # tuples and dicts take no weak references
            self._last = None


def _on_lists(fn: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """`fn(tree, *args)` as a function of what `split` makes of both."""

    def call(arrays: list[Any], static: Static, given: list[Any], constants: Static) -> Any:
        with traced_over(mesh):
            return fn(join(arrays, static), *join(given, constants))

    return call


def _on_state(step: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    call = _on_lists(step, mesh)

    def flat_step(arrays: list[Any], static: Static, *rest: Any) -> tuple[list[Any], PyTree]:
        new_state, aux = call(arrays, static, *rest)
        new_arrays, new_static = split(new_state)
        if new_static != static:
            raise ValueError(
                "The step must return a state of the structure that it was given. "
                + _first_difference(join(arrays, static), new_state)
            )
        return new_arrays, aux

    return flat_step


def _put(x: Any, sharding: NamedSharding) -> Any:
    # Arrays that are elsewhere would be moved by the call as well, but by a program of their own.
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return put(x, sharding)


def _first_difference(given: PyTree, returned: PyTree) -> str:
    """Where two trees first differ in all but the values of their arrays."""
    show = lambda x: "an array" if isinstance(x, ARRAYS) else repr(x)
    before, after = (jax.tree_util.tree_leaves_with_path(t) for t in (given, returned))
    for (path, x), (other, y) in zip(before, after, strict=False):
        if path != other or show(x) != show(y):
            where, there = (
                jax.tree_util.keystr(p, simple=True, separator="/") for p in (path, other)
            )
            return (
                f"It was given {show(x)} at {where} and returned {show(y)} at {there}. What "
                "changes from step to step must be a JAX array."
            )
    return f"It was given {len(before)} leaves and returned {len(after)}."


def _unaliased(arrays: list[Any]) -> list[Any]:
    """Copies arrays that stand in several places: a buffer can be donated only once."""
    seen: set[int] = set()
    result = []
    for array in arrays:
        result.append(jnp.copy(array) if id(array) in seen else array)
        seen.add(id(array))
    return result


def compile_call(
    fn: Callable[..., PyTree], shardings: PyTree[NamedSharding], mesh: Mesh, **options: Any
) -> Callable[..., PyTree]:
    """Compiles `fn(tree, *args, **options)` for a tree that stays as it is."""
    wanted = (fn, tuple(jax.tree.leaves(shardings)), mesh, tuple(options.items()))
    try:
        jitted = _jitted_call(*wanted)
    except TypeError:  # callables that hold arrays, say, have no hash
        jitted = _jitted_call.__wrapped__(*wanted)

    def call(tree: PyTree, *args: PyTree) -> PyTree:
        given, constants = split(args, numbers=True)
        return jitted(*split(tree), place_batch(given, mesh), constants)

    return call


@ft.lru_cache(maxsize=16)
def _jitted_call(
    fn: Callable[..., Any],
    shardings: tuple[NamedSharding, ...],
    mesh: Mesh,
    options: tuple[tuple[str, Any], ...],
) -> Any:
    # Remembered, so that a loop that evaluates the same functions again compiles them once.
    bound = ft.partial(fn, **dict(options))
    return jax.jit(
        _on_lists(bound, mesh), static_argnums=(1, 3), in_shardings=(list(shardings), None)
    )
