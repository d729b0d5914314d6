"""A function with the shardings of its activations constrained as a plan says."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from ...core._pytree import ARRAYS, join
from ...core._tracing import traced_over
from ..program._graph import Value
from ..program._trace import trace_over
from ..program._walk import outputs_of
from ..solver._batch import Batch, made_rows
from ..solver._classes import Classes
from ..solver._cost import BatchDims
from ..solver._memory import asked_axes
from ..solver._strategy import Program, batch_dims, follow_program, parts
from ..tree._overrides import spec_axes
from ._compute import Compute
from ._custom_rules import is_float0
from ._grouped_conv import has_grouped
from ._interpreter import NotRebuilt, evaluate
from ._sequence import sequence_classes


@dataclass(frozen=True)
class Splits:
    """Which dimensions of a program's values are split over which axes."""

    mesh: Mesh | AbstractMesh
    classes: Classes
    chosen: frozenset[int]
    batch: BatchDims
    batch_axes: tuple[str, ...]
    model_axes: tuple[str, ...]
    sequence: frozenset[int] = frozenset()
    asked: frozenset[int] = frozenset()  # dimensions that the program splits itself

    def spec(self, value: Value) -> P:
        """The batch over its axes and a chosen class over those of the model, each only once."""
        return self._spec(value, self.chosen)

    def _spec(self, value: Value, chosen: frozenset[int]) -> P:
        entries: list[Any] = [None] * len(value.dims)
        free = {*self.batch_axes, *self.model_axes}
        for d, node in enumerate(value.dims):
            if self.batch.has(node) and free.issuperset(self.batch_axes):
                entries[d] = self.batch_axes
            elif self._is_in(node, chosen) and free.issuperset(self.model_axes):
                entries[d] = self.model_axes
            free.difference_update(entries[d] or ())
        return P(*entries)

    def _is_in(self, node: int, some: frozenset[int]) -> bool:
        return self.classes.divides(node) and self.classes[node] in some

    def __call__(self, x: Any, value: Value) -> Any:
        # Between the parts that are computed split, the sequence is split instead.
        split = any(self._is_in(node, self.chosen) for node in value.dims)
        return self._pinned(x, value, self.chosen if split else self.sequence)

    def operand(self, x: Any, value: Value) -> Any:
        """What a contraction takes: with its sequence whole again."""
        return self._pinned(x, value, self.chosen) if self.sequence else x

    def _pinned(self, x: Any, value: Value, chosen: frozenset[int]) -> Any:
        if not value.shape or not isinstance(x, jax.Array):
            return x
        entries = zip(self._spec(value, chosen), value.dims, strict=True)
        # What the program itself splits is for the compiler to carry on.
        own = [P.UNCONSTRAINED if e is None and d in self.asked else e for e, d in entries]
        return self._constrained(x, P(*own))

    def _constrained(self, x: Any, spec: P) -> Any:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    @property
    def count(self) -> int:
        """Into how many parts the batch is split."""
        return self.batch.count

    def batch_dim(self, value: Value) -> int | None:
        """Which dimension is split as the batch is."""
        return _place(self.spec(value), self.batch_axes)

    def in_parts(self, x: Any, value: Value, at: int) -> Any:
        """The array with its batch as two dimensions, parts and what is in each."""
        shape, entries = x.shape, list(self.spec(value))
        finer = (*shape[:at], self.count, shape[at] // self.count, *shape[at + 1 :])
        spec = P(*entries[: at + 1], None, *entries[at + 1 :])
        return self._constrained(jax.lax.reshape(x, finer), spec)

    def copies(self, x: Any, value: Value) -> Any:
        """The array as many times as there are parts of the batch, each where its part is."""
        repeated = jnp.broadcast_to(x[None], (self.count, *x.shape))
        return self._constrained(repeated, P(self.batch_axes, *self.spec(value)))

    def local(
        self, fn: Callable[..., Any], specs: Sequence[P], *inputs: Any
    ) -> tuple[list[Any], list[P], Any]:
        """The leaves of `fn(*inputs)`, constrained as its inputs are split; their specs, and how
        they make up the result."""
        at = [i for i, x in enumerate(inputs) if isinstance(x, ARRAYS) and not is_float0(x)]

        def of_arrays(arrays: list[Any]) -> Any:
            given = dict(zip(at, arrays, strict=True))
            return fn(*(given.get(i, x) for i, x in enumerate(inputs)))

        traced, arrays = trace_over(self.mesh, of_arrays, [inputs[i] for i in at], ())
        program = follow_program(traced, [False] * traced.arrays)
        pairs = [(value, specs[i]) for value, i in zip(program.parameters, at, strict=True)]
        batch = [(value, _place(spec, self.batch_axes)) for value, spec in pairs]
        nodes = tuple(value.dims[d] for value, d in batch if d is not None)
        dims = tuple(_place(spec, self.model_axes) for _, spec in pairs)
        compute = Compute(dims, self.batch_axes, self.model_axes)
        rows = Batch(nodes, made_rows(program.graph, nodes))
        splits = find_splits(replace(program, batch=rows), self.mesh, compute)
        results = evaluate(program.scope, splits, traced.jaxpr.consts, arrays)
        found = [splits.spec(value) for value in outputs_of(program.graph, program.scope)]
        leaves, structure = jax.tree.flatten(join(results, traced.output))
        named = jax.tree.leaves(join(found, traced.output))
        return leaves, [x if isinstance(x, P) else P() for x in named], structure


def _place(spec: P, axes: tuple[str, ...]) -> int | None:
    # A spec keeps an axis by itself as its name alone.
    places = [d for d, entry in enumerate(spec) if axes and spec_axes(entry) == axes]
    return places[0] if places else None


@dataclass(frozen=True)
class Constrained:
    """`fn(tree, *args)` with its activations split as the arrays of the tree are computed.

    Equal for equal functions and plans, so that what is compiled for one is found again.
    """

    fn: Callable[..., Any]
    mesh: Mesh | AbstractMesh
    compute: Compute

    def __call__(self, tree: PyTree, *args: Any) -> Any:
        found = _traced(self.mesh, self.fn, tree, args)
        if isinstance(found, str):
            # If it is the function that is at fault, this raises what it raises by itself.
            result = self._plain(tree, *args)
            _warn(self.fn, f"it cannot be traced ({found})")
            return result
        traced, arrays = found
        self._check(traced.arrays)
        program = follow_program(traced, [False] * traced.arrays)
        splits = find_splits(program, self.mesh, self.compute)
        first = slice(traced.arrays, traced.arrays + traced.batch)
        values = [program.scope.values[var] for var in traced.jaxpr.jaxpr.invars]
        arrays[first] = map(splits, arrays[first], values[first])
        stored = [True] * traced.arrays
        try:
            results = evaluate(program.scope, splits, traced.jaxpr.consts, arrays, stored)
        except NotRebuilt as error:
            if has_grouped(traced.jaxpr.jaxpr):
                raise RuntimeError(
                    f"The program cannot be constrained, for its `{error}` cannot be rebuilt. As "
                    "it is, the gradients of its grouped convolutions might come out wrong, by a "
                    "defect of the XLA compiler. Use a mesh with model=1."
                ) from error
            _warn(self.fn, f"its `{error}` cannot be rebuilt")
            return self._plain(tree, *args)
        return join(results, traced.output)

    def _plain(self, tree: PyTree, *args: Any) -> Any:
        with traced_over(self.mesh):
            return self.fn(tree, *args)

    def _check(self, arrays: int) -> None:
        if arrays != len(self.compute.dims):
            raise ValueError(
                f"The function was constrained by a plan of a tree with {len(self.compute.dims)} "
                f"arrays, and was called with one of {arrays}. Plan the tree that it is called "
                "with: `plan_shardings(tree, mesh, fn=fn, args=args)`."
            )


def _traced(
    mesh: Mesh | AbstractMesh, fn: Callable[..., Any], tree: PyTree, args: Any
) -> tuple[Any, list[Any]] | str:
    """The traced function and its arrays, or the name of the error that it raised."""
    # What is raised later is no consequence of this error, and must not be shown below it.
    try:
        return trace_over(mesh, fn, tree, args)
    except Exception as error:
        return type(error).__name__


def _warn(fn: Callable[..., Any], why: str) -> None:
    name = getattr(fn, "__name__", type(fn).__name__)
    warnings.warn(
        f"The activations of {name} are not constrained, for {why}; the compiler guesses how to "
        "split them. Results are the same.",
        stacklevel=3,
    )


def _of_constants(program: Program, classes: Classes, compute: Compute) -> frozenset[int]:
    """The classes of arrays closed over: those of the plan, each the first of its kind in turn."""
    left, found = list(compute.constants), set()
    for one, value in program.planned:
        name, d = next((entry for entry in left if entry[0] == one.name), ("", None))
        if name:
            left.remove((name, d))
        if d is not None and classes.divides(value.dims[d]):
            found.add(classes[value.dims[d]])
    return frozenset(found)


def find_splits(program: Program, mesh: Mesh | AbstractMesh, compute: Compute) -> Splits:
    """What follows for all values from the arrays that are computed split, and from the batch."""
    classes = Classes(program.graph, parts(compute.model_axes, mesh.shape))
    chosen = frozenset(
        classes[value.dims[d]]
        for value, d in zip(program.parameters, compute.dims, strict=True)
        if d is not None and classes.divides(value.dims[d])
    )
    chosen |= _of_constants(program, classes, compute)
    # A batch that does not divide over all of its axes goes over fewer.
    axes = compute.batch_axes
    while axes and not batch_dims(program, parts(axes, mesh.shape)).roots:
        axes = axes[:-1]
    batch = batch_dims(program, parts(axes, mesh.shape))
    asked = frozenset(asked_axes(program.graph))
    found = Splits(mesh, classes, chosen, batch, axes, compute.model_axes, asked=asked)
    if not compute.sequence:
        return found
    return replace(found, sequence=sequence_classes(program, classes, chosen, batch))
