"""Functions of trees as functions of flat lists of arrays, which `jax.jit` calls faster."""

import dataclasses
from collections.abc import Callable, Hashable

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from ..core._pytree import NUMBERS, Arrays, Static, join, map_where, split
from ..core._tracing import traced_over
from ._step_messages import first_difference, state_and_aux


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class _Constant:
    """A leaf of aux that is not an array, as a node without leaves: jitted functions can return
    it."""

    value: object


def flatten_arguments(fn: Callable[..., PyTree], mesh: Mesh) -> Callable[..., PyTree]:
    """Converts `fn(tree, *args)` to a function of the partitions that `split` returns."""

    def call(
        arrays: Arrays, static: Static, others: Arrays, constants: Static, ambient: bool
    ) -> PyTree:
        with traced_over(mesh, ambient=ambient):
            return fn(join(arrays, static), *join(others, constants))

    return call


def flatten_step(step: Callable[..., PyTree], mesh: Mesh) -> Callable[..., tuple[Arrays, PyTree]]:
    """The same for a step, which returns the arrays of the new state, and aux."""
    call = flatten_arguments(step, mesh)

    def flat_step(arrays: Arrays, static: Static, *rest: PyTree) -> tuple[Arrays, PyTree]:
        new_state, aux = state_and_aux(call(arrays, static, *rest), static)
        new_arrays, new = split(new_state)
        # The constants of a state are a part of its program, so a step cannot change them.
        if (new.structure, new.leaves) != (static.structure, static.leaves):
            raise ValueError(
                "The step must return a state of the same structure as its argument. "
                + first_difference(join(arrays, static), new_state)
            )
        return new_arrays, jax.tree.map(_wrap_constant, aux)

    return flat_step


def _wrap_constant(leaf: object) -> object:
    # Results of a program are arrays; other leaves of aux go through its structure.
    if isinstance(leaf, NUMBERS):
        return leaf
    return _Constant(leaf)


def unwrap_constants(aux: PyTree) -> PyTree:
    """The aux of a step, after `flatten_step` made nodes of its constants."""
    return map_where(_is_constant, lambda x: x.value, aux, is_leaf=_is_constant)


def _is_constant(x: object) -> bool:
    return isinstance(x, _Constant)


def type_of(x: object) -> Hashable:
    """What a program depends on of an array or a number that is passed to it."""
    # JAX has it ready; a shape and a dtype would be looked up.
    aval = getattr(x, "aval", None)
    if aval is not None:
        return aval
    if isinstance(x, np.ndarray | np.generic | jax.ShapeDtypeStruct):
        return x.shape, x.dtype
    return type(x)
