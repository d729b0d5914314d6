"""Compiled functions of a tree that stays, such as evaluations."""

import functools as ft
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import PyTree

from ..core._axis_types import auto_ambient_mesh, on_auto_axes, with_auto_axes
from ..core._pytree import Arrays, Static, split
from ..core._tracing import missing_mesh
from ..distributed._arrays import place_batch
from ..distributed._emulation import call_watched, overdue_on
from ._debug_settings import call_debugged, is_debugged
from ._flat_function import flatten_arguments, type_of
from ._programs import compiled_once

T = TypeVar("T")


@dataclass(frozen=True)
class _Arguments:
    """A tree and other arguments, taken apart."""

    arrays: Arrays
    static: Static
    others: Arrays
    constants: Static

    @property
    def types(self) -> tuple[Hashable, ...]:
        """What a program for these arguments depends on."""
        types = map(type_of, (*self.arrays, *self.others))
        return (*types, self.static, self.constants)


class CompiledCall:
    """A compiled `fn(tree, *args)`, which does not donate the tree.

    With `reuse_for`, the user's function that it calls, other calls use its programs again.
    """

    def __init__(
        self,
        fn: Callable[..., PyTree],
        shardings: PyTree[NamedSharding],
        mesh: Mesh | AbstractMesh,
        *,
        reuse_for: Callable[..., object] | None = None,
    ):
        assert isinstance(mesh, Mesh), "An abstract mesh has no devices to compile for."
        self.mesh = with_auto_axes(mesh)
        self._shardings: list[NamedSharding] = jax.tree.leaves(on_auto_axes(shardings))
        flat = flatten_arguments(fn, self.mesh)
        # Nothing is donated: an evaluation leaves the model as it is.
        self._jitted = jax.jit(flat, static_argnums=(1, 3, 4), in_shardings=(self._shardings, None))
        self._is_ambient = False  # whether it is traced with an ambient mesh
        self._function = reuse_for or fn
        self._reuses = reuse_for is not None
        self._overdue = overdue_on(mesh)
        self._programs: dict[Hashable, Callable[..., PyTree]] = {}

    def __call__(self, tree: PyTree, *args: PyTree) -> PyTree:
        arguments = self._split(tree, args)
        with auto_ambient_mesh():
            if not self._reuses or is_debugged():
                return call_watched(self._overdue, self._call_jitted, arguments)
            types = arguments.types
            if types not in self._programs:
                self._programs[types] = self._reused(arguments)
            run = self._programs[types]
            return call_watched(self._overdue, run, arguments.arrays, arguments.others)

    def trace(self, tree: PyTree, *args: PyTree) -> jax.stages.Traced:
        """Traces the function, like the method of a jitted function."""
        return self._trace(self._split(tree, args))

    def last(self, tree: PyTree, *args: PyTree) -> tuple[PyTree, jax.Array]:
        """Returns the abstract outputs, and the last output array, from a program that computes
        only that."""
        arguments = self._split(tree, args)
        traced = self._trace(arguments)
        compute, _ = compiled_once(
            traced.jaxpr, self._function, self.mesh, self._shardings, only_last=True
        )
        _, (value,) = compute(arguments.arrays, arguments.others)
        return traced.out_info, value

    def _reused(self, arguments: _Arguments) -> Callable[..., PyTree]:
        """The program of an earlier call that is the same, with the constants of this one."""
        traced = self._trace(arguments)
        if len(traced.jaxpr.in_avals) != len(jax.tree.leaves((arguments.arrays, arguments.others))):
            # It uses a value of another trace, which JAX explains when it is called.
            return lambda arrays, others: self._call_jitted(arguments)
        compiled, _ = compiled_once(traced.jaxpr, self._function, self.mesh, self._shardings)
        structure = jax.tree.structure(traced.out_info)

        def run(arrays: Arrays, others: Arrays) -> PyTree:
            _, results = compiled(arrays, others)
            return structure.unflatten(results)

        return run

    def _trace(self, arguments: _Arguments) -> jax.stages.Traced:
        return self._first_of(self._jitted.trace, arguments)

    def _call_jitted(self, arguments: _Arguments) -> PyTree:
        return self._first_of(ft.partial(call_debugged, self._jitted), arguments)

    def _first_of(self, call: Callable[..., T], arguments: _Arguments) -> T:
        """Calls a function that traces the program, with an ambient mesh only if it needs one."""
        parts = arguments.arrays, arguments.static, arguments.others, arguments.constants
        if not self._is_ambient:
            with missing_mesh():
                return call(*parts, False)
        result = call(*parts, True)
        # Only after it succeeded: another error is not about the mesh.
        self._is_ambient = True
        return result

    def _split(self, tree: PyTree, args: tuple[PyTree, ...]) -> _Arguments:
        arrays, static = split(on_auto_axes(tree))
        # Numbers are arguments of the program, which would otherwise be compiled for each.
        others, constants = split(on_auto_axes(args), numbers=True)
        return _Arguments(arrays, static, place_batch(others, self.mesh), constants)
