"""Computes with the matrices of a model, of which each device of a mesh has some.

What optimizers compute with a matrix needs all of it. Matrices of the same shape are stacked, and
each device computes with a part of the stack.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P
from jax.tree_util import KeyPath
from jaxtyping import Array, PyTree

from ..core._stored_specs import spec_of
from ..core._tracing import traced_mesh
from ._exchange import Axes, MatrixLayout, MatrixPlace, find_places, from_owners, size_of, to_owners

# From what all devices have, and stacks of matrices, to stacks of as many matrices.
OnStacks = Callable[..., Sequence[Array]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StoredMatrices:
    """An array as several matrices: `layout` says how. `spec` is how it is stored, or `None` if
    that is not known; the layout then has no axes.

    Inside of `jax.shard_map`, the array has what one device stores of it.
    """

    array: Array
    layout: MatrixLayout = field(metadata={"static": True})
    spec: P | None = field(metadata={"static": True})

    def stacked(self) -> Array:
        """`(matrices, *layout.shape)`, which has all of the array."""
        layout = self.layout
        return self.array.transpose(layout.order).reshape(layout.count, *layout.shape)

    def unstacked(self, matrices: Array) -> Array:
        """The inverse of `stacked`, for other values."""
        order = self.layout.order
        # The places of the dimensions in the order, by dimension.
        inverse = sorted(range(len(order)), key=order.__getitem__)
        return matrices.reshape([self.array.shape[d] for d in order]).transpose(inverse)


def as_stored(
    array: Array, path: KeyPath, order: Sequence[int], shape: Sequence[int], stacked: int
) -> StoredMatrices:
    """An array as matrices of a shape, stacked along the first dimensions of an order.

    `path` is that of the array in a tree of the step.
    """
    sizes, spec = _dividing_sizes(), spec_of(path, array)
    axes: list[Axes] = [()] * array.ndim
    if spec is not None:
        for d, entry in enumerate(spec):
            axes[d] = tuple(axis for axis in _names(entry) if axis in sizes)
    dims = [(array.shape[d], axes[d]) for d in order]
    part_sizes, part_axes = zip(*_merge_dims(dims[stacked:], shape), strict=True)
    layout = MatrixLayout(tuple(order), tuple(shape), tuple(dims[:stacked]), part_sizes, part_axes)
    return StoredMatrices(array, layout, spec)


def _names(entry: str | Sequence[str] | None) -> Sequence[str]:
    """The axes of one entry of a spec."""
    if entry is None:
        return ()
    if isinstance(entry, str):
        return (entry,)
    return entry


def _merge_dims(dims: Sequence[tuple[int, Axes]], shape: Sequence[int]) -> list[tuple[int, Axes]]:
    """Sizes and axes of the dimensions of one matrix, of which as many as possible are merged.

    Dimensions of one side are merged if only the first of them is sharded: a part of it is a part
    of the merged one.
    """
    rest = list(dims)
    merged: list[tuple[int, Axes]] = []
    for side in shape:
        size = 1
        is_first = True
        while rest and (is_first or size < side):
            own, axes = rest.pop(0)
            size *= own
            if is_first or axes:
                merged.append((own, axes))
            else:
                before, of_merged = merged.pop()
                merged.append((before * own, of_merged))
            is_first = False
    for own, axes in rest:  # of size one
        merged.append((own, axes))
    return merged


def compute_divided(
    fn: OnStacks,
    shared: PyTree,
    members: Sequence[Sequence[StoredMatrices]],
    like: Sequence[int] = (0,),
) -> list[list[Array]]:
    """Calls `fn(shared, *stacks)`, which computes with each matrix by itself.

    - `fn`: returns stacks of matrices, each shaped like one of its arguments.
    - `shared`: arrays that all devices have.
    - `members`: for each of several arrays of matrices, the arrays that `fn` is called with. The
        first is the array itself, and the others have values for each of its matrices. `fn` is
        called with all matrices of the same shapes at once.
    - `like`: for each result, the number of the argument that it is shaped like.

    Returns for each member the results, shaped and stored like its arrays. On a mesh, each device
    has computed with some of the matrices.
    """
    mesh, sizes = traced_mesh(), _dividing_sizes()
    groups: dict[tuple[Hashable, bool], list[int]] = {}
    for number, member in enumerate(members):
        types = [(matrices.layout.shape, str(matrices.array.dtype)) for matrices in member]
        # Devices send each other only what is known to be stored in parts of these sizes.
        is_known = _unchanged_axes(member, sizes) is not None
        groups.setdefault((tuple(types), is_known), []).append(number)
    results: list[list[Array]] = [[] for _ in members]
    for (_, is_known), numbers in groups.items():
        alike = [members[i] for i in numbers]
        if mesh is None or not sizes:
            computed = _compute_stacked(fn, shared, alike, like)
        elif is_known:
            computed = _exchange(fn, shared, alike, like, mesh, sizes)
        else:
            divided = _leave_to_compiler(fn, mesh, sizes)
            computed = _compute_stacked(divided, shared, alike, like)
        for number, arrays in zip(numbers, computed, strict=True):
            results[number] = arrays
    return results


def _dividing_sizes() -> Mapping[str, int]:
    """The sizes of the axes of the mesh that the current trace is for which divide anything."""
    mesh = traced_mesh()
    # Inside of `jax.shard_map`, devices have arrays of their own.
    if mesh is None or AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types:
        return {}
    return {axis: size for axis, size in mesh.shape.items() if size > 1}


def _compute_stacked(
    fn: OnStacks, shared: PyTree, members: Sequence[Sequence[StoredMatrices]], like: Sequence[int]
) -> list[list[Array]]:
    """Computes with one stack of all matrices."""
    stacks: list[Array] = []
    for arrays in zip(*members, strict=True):
        stacks.append(jnp.concatenate([matrices.stacked() for matrices in arrays]))
    computed = fn(shared, *stacks)
    results: list[list[Array]] = []
    # A stack has the matrices of the members one after the other.
    first = 0
    for member in members:
        last = first + member[0].layout.count
        own: list[Array] = []
        for number, stack in zip(like, computed, strict=True):
            own.append(member[number].unstacked(stack[first:last]))
        results.append(own)
        first = last
    return results


def _leave_to_compiler(
    fn: OnStacks, mesh: Mesh | AbstractMesh, sizes: Mapping[str, int]
) -> OnStacks:
    """The function on stacks that are divided over all devices, however they are stored."""
    axes = tuple(sizes)

    def divided(shared: PyTree, *stacks: Array) -> list[Array]:
        missing = -stacks[0].shape[0] % size_of(axes, sizes)
        # Matrices of zeros, whose results are cut off.
        padded = [jnp.pad(x, ((0, missing), *[(0, 0)] * (x.ndim - 1))) for x in stacks]
        # The compiler would gather the operands of decompositions.
        local = jax.shard_map(
            lambda shared, *stacks: tuple(fn(shared, *stacks)),
            mesh=mesh,
            in_specs=(P(), *[P(axes)] * len(stacks)),
            out_specs=P(axes),
            check_vma=False,
        )
        return list(local(shared, *padded))

    return divided


class _Bundle(NamedTuple):
    """Members whose arrays are stored alike, which are sent together."""

    numbers: list[int]
    layouts: tuple[MatrixLayout, ...]
    place: MatrixPlace


def _unchanged_axes(member: Sequence[StoredMatrices], sizes: Mapping[str, int]) -> Axes | None:
    """The axes over which the matrices of a member stay divided as they are stored.

    None if that is not known, or if the arrays of the member are divided in different ways.
    """
    stacks = {matrices.layout.stack for matrices in member}
    if any(matrices.spec is None for matrices in member):
        return None
    if len(stacks) == 1:
        return member[0].layout.stack_axes
    for matrices in member:
        layout = matrices.layout
        # In parts of neighbours, as those that are sent are divided too.
        divides = layout.count % size_of(sizes, sizes) == 0
        is_in_parts = divides and layout.stack[0][1] == tuple(sizes) and len(layout.stack) == 1
        if layout.stack_axes and not is_in_parts:
            return None
    return ()


def _exchange(
    fn: OnStacks,
    shared: PyTree,
    members: Sequence[Sequence[StoredMatrices]],
    like: Sequence[int],
    mesh: Mesh | AbstractMesh,
    sizes: Mapping[str, int],
) -> list[list[Array]]:
    """Computes with matrices that the devices send each other."""
    bundles, last_rounds = _bundles(members, sizes)

    def local(shared: PyTree, members: Sequence[Sequence[StoredMatrices]]) -> list[list[Array]]:
        sent = [_send(bundle, members, sizes) for bundle in bundles]
        stacks: list[Array] = []
        for parts in zip(*sent, strict=True):
            stacks.append(_join_rounds(parts, bundles, last_rounds))
        computed = fn(shared, *stacks)
        results: list[list[Array]] = [[] for _ in members]
        for number, stack in zip(like, computed, strict=True):
            # The results go back to the devices that store the arrays.
            rounds = _split_rounds(stack, bundles, last_rounds)
            for bundle, matrices in zip(bundles, rounds, strict=True):
                stored = from_owners(matrices, bundle.layouts[number], bundle.place, sizes)
                first = 0
                for i in bundle.numbers:
                    own = members[i][number]
                    last = first + own.layout.local_count(sizes)
                    results[i].append(own.unstacked(stored[first:last]))
                    first = last
        return results

    members = [list(member) for member in members]
    specs: list[list[P | None]] = []
    of_results: list[list[P | None]] = []
    for member in members:
        specs.append([matrices.spec for matrices in member])
        of_results.append([member[number].spec for number in like])
    return jax.shard_map(
        local, mesh=mesh, in_specs=(P(), specs), out_specs=of_results, check_vma=False
    )(shared, members)


def _bundles(
    members: Sequence[Sequence[StoredMatrices]], sizes: Mapping[str, int]
) -> tuple[list[_Bundle], int]:
    """Members that are sent together, and how many last rounds they have."""
    alike: dict[object, list[int]] = {}
    for number, member in enumerate(members):
        key: list[object] = [_unchanged_axes(member, sizes)]
        for matrices in member:
            layout = matrices.layout
            key += [layout.sizes, layout.axes, layout.stack_axes]
        # Matrices that are stored where they are computed with stay in this order.
        if len({matrices.layout.stack_axes for matrices in member}) > 1:
            key.append(number)
        alike.setdefault(tuple(key), []).append(number)
    counts: list[tuple[Axes, int]] = []
    for numbers in alike.values():
        unchanged = _unchanged_axes(members[numbers[0]], sizes) or ()
        axes = tuple(axis for axis in sizes if axis not in unchanged)
        count = sum(members[number][0].layout.count for number in numbers)
        counts.append((axes, count // size_of(unchanged, sizes)))
    places, last_rounds = find_places(counts, sizes)
    bundles: list[_Bundle] = []
    for numbers, place in zip(alike.values(), places, strict=True):
        layouts = tuple(matrices.layout for matrices in members[numbers[0]])
        bundles.append(_Bundle(numbers, layouts, place))
    return bundles, last_rounds


def _send(
    bundle: _Bundle,
    members: Sequence[Sequence[StoredMatrices]],
    sizes: Mapping[str, int],
) -> list[Array]:
    """The matrices of a bundle that this device computes with, for each stack."""
    sent: list[Array] = []
    for number, of_bundle in enumerate(bundle.layouts):
        parts: list[Array] = []
        for i in bundle.numbers:
            layout = members[i][number].layout
            array = members[i][number].array.transpose(layout.order)
            shape = layout.local_count(sizes), *layout.local_sizes(sizes)
            parts.append(array.reshape(shape))  # (matrices, *sizes of a part)
        sent.append(to_owners(jnp.concatenate(parts), of_bundle, bundle.place, sizes))
    return sent


def _join_rounds(parts: Sequence[Array], bundles: Sequence[_Bundle], last_rounds: int) -> Array:
    """One stack of the matrices of all bundles: first their rounds, and then the last ones."""
    rounds: list[Array] = []
    last: list[list[Array]] = [[] for _ in range(last_rounds)]
    for part, bundle in zip(parts, bundles, strict=True):
        place = bundle.place
        rounds.append(part[: place.rounds])
        if place.rest:
            last[place.last].append(part[place.rounds :])
    for matrices in last:
        # Of these, all but one are zeros on each device.
        rounds.append(sum(matrices[1:], start=matrices[0]))
    return jnp.concatenate(rounds)


def _split_rounds(stack: Array, bundles: Sequence[_Bundle], last_rounds: int) -> Iterator[Array]:
    """The inverse of `_join_rounds`: the matrices of each bundle, with those of its last round."""
    first = 0
    for bundle in bundles:
        place = bundle.place
        matrices = stack[first : first + place.rounds]
        first += place.rounds
        if place.rest:
            number = stack.shape[0] - last_rounds + place.last
            matrices = jnp.concatenate([matrices, stack[number : number + 1]])
        yield matrices
