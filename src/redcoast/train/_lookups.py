"""Finds the arrays that a loss indexes with integers of the batch, and the indices.

Only the integers are computed, not the loss.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, Var
from jax.lax import GatherScatterMode
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PRNGKeyArray, PyTree

from ..core._control_flow import AnyJaxpr, Atom, Call, consts_of, control_flow, open_jaxpr
from ..core._frames import own_line
from ..core._jaxpr import bind_again, struct_of
from ..core._pytree import ARRAYS, Arrays, abstract_tree, join, show_place, split
from ..core._tracing import abstract_key, trace_for
from ._loss import ExaminedLoss
from ._programs import compiled_once


class Lookup(NamedTuple):
    """An axis that a loss indexes with integers of a batch.

    - `shape`, `size`: the shape of the array, and the size of the axis.
    """

    where: str  # the line of the user's code, or `""`
    shape: tuple[int, ...]
    size: int
    paths: tuple[str, ...]  # the arrays of the batch that the indices are computed from
    silent: bool  # whether an index beyond the end reads the last element, and not NaN


class Lookups(NamedTuple):
    """The lookups of a loss; `extremes(arrays)` are the smallest and the largest index of each, for
    the arrays of a batch."""

    axes: tuple[Lookup, ...]
    extremes: Callable[[Arrays], Arrays]


class _Integers(NamedTuple):
    """Integers of a program, and which arrays of the batch they are computed from."""

    value: PyTree
    inputs: frozenset[int] = frozenset()


class _Indexed(NamedTuple):
    """A lookup, without the paths, and its indices."""

    lookup: Lookup
    indices: _Integers


def find_lookups(loss: ExaminedLoss, *, training: bool) -> Lookups:
    """Finds what a loss indexes with the integers of a batch, outside loops and branches."""
    model, batch = abstract_tree((loss.model, loss.batch))
    arrays, static = split(model)
    rows, rest = split(batch)

    def compute(arrays: Arrays, rows: Arrays, key: PRNGKeyArray) -> jax.Array:
        model, batch = join(arrays, static), join(rows, rest)
        return loss.evaluate(model, batch, key, training=training).loss

    # The loss alone, without its gradient, has all lookups.
    make = jax.make_jaxpr(compute)
    jaxpr = trace_for(loss.mesh, lambda: make(arrays, rows, abstract_key()))
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    places = [show_place(path, "batch") for path, x in leaves if isinstance(x, ARRAYS)]
    return _lookups_of(jaxpr, len(arrays), rows, places, loss)


def _lookups_of(
    jaxpr: AnyJaxpr, before: int, rows: Sequence[PyTree], places: Sequence[str], loss: ExaminedLoss
) -> Lookups:
    """The lookups of a traced loss, whose inputs from `before` on are the arrays of the batch."""
    axes: list[Lookup] = []

    def extremes(arrays: Sequence[PyTree]) -> list[jax.Array]:
        inputs: list[_Integers | None] = [None] * len(open_jaxpr(jaxpr).invars)
        for i, x in enumerate(arrays):
            if _is_integer(x):
                inputs[before + i] = _Integers(x, frozenset([i]))
        indexed: list[_Indexed] = []
        _follow(jaxpr, inputs, indexed)
        # A trace may run twice; the last one counts.
        axes.clear()
        results: list[jax.Array] = []
        for lookup, (values, read) in indexed:
            axes.append(lookup._replace(paths=tuple(places[i] for i in sorted(read))))
            results.append(jnp.stack([jnp.min(values), jnp.max(values)]))  # of each lookup, (2,)
        return results

    integers = jax.make_jaxpr(extremes)(list(rows))
    replicated = []
    if isinstance(loss.mesh, Mesh):
        replicated = [NamedSharding(loss.mesh, P())] * len(axes)
    # Only the integers are computed, not the loss that they are looked up for.
    compute, _ = compiled_once(integers, loss.loss_fn, loss.mesh, out_shardings=replicated)
    return Lookups(tuple(axes), lambda arrays: [*itertools.chain(*compute([], arrays))])


def _follow(
    jaxpr: AnyJaxpr, inputs: Sequence[_Integers | None], indexed: list[_Indexed]
) -> list[_Integers | None]:
    """The integer results that do not depend on the model; lookups are appended to `indexed`."""
    opened = open_jaxpr(jaxpr)
    env: dict[Var, _Integers | None] = dict(zip(opened.invars, inputs, strict=True))
    for variable, value in zip(opened.constvars, consts_of(jaxpr), strict=False):
        env[variable] = None
        if _is_integer(value):
            env[variable] = _Integers(value)

    def read(atom: Atom) -> _Integers | None:
        if isinstance(atom, Literal):
            return _Integers(atom.val)
        return env.get(atom)

    for equation in opened.eqns:
        operands = [read(atom) for atom in equation.invars]
        if equation.primitive.name == "gather" and operands[1] is not None:
            indexed += _indexed_axes(equation, operands[1])
        call = control_flow(equation)
        results: Sequence[_Integers | None] = [None] * len(equation.outvars)
        if isinstance(call, Call):
            before = len(indexed)
            results = _follow(call.jaxpr, operands, indexed)
            for i, (lookup, indices) in enumerate(indexed[before:], before):
                # A jitted function of a library contains no line of the user's code.
                if not lookup.where:
                    indexed[i] = _Indexed(lookup._replace(where=_line(equation)), indices)
        elif call is None and all(_is_integer(x.aval) for x in equation.outvars):
            results = _compute(equation, operands) or results
        env.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in opened.outvars]


def _compute(
    equation: JaxprEqn, operands: Sequence[_Integers | None]
) -> list[_Integers | None] | None:
    """The results of an operation on known integers."""
    if equation.effects:
        return None
    values: list[PyTree] = []
    inputs: frozenset[int] = frozenset()
    for x in operands:
        # An operand that depends on the model makes the result depend on it, too.
        if x is None:
            return None
        values.append(x.value)
        inputs |= x.inputs
    return [_Integers(value, inputs) for value in bind_again(equation, values)]


def _indexed_axes(equation: JaxprEqn, indices: _Integers) -> list[_Indexed]:
    """The axes from which a gather takes single elements by integers of the batch."""
    # Indices that are constants of the program were checked by its author.
    if not indices.inputs or indices.value.size == 0:
        return []
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    mode = GatherScatterMode.from_any(equation.params["mode"])
    is_silent = mode is not GatherScatterMode.FILL_OR_DROP
    shape = struct_of(equation.invars[0]).shape
    indexed: list[_Indexed] = []
    # The last dimension of the indices has one number for each of these axes of the operand.
    for place, axis in enumerate(numbers.start_index_map):
        # `jnp.take(..., mode="clip")` asks for the last element; a slice under `jax.vmap` does not.
        is_asked_for = mode is GatherScatterMode.CLIP and axis in numbers.collapsed_slice_dims
        # Longer slices come from cutting, where an end beyond the array is usual.
        if sizes[axis] == 1 and not is_asked_for:
            column = indices._replace(value=indices.value[..., place])
            lookup = Lookup(_line(equation), shape, shape[axis], paths=(), silent=is_silent)
            indexed.append(_Indexed(lookup, column))
    return indexed


def _line(equation: JaxprEqn) -> str:
    return own_line(getattr(equation.source_info, "traceback", None))


def _is_integer(x: object) -> bool:
    dtype = getattr(x, "dtype", None)
    if dtype is None:
        return False
    return jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.bool_)
