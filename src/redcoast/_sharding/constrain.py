"""A function with the shardings of its activations constrained as a plan says."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from .._parts import join
from .classes import Classes
from .dataflow import Program, batch_dims, follow_program
from .evaluate import NotRebuilt, evaluate
from .graph import Value
from .price import BatchDims
from .trace import trace


@dataclass(frozen=True)
class Splits:
    """Which dimensions of a program's values are split over which axes."""

    mesh: Mesh | AbstractMesh
    classes: Classes
    chosen: frozenset[int]
    batch: BatchDims
    batch_axes: tuple[str, ...]

    def spec(self, value: Value) -> P:
        """The batch over its axes and the chosen class over `model`, each at most once."""
        entries: list[Any] = [None] * len(value.dims)
        free = {"batch", "model"}
        for d, node in enumerate(value.dims):
            if "batch" in free and self.batch.has(node) and self.batch.classes.divides(node):
                entries[d] = self.batch_axes
                free -= {"batch", "model"} if "model" in self.batch_axes else {"batch"}
            elif "model" in free and self._chosen(node):
                entries[d] = "model"
                free.discard("model")
        return P(*entries)

    def _chosen(self, node: int) -> bool:
        return self.classes.divides(node) and self.classes[node] in self.chosen

    def __call__(self, x: Any, value: Value) -> Any:
        if not value.shape or not isinstance(x, jax.Array):
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, self.spec(value)))


@dataclass(frozen=True)
class Constrained:
    """`fn(tree, *args)` with its activations split as the arrays of the tree are computed.

    Equal for equal functions and plans, so that what is compiled for one is found again.
    """

    fn: Callable[..., Any]
    mesh: Mesh | AbstractMesh
    computed: tuple[int | None, ...]
    batch_axes: tuple[str, ...]

    def __call__(self, tree: PyTree, *args: Any) -> Any:
        try:
            traced, arrays = trace(self.fn, tree, args)
        except Exception as error:
            # If it is the function that is at fault, this raises what it raises by itself.
            result = self.fn(tree, *args)
            _warn(self.fn, f"it cannot be traced ({type(error).__name__})")
            return result
        self._check(traced.arrays)
        program = follow_program(traced, [False] * traced.arrays)
        splits = find_splits(program, self.mesh, self.computed, self.batch_axes)
        first = slice(traced.arrays, traced.arrays + traced.batch)
        values = [program.scope.values[var] for var in traced.jaxpr.jaxpr.invars]
        arrays[first] = map(splits, arrays[first], values[first])
        stored = [True] * traced.arrays
        try:
            results = evaluate(program.scope, splits, traced.jaxpr.consts, arrays, stored)
        except NotRebuilt as error:
            _warn(self.fn, f"its `{error}` cannot be rebuilt")
            return self.fn(tree, *args)
        return join(results, traced.output)

    def _check(self, arrays: int) -> None:
        if arrays != len(self.computed):
            raise ValueError(
                f"The function was constrained by a plan of a tree with {len(self.computed)} "
                f"arrays, and was called with one of {arrays}. Plan the tree that it is called "
                "with: `plan_shardings(tree, mesh, fn=fn, args=args)`."
            )


def _warn(fn: Callable[..., Any], why: str) -> None:
    name = getattr(fn, "__name__", type(fn).__name__)
    warnings.warn(
        f"The activations of {name} are not constrained, for {why}; the compiler guesses how to "
        "split them. Results are the same.",
        stacklevel=3,
    )


def find_splits(
    program: Program,
    mesh: Mesh | AbstractMesh,
    computed: Sequence[int | None],
    batch_axes: tuple[str, ...],
) -> Splits:
    """What follows for all values from the arrays that are computed split, and from the batch."""
    classes = Classes(program.graph, mesh.shape["model"])
    chosen = frozenset(
        classes[value.dims[d]]
        for value, d in zip(program.parameters, computed, strict=True)
        if d is not None and classes.divides(value.dims[d])
    )
    # A batch that does not divide over all of its axes goes over fewer.
    for axes in (batch_axes, ("data", "fsdp")):
        count = 1
        for axis in axes:
            count *= mesh.shape[axis]
        batch = batch_dims(program, count)
        if batch.roots:
            break
    return Splits(mesh, classes, chosen, batch, axes)
