"""The shardings of a program's values that follow from a plan."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ...core._constraint import constrain
from .._mesh_axes import parts, used_axes
from ..pipeline._draws import RandomBits
from ..pipeline._stages import Pipeline
from ..program._batch_dims import BatchDims, batch_over
from ..program._classes import Classes
from ..program._graph import Value
from ..program._program import Program
from ..program._tensor_sequence import find_sequence
from ..tree._leaf_plans import Compute
from ..tree._overrides import axes_of_spec, spec_axes
from ._product_order import orders_of_products


@dataclass(frozen=True)
class Shardings:
    """The sharding of each value: which of its dimensions are sharded over which axes.

    `chosen` are the classes of dimensions that are tensor-parallel. `sequence` is the class that
    is sharded over the same axes in values without a chosen one.
    """

    mesh: Mesh | AbstractMesh
    classes: Classes
    chosen: frozenset[int]
    batch: BatchDims
    batch_axes: tuple[str, ...]
    compute: Compute  # what these shardings follow from
    sequence: frozenset[int] = frozenset()
    constrained: frozenset[int] = frozenset()  # dimensions that the program itself shards
    stacks: frozenset[int] = frozenset()  # dimensions that count the layers of a scan
    # The axes of dimensions that are linked to split ones of examples, but do not divide.
    uneven: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    splits_examples: bool = False  # whether the batch is split inside of its examples
    # The order in which the dimensions of some values take axes, if it is not their own.
    orders: Mapping[Value, tuple[int, ...]] = field(default_factory=dict)
    pipeline: Pipeline | None = None
    # In the layers of a pipeline alone: the random numbers for rows, and the numbers of the rows.
    draws: Mapping[int, RandomBits] = field(default_factory=dict)
    row_numbers: jax.Array | None = None

    @property
    def in_pipeline(self) -> bool:
        return self.row_numbers is not None

    def spec(self, value: Value, chosen: frozenset[int] | None = None) -> P:
        """Returns a spec with the batch over its axes and a chosen class over the model's."""
        if chosen is None:
            chosen = self.chosen
        is_chosen = partial(self._is_in, classes=chosen)
        order = self.orders.get(value, range(len(value.nodes)))
        in_order = [value.nodes[d] for d in order]
        axes = self.batch.axes_of(in_order, is_chosen, self.compute.model_axes)
        by_dimension = dict(zip(order, axes, strict=True))
        return P(*map(by_dimension.__getitem__, range(len(value.nodes))))

    def split_axes(self, value: Value) -> list[tuple[str, ...]]:
        """The axes that each dimension is split over, into parts of unequal sizes too."""
        axes = list(map(spec_axes, self.spec(value)))
        for d, node in enumerate(value.nodes):
            unequal = self.uneven.get(node, ())
            if set(unequal).isdisjoint(itertools.chain(*axes)):
                axes[d] = axes[d] or unequal
        return axes

    def _is_in(self, node: int, classes: frozenset[int]) -> bool:
        return self.classes.divides(node) and self.classes[node] in classes

    def constrain(self, x: Any, value: Value, stored: P | None = None) -> Any:
        """Constrains an array to the sharding of its value.

        If it is `stored` by another one, that is the sharding of its cotangent.
        """
        return self._constrain(x, value, self.classes_over_model(value), stored)

    def classes_over_model(self, value: Value) -> frozenset[int]:
        """The classes along which a value is sharded over the axes of tensor parallelism."""
        if self.is_parallel(value):
            return self.chosen
        # Between the tensor-parallel parts, the sequence is sharded instead.
        return self.sequence

    def is_parallel(self, value: Value) -> bool:
        """Whether a dimension of a value is tensor-parallel."""
        return any(self._is_in(node, self.chosen) for node in value.nodes)

    def constrain_operand(self, x: Any, value: Value) -> Any:
        """Gathers the sequence of an operand of a contraction."""
        if not self.sequence:
            return x
        return self._constrain(x, value, self.chosen)

    def _constrain(
        self, x: Any, value: Value, chosen: frozenset[int], stored: P | None = None
    ) -> Any:
        if not value.shape or not isinstance(x, jax.Array):
            return x
        entries: list[object] = list(self.spec(value, chosen))
        # XLA propagates the shardings that the program itself asks for.
        free = self.constrained | self.uneven.keys()
        for d, node in enumerate(value.nodes):
            if entries[d] is None and node in free:
                entries[d] = P.UNCONSTRAINED
        if stored is None or not self._divides_gradient(stored):
            return self.with_spec(x, P(*entries))
        whole = NamedSharding(self.mesh, P(*entries))
        # If only some of the devices of the batch store different parts, as on data 2 x fsdp 4,
        # compilers all-reduce a gradient that is constrained as a whole over all of them. Of one
        # that is constrained to the parts alone, they reduce-scatter over `fsdp`, and all-reduce
        # these parts over `data`: a fourth of the bytes for the second.
        in_parts = NamedSharding(self.mesh, stored)
        return constrain(x, whole, of_cotangent=in_parts, if_mapped=whole)

    def _divides_gradient(self, stored: P) -> bool:
        """Whether some of the devices that sum a gradient store the same part of it."""
        summed = set(used_axes(self.batch_axes, self.mesh.shape))
        own = summed.intersection(axes_of_spec(stored))
        return own < summed and len(own) > 0

    def with_spec(self, x: jax.Array, spec: P) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def gather(self, x: jax.Array, value: Value, d: int) -> jax.Array:
        """Gathers a dimension of an array that is split like the batch."""
        entries = list(self.spec(value))
        # Split first, and gathered then: the cotangent is reduce-scattered, and not all-reduced.
        x = self.with_spec(x, P(*entries))
        return self.with_spec(x, P(*entries[:d], None, *entries[d + 1 :]))

    def batch_dim(self, value: Value) -> int | None:
        """Returns the dimension that is sharded like the batch."""
        return sharded_dim(self.spec(value), self.batch_axes)

    def split_batch(self, x: jax.Array, value: Value, at: int) -> jax.Array:
        """Reshapes the batch dimension `at` into two: shards, and the rows of each."""
        shape, entries, shards = x.shape, list(self.spec(value)), self.batch.count
        split = (*shape[:at], shards, shape[at] // shards, *shape[at + 1 :])  # (shards, rows)
        spec = P(*entries[: at + 1], None, *entries[at + 1 :])
        return self.with_spec(jax.lax.reshape(x, split), spec)

    def copies(self, x: jax.Array, value: Value) -> jax.Array:
        """Repeats an array along a new leading dimension, once for each shard of the batch."""
        shape = (self.batch.count, *x.shape)  # (shards, ...)
        repeated = jax.lax.broadcast_in_dim(x, shape, range(1, len(shape)))
        return self.with_spec(repeated, P(self.batch_axes, *self.spec(value)))


def sharded_dim(spec: P, axes: Sequence[str]) -> int | None:
    """Returns the dimension that a spec shards over exactly these axes, if any."""
    if not axes:
        return None
    for d, entry in enumerate(spec):
        # A spec stores a single axis as its name alone.
        if spec_axes(entry) == axes:
            return d
    return None


def find_shardings(program: Program, mesh: Mesh | AbstractMesh, compute: Compute) -> Shardings:
    """Derives the shardings of all values from the tensor-parallel arrays and the batch."""
    classes = Classes(program.graph, parts(compute.model_axes, mesh.shape))
    split: list[int] = []  # the dimensions of arrays of the tree that are tensor-parallel
    for value, d in zip(program.parameters, compute.dims, strict=True):
        if d is not None:
            split.append(value.nodes[d])
    chosen = classes.of(filter(classes.divides, split))
    # Constants have no place in the tree, and are known by their types.
    chosen |= _classes_of_constants(program, classes, compute)
    batch = batch_over(program, compute.batch_axes, mesh.shape)
    sequence: frozenset[int] = frozenset()
    if compute.sequence_parallel:
        sequence = find_sequence(program, classes, chosen, batch, compute.batch_axes)
    orders: Mapping[Value, tuple[int, ...]] = {}
    if program.batch.splits_examples:
        orders = orders_of_products(program.scope)
    return Shardings(
        mesh=mesh,
        classes=classes,
        chosen=chosen,
        batch=batch,
        batch_axes=batch.over(compute.batch_axes),
        compute=compute,
        sequence=sequence,
        constrained=frozenset(program.constraint_axes),
        stacks=frozenset(program.graph.stacks),
        uneven=_uneven(program, batch),
        splits_examples=program.batch.splits_examples,
        orders=orders,
    )


def _uneven(program: Program, batch: BatchDims) -> dict[int, tuple[str, ...]]:
    """Dimensions that are linked to those that examples are split along, but do not divide.

    XLA divides them into parts of unequal sizes, over the axes of those.
    """
    if not program.batch.sets:
        return {}
    graph = program.graph
    uneven: dict[int, tuple[str, ...]] = {}
    anywhere = Classes(graph, 1, soft=True, least=2, only_hard=program.owned)
    for split in batch.sets:
        linked = anywhere.of(split.of_inputs)
        for node, size in enumerate(graph.sizes):
            is_uneven = size >= split.count and not split.classes.divides(node)
            if is_uneven and anywhere[node] in linked:
                uneven.setdefault(node, split.axes)
    return uneven


def _classes_of_constants(program: Program, classes: Classes, compute: Compute) -> frozenset[int]:
    """The classes of arrays closed over, matched to the plan's by type and in order."""
    dims_by_name: dict[str, list[int | None]] = {}
    for name, d in compute.constants:
        dims_by_name.setdefault(name, []).append(d)
    chosen: set[int] = set()
    for constant, value in program.large_constants:
        dims = dims_by_name.get(constant.name)
        if not dims:
            continue
        d = dims.pop(0)  # equal types are in the order of the program
        if d is not None and classes.divides(value.nodes[d]):
            chosen.add(classes[value.nodes[d]])
    return frozenset(chosen)
