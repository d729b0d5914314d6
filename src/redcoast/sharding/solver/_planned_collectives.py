"""What devices send to each other in a step, and why: one list for the solver and the report."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from jax.extend.core import JaxprEqn

from ...core._control_flow import (
    Call,
    CallKind,
    Scan,
    While,
    control_flow,
    open_jaxpr,
    primitive_name,
)
from ...core._jaxpr import iter_equations, struct_of
from ..operations import Dimension, atom_bytes
from ..program._batch import SplitNodes
from ..program._batch_dims import BatchDims
from ..program._classes import Classes
from ..program._graph import (
    BatchGather,
    Graph,
    Halo,
    Nodes,
    PartialSum,
    Reshard,
    Source,
    SourcePath,
    Value,
    Work,
    path_of,
)
from ..program._remat import keeps_gathers, recomputes_little
from ..program._shared_programs import once
from ._hardware import (
    Hardware,
    all_gather,
    all_reduce,
    gradient_sum,
    scatters_over,
)
from ._moved_rows import is_spectrum, moved_rows

Cause = Literal[
    # A class is sharded over `model`:
    "partial sums",  # of a product, or of a cotangent: an all-reduce
    "gathered",  # an array in which the class does not stay sharded: an all-gather
    # The batch is split:
    "gradients",  # of arrays without rows, from all rows
    "sums over the batch",  # of other values, such as the mean in a loss
    "written",  # all rows are gathered: an operation needs them as a whole, as a write at indices
    "compared",  # all rows are gathered, to be combined with the rows of each device
    "by index",  # rows are looked up among all rows, or added to them, as at the nodes of a graph
    "halos",  # elements at the edges of parts of an example, which a window needs
    "turned",  # an example is split along another dimension for a while: an all-to-all
    "transposed",  # a table of all pairs of rows, for which it is the same
    "uneven",  # an array is gathered, as the size of a result does not divide
    "moved",  # rows go to other devices, as in a slice or a sort
]


@dataclass(frozen=True)
class PlannedCollective:
    """Bytes that each device sends in a step for one array.

    `root` is the class of dimensions whose sharding over `model` is the cause; where it is None,
    the cause is that the batch is sharded, and the bytes are divided by the devices of `model` if
    one of `nodes` is sharded over them. `source` is the operation.
    """

    cause: Cause
    bytes: int | float
    nodes: Nodes
    source: Source
    backward: bool = False
    root: int | None = None


@dataclass(frozen=True)
class _Product:
    """A product of two arrays that are both split over the devices of `split`.

    `nodes` are the dimensions that the operands are split along. With `sums_parts`, it sums over
    that dimension; otherwise, the operands at the places `gathered` are needed as a whole.
    """

    work: Work
    split: SplitNodes
    nodes: tuple[int, int]
    sums_parts: bool
    gathered: tuple[int, ...]
    splits_result: bool


@dataclass(frozen=True)
class PartsTogether:
    """How many parts of split examples a product, a lookup or an addition reads and writes.

    `of_operands` has those of the operands that each device gathers, by their places. Of the
    result, each device has terms of so many parts.
    """

    of_operands: Mapping[int, int] = field(default_factory=dict)
    of_result: int = 1


def of_model(
    graph: Graph, classes: Classes, batch: BatchDims, n: int, hardware: Hardware
) -> Iterator[PlannedCollective]:
    """What is sent if a class of dimensions is sharded over the `n` devices of `model`.

    Partial sums along it are all-reduced, and arrays that it does not stay sharded in are
    all-gathered.
    """
    apart = _summed_apart(graph, hardware)
    for summed in _added_first(graph, graph.partial_sums.values(), apart, classes.__getitem__):
        if classes.divides(summed.node):
            dims, root = summed.value.nodes, classes[summed.node]
            size = _sum_bytes(graph, summed, apart) / batch.parts((*summed.rows, *dims))
            sent = all_reduce(n, size)
            yield PlannedCollective(
                "partial sums", sent, dims, summed.source, summed.backward, root
            )
    for cut in graph.reshards:
        dims = (*cut.rows, *cut.result.nodes)
        # The classes that end at the cut, and the bytes that are gathered: compilers gather the
        # array and its cotangent on either side.
        ends: list[tuple[int, int | float]] = []
        for node, value in ((cut.before, cut.operand), (cut.after, cut.result)):
            if node is None or not classes.divides(node):
                continue
            times = cut.times + cut.backward
            if node == cut.before and primitive_name(cut.source[-1]) == "split":
                # An array is gathered before it is split into whole ones. Each device has all of
                # its cotangent then.
                times = cut.times
            ends.append((classes[node], value.bytes * times))
        # A class that goes on after the cut, in another order, stays sharded.
        if len(ends) == 2 and ends[0][0] == ends[1][0]:
            continue
        for root, size in ends:
            sent = all_gather(n, size / batch.parts(dims))
            yield PlannedCollective("gathered", sent, dims, cut.source, root=root)


def of_batch(
    graph: Graph, batch: BatchDims, gradient_shards: int, hardware: Hardware
) -> Iterator[PlannedCollective]:
    """What is sent if the batch is sharded. A gradient is stored in `gradient_shards`."""
    return _OverBatch(graph, batch, gradient_shards, hardware).collectives()


def parts_together(graph: Graph, batch: BatchDims) -> dict[SourcePath, PartsTogether]:
    """The products of split examples that read or write more than a device's part of an array, and
    the lookups in rows and additions to them that do."""
    together: dict[SourcePath, PartsTogether] = {}
    for product in _products_of_parts(graph, batch).values():
        path, count = path_of(product.work.source), product.split.count
        # An array may be split along two dimensions.
        before = together.get(path, PartsTogether())
        of_operands, of_result = dict(before.of_operands), before.of_result
        for side in product.gathered:
            of_operands[side] = count * of_operands.get(side, 1)
        if product.sums_parts and product.splits_result:
            of_result *= count
        together[path] = PartsTogether(of_operands, of_result)
    for summed in graph.partial_sums.values():
        split = batch.set_of(summed.node)
        if split is not None and split.count > 1 and not summed.backward:
            by_index = _rows_together(graph, batch, summed, split.count)
            if by_index is not None:
                together[path_of(summed.source)] = by_index
    return together


def _rows_together(
    graph: Graph, batch: BatchDims, summed: PartialSum, count: int
) -> PartsTogether | None:
    """The rows of other devices that a lookup reads or an addition writes, if they are gathered or
    summed as a whole, as those of nodes at the edges of a graph."""
    rule, operands = graph.rule_at(summed.source), summed.source[-1].invars
    of_table = atom_bytes(operands[0])
    if rule.is_lookup:
        has_rows = any(map(batch.has, summed.value.nodes))
        is_same_row = batch.splits_alike(summed.node, summed.unless)
        if has_rows and not is_same_row and summed.value.bytes >= of_table:
            return PartsTogether({0: count})
    elif rule.writes is not None and rule.sums:
        has_rows = any(map(batch.has, summed.unless))
        if has_rows and atom_bytes(operands[rule.writes]) >= of_table:
            return PartsTogether(of_result=count)
    return None


@dataclass(frozen=True)
class _OverBatch:
    """What is sent for the operations of a program whose batch is sharded."""

    graph: Graph
    batch: BatchDims
    gradient_shards: int
    hardware: Hardware

    def collectives(self) -> Iterator[PlannedCollective]:
        graph, batch = self.graph, self.batch
        sums = [summed for summed in graph.partial_sums.values() if batch.has(summed.node)]
        for summed in sums:
            yield from self._addition_to_rows(summed)
        yield from self._sums(sums)
        for product in self._products.values():
            yield from self._of_product(product)
        for gather in graph.batch_gathers:
            yield from self._gather(gather)
        for halo in graph.halos:
            if batch.has(halo.node):
                yield self._halo(halo)
        for work in graph.works:
            yield from self._turned_back(work)
        for turn in graph.turns:
            yield from self._transposed(turn)
        for move, sent in moved_rows(graph, batch):
            dims = (*move.rows, *move.operand.nodes)
            yield PlannedCollective("moved", sent, dims, move.source)

    def _addition_to_rows(self, summed: PartialSum) -> Iterator[PlannedCollective]:
        """A sum that adds rows of the batch to others, as messages at the nodes of a graph."""
        rule = self.graph.rule_at(summed.source)
        if summed.backward or not any(map(self.batch.has, summed.unless)):
            return
        if rule.writes is None or not rule.sums:
            return
        value = summed.value
        operand, indices, added = summed.source[-1].invars
        devices, others = self.batch.around(summed.node, (*summed.rows, *value.nodes))
        size = value.bytes * summed.times / others
        of_added = atom_bytes(added) / others
        if atom_bytes(added) < atom_bytes(operand):
            # All rows that are added are gathered, with their indices. Their cotangents are looked
            # up among all rows.
            sent = all_gather(devices, of_added + atom_bytes(indices))
            sent += value.grad * all_reduce(devices, of_added)
            sent *= summed.times
        else:
            # Each device adds its own rows to all others, and XLA all-reduces the result. The
            # cotangent of the result is all-gathered.
            sent = self._sum(devices, size, self.batch.splits_alike(summed.node, value.nodes))
            sent += value.grad * all_gather(devices, size)
            if not self.graph.created.issuperset(filter(self.batch.has, summed.unless)):
                sent += all_gather(devices, size)  # what they are added to
        yield PlannedCollective("by index", sent, value.nodes, summed.source)

    def _sums(self, sums: Iterable[PartialSum]) -> Iterator[PlannedCollective]:
        """Sums along a dimension of the batch: gradients, lookups in rows, and other sums."""
        batch, hardware = self.batch, self.hardware
        split: list[PartialSum] = []
        for summed in sums:
            if not batch.splits_alike(summed.node, summed.unless):
                split.append(summed)
        gathered: set[int] = set()  # the tables of lookups, by the `id` of the variable
        apart: Collection[Value] = _summed_apart(self.graph, hardware)
        # Gradients are constrained to parts of which several devices have the same, so that XLA
        # sums them over both dimensions of the batch at once.
        is_summed_at_once = len(batch.sets) > 1 and 1 < self.gradient_shards < batch.count
        if is_summed_at_once:
            apart = ()
        # Gradients of all rows are summed together, whether the rows are linked or not.
        all_rows = -1
        is_scattered = scatters_over(hardware, self.gradient_shards)
        # A reduce-scatter is done before a cast, so that fewer bytes are sent.
        for summed in _added_first(
            self.graph, split, apart, lambda node: all_rows, through_casts=not is_scattered
        ):
            dims, source = summed.value.nodes, summed.source
            product = self._product_of(summed.node, source)
            is_gradient = summed.backward and batch.parts(dims) == 1
            if product is not None and not is_gradient and product.sums_parts == summed.backward:
                # An operand that is split along another dimension is gathered, and not summed.
                # Where parts are summed, the cotangent of the sum is gathered for those of both
                # operands.
                continue
            halo = self._interpolated(summed)
            if halo is not None:
                yield PlannedCollective("halos", halo, dims, source, summed.backward)
                continue
            size = _sum_bytes(self.graph, summed, apart)
            # Results without rows are gradients, which are summed after loops.
            if is_gradient:
                devices, others = batch.around(summed.node, dims)
                # Where each use is summed alone, so is each dimension of the batch.
                if hardware.adds_first or is_scattered or is_summed_at_once:
                    devices = batch.count
                sent = gradient_sum(hardware, devices, self.gradient_shards, size / others)
                yield PlannedCollective("gradients", sent, dims, source, backward=True)
            elif not summed.backward and self._looks_up_other_rows(summed):
                table = id(source[-1].invars[0])  # XLA gathers it once for all lookups
                yield self._lookup(summed, is_first=table not in gathered)
                gathered.add(table)
            else:
                devices, others = batch.around(summed.node, (*summed.rows, *dims))
                # A sum over parts of examples may be split over the same devices.
                is_divided = batch.splits_examples and batch.splits_alike(summed.node, dims)
                sent = self._sum(devices, size / others, is_divided)
                yield PlannedCollective("sums over the batch", sent, dims, source, summed.backward)

    def _sum(self, devices: int, size: int | float, is_divided: bool) -> int | float:
        """Bytes that each device sends for a sum; if the result is divided, it needs a part."""
        if is_divided and scatters_over(self.hardware, devices):
            return all_gather(devices, size)
        return all_reduce(devices, size)

    def _interpolated(self, summed: PartialSum) -> int | float | None:
        """Bytes of the halos in place of a sum, if elements depend on few others of an example."""
        dims, equation = summed.value.nodes, summed.source[-1]
        split = self.batch.set_of(summed.node)
        interpolation = self.graph.interpolation(equation)
        if interpolation is None or split is None or not self.batch.splits_examples:
            return None
        other = interpolation.dim  # along which the example is split too
        if not summed.backward:
            other = interpolation.targets[other]
        size = _interpolation_halo(self.graph, equation, split)
        if size is None or not split.has(dims[other]):
            return None
        _, others = self.batch.around(summed.node, (*summed.rows, *dims))
        return size * summed.times / others

    def _looks_up_other_rows(self, summed: PartialSum) -> bool:
        """Whether devices look up rows of the batch, as those of nodes at edges of a graph."""
        has_rows = any(map(self.batch.has, summed.value.nodes))
        return has_rows and self.graph.rule_at(summed.source).is_lookup

    def _lookup(self, summed: PartialSum, *, is_first: bool) -> PlannedCollective:
        """An array is all-gathered for all lookups in it, and its cotangent is summed.

        XLA alone, for rows of a batch, sums the cotangent of each lookup over devices. If less is
        looked up than there is, it sums what each device finds, and gathers cotangents and indices.
        """
        value = summed.value
        table, indices, *_ = summed.source[-1].invars
        devices, others = self.batch.around(summed.node, (*summed.rows, *value.nodes))
        if value.bytes < atom_bytes(table) and not self.batch.splits_examples:
            of_result = value.bytes / others
            sent = all_reduce(devices, of_result)
            sent += value.grad * all_gather(devices, of_result + atom_bytes(indices))
            sent *= summed.times
            return PlannedCollective("by index", sent, value.nodes, summed.source)
        size = atom_bytes(table) * summed.times / others
        sent = 0.0
        if is_first:
            sent += all_gather(devices, size)
        if value.grad and (is_first or not self.batch.splits_examples):
            sent += self._sum(devices, size, True)
        return PlannedCollective("by index", sent, value.nodes, summed.source)

    @cached_property
    def _products(self) -> dict[SourcePath, _Product]:
        return _products_of_parts(self.graph, self.batch)

    def _product_of(self, node: int, source: Source) -> _Product | None:
        """The product that an operation is, split along a node."""
        return self._products.get((id(self.batch.set_of(node)), *path_of(source)))

    def _of_product(self, product: _Product) -> Iterator[PlannedCollective]:
        """What is gathered for a product: an operand, or the cotangent of a sum of parts.

        An operand is gathered again for the derivative.
        """
        work, count = product.work, product.split.count
        equation = work.source[-1]
        if product.sums_parts and work.grads:
            _, others = self.batch.around(product.nodes[0], work.nodes)
            sent = all_gather(count, atom_bytes(equation.outvars[0]) / others) * work.times
            yield PlannedCollective("compared", sent, work.nodes, work.source, backward=True)
        for side in product.gathered:
            dims = work.of[side]
            _, others = self.batch.around(product.nodes[side], (*work.rows, *dims))
            sent = all_gather(count, atom_bytes(equation.invars[side]) / others)
            times = work.times * (work.forwards + (work.grads > 0))
            yield PlannedCollective("written", sent * times, dims, work.source)

    def _gather(self, gather: BatchGather) -> Iterator[PlannedCollective]:
        """An operand that is needed as a whole along a dimension of the batch."""
        batch, node = self.batch, gather.node
        if not batch.has(node) or self._product_of(node, gather.source) is not None:
            return
        if batch.splits_alike(node, gather.along):
            return
        if gather.preceding and not batch.splits_alike(node, gather.preceding):
            return
        cause: Cause = "written"
        if gather.preceding and self.graph.rule_at(gather.source).writes is None:
            cause = "compared"  # as in a table of all pairs of examples
        dims = (*gather.rows, *gather.operand.nodes)
        devices, others = batch.around(node, dims)
        sent = all_gather(devices, gather.operand.bytes / others) * gather.times
        yield PlannedCollective(cause, sent, dims, gather.source)

    def _halo(self, halo: Halo) -> PlannedCollective:
        cause, sent, dims = "halos", halo.bytes, (*halo.rows, *halo.operand.nodes)
        devices, others = self.batch.around(halo.node, dims)
        if not self.batch.splits_alike(halo.node, [halo.target]):
            # Its size does not divide. The compiler may gather the array.
            cause, sent = "uneven", all_gather(devices, 2 * halo.operand.bytes)
        elif halo.whole:
            # An all-to-all sends what a device has, but for its own part. The spectrum of an
            # example stays as it is, so that the inverse transform has the second one.
            cause, sent = "turned", all_gather(devices, halo.bytes) / devices
            if not self.batch.splits_examples:
                sent *= 2
        return PlannedCollective(cause, sent / others * halo.times, dims, halo.source)

    def _transposed(self, turn: Reshard) -> Iterator[PlannedCollective]:
        """A table of all pairs of rows that is combined with its transpose, split along the other
        dimension."""
        is_product = (*turn.rows, *turn.operand.nodes) in self.graph.large_result_bytes
        if is_product and self.batch.splits_examples:
            return  # split along the dimension that comes first after it: `orders_of_products`
        rule = self.graph.rule_at(turn.source)
        for split in self.batch.sets:
            before, after = (_first_in(split, value.nodes) for value in (turn.operand, turn.result))
            if before is None or after is None:
                continue
            if rule.operands[0][before] == rule.results[0][after]:
                continue
            dims = turn.operand.nodes
            devices, others = self.batch.around(dims[before], (*turn.rows, *dims))
            sent = all_gather(devices, turn.operand.bytes / others) / devices
            times = turn.times + turn.backward
            yield PlannedCollective("transposed", sent * times, dims, turn.source)

    def _turned_back(self, work: Work) -> Iterator[PlannedCollective]:
        """A product of a spectrum, which is split like the field.

        The spectrum and the result are exchanged once each, and their cotangents too.
        """
        equation = work.source[-1]
        for atom, dims in zip(equation.invars, work.of, strict=False):
            node = next(filter(self.batch.has, dims), None)
            if node is None or not is_spectrum(atom, dims, self.graph, self.batch):
                continue
            devices, others = self.batch.around(node, (*work.rows, *dims))
            size = sum(map(atom_bytes, (atom, *equation.outvars))) / others
            sent = 2 * work.times * all_gather(devices, size) / devices
            yield PlannedCollective("turned", sent, work.nodes, work.source)
            return


def _products_of_parts(graph: Graph, batch: BatchDims) -> dict[SourcePath, _Product]:
    """The products of split examples with each other, by how the examples are split too."""
    products: dict[SourcePath, _Product] = {}
    if not batch.splits_examples:
        return products
    for work in graph.works:
        equation = work.source[-1]
        rule = graph.rule_at(work.source)
        interpolation = graph.interpolation(equation)
        if not rule.is_product or not work.forward:
            continue
        for split in batch.sets:
            first, second = (_first_in(split, dims) for dims in work.of)
            if first is None or second is None:
                continue
            halo = _interpolation_halo(graph, equation, split)
            if interpolation is not None and halo is not None:
                target = work.own[interpolation.targets[interpolation.dim]]
                # With a constant matrix, of which an element depends on its neighbours.
                if split.has(target):
                    continue
            kept: Dimension | None = None
            of_result = _first_in(split, work.own[: len(rule.results[0])])
            if of_result is not None:
                kept = rule.results[0][of_result]
            dimensions = rule.operands[0][first], rule.operands[1][second]
            sums_parts, gathered = rule.split_product(dimensions, kept)
            nodes = work.of[0][first], work.of[1][second]
            product = _Product(work, split, nodes, sums_parts, tuple(gathered), kept is not None)
            products[id(split), *path_of(work.source)] = product
    return products


def _interpolation_halo(graph: Graph, equation: JaxprEqn, split: SplitNodes) -> int | float | None:
    """Bytes of the halos of an interpolation along a split dimension; None of others."""
    interpolation = graph.interpolation(equation)
    halo = interpolation and interpolation.halo(split.count)
    if interpolation is None or halo is None:
        return None
    return atom_bytes(equation.invars[interpolation.place]) / interpolation.size * sum(halo)


def _first_in(split: SplitNodes, nodes: Nodes) -> int | None:
    """The place of the first dimension that is split."""
    return next((place for place, node in enumerate(nodes) if split.has(node)), None)


def gathered_bytes(
    graph: Graph, value: Value, devices: int, *, at_once: bool = False
) -> int | float:
    """Bytes that each device sends in a step to all-gather an array that is stored in parts.

    Layers of a scan and rematerialised ones are gathered in the backward pass too, unless all are
    gathered `at_once`. What a loop closes over is gathered before it, and what the program casts is
    gathered after that.
    """
    size = value.bytes * cast_share(graph, value)
    if not at_once:
        size *= once(_count_gathers, graph, value)
    if value in graph.looked_up and not _is_gathered_for_lookups(graph, value):
        size += value.bytes
    return all_gather(devices, size)


def _is_gathered_for_lookups(graph: Graph, value: Value) -> bool:
    """Whether lookups in a table have it as it is gathered for its first use.

    Not if that is a cast, or in a function with a derivative of its own.
    """
    if value.nodes not in graph.first_whole_use:
        return True
    source = graph.gathered_for(value).source
    for flow in map(control_flow, source):
        if isinstance(flow, Call) and flow.has_derivative:
            return False
    return cast_share(graph, value) == 1


def cast_share(graph: Graph, value: Value) -> float:
    """The part of an array's bytes that it has where it is gathered and its gradient is summed.

    Less than one if the program casts it before its first use.
    """
    source = graph.gathered_for(value).source
    for flow in map(control_flow, source[:-1]):
        is_closed_over = isinstance(flow, Scan) and value.nodes in graph.first_use
        has_derivative = isinstance(flow, Call) and flow.has_derivative
        if is_closed_over or has_derivative or isinstance(flow, While):
            return 1.0
    if not source or primitive_name(source[-1]) != "convert_element_type":
        return 1.0
    return min(1.0, struct_of(source[-1].outvars[0]).dtype.itemsize / value.itemsize)


def _count_gathers(graph: Graph, value: Value) -> int:
    """How often a step gathers an array, forward and in the backward pass."""
    if not value.grad:
        return 1
    cursor, gathers = graph.gathered_for(value), 1
    is_loop, is_stacked = graph.is_looped(value), graph.is_stacked(value)
    # The compiler gathers the layers of a scan without a loop once, if it keeps them.
    is_again, is_inside = is_loop, False
    for equation in cursor.source:
        match control_flow(equation):
            case Call(kind=CallKind.REMAT) as region:
                if keeps_gathers(region):
                    return gathers
                if not is_loop:
                    # Without a loop, it finds that a region computes the same again.
                    return gathers + bool(region.prevent_cse)
                if is_inside:
                    return gathers + 1
                # Its layers are gathered for the loop that it runs again, too.
                gathers += cursor.forwards > gathers
            case Scan() | While() if not is_stacked:
                return gathers  # it closes over the array
            case Scan() as scan:
                is_inside = True
                for inner in iter_equations(open_jaxpr(scan.body)):
                    flow = control_flow(inner)
                    if isinstance(flow, Call) and flow.kind is CallKind.REMAT:
                        is_again &= recomputes_little(flow)
    return gathers + is_again


def _summed_apart(graph: Graph, hardware: Hardware) -> set[Value]:
    """The origins of values whose cotangents of several uses are each summed over devices.

    Compilers that add cotangents first do so from the last use on. Where that is no sum over
    devices, as of a residual connection around projections of the same value, it is in their way.
    """
    apart: set[Value] = set()
    added: set[Value] = set()
    for summed in graph.partial_sums.values():
        if summed.backward:
            origin = graph.origins(summed.value)[-1]
            apart.add(origin)
            # Operations without a rule are not known to use a value.
            last = graph.last_use.get(origin, summed.source)
            if hardware.adds_first and last is summed.source:
                added.add(origin)
    return apart - added


def _added_first(
    graph: Graph,
    sums: Iterable[PartialSum],
    apart: Collection[Value],
    class_of: Callable[[int], int],
    *,
    through_casts: bool = True,
) -> Iterator[PartialSum]:
    """Partial sums, one for all uses of an array if the compiler adds their cotangents first.

    Where it is used transposed, cast, reshaped or cut, these cotangents are added too, but for
    cast ones if not `through_casts`. `class_of` gives the class of a node; sums along different
    classes remain apart.
    """
    together: dict[object, list[PartialSum]] = {}
    for place, summed in enumerate(sums):
        key: object = place
        # A sum that makes the value is another one than that of its cotangent.
        if summed.backward and graph.origins(summed.value)[-1] not in apart:
            origin = graph.origins(summed.value, through_casts=through_casts)[-1]
            key = origin, class_of(summed.node)
        together.setdefault(key, []).append(summed)
    for first, *others in together.values():
        used = list(dict.fromkeys(each.value for each in (first, *others)))
        # They are added as the nearest array that all of them come from.
        common = graph.origins(first.value)
        for value in used:
            origins = graph.origins(value)
            common = [origin for origin in common if origin in origins]
        if common[0].bytes < sum(value.bytes for value in used):
            yield replace(first, value=common[0])
        else:  # different parts of it
            for each in (first, *others):
                if each.value in used:
                    used.remove(each.value)
                    yield each


def _sum_bytes(graph: Graph, summed: PartialSum, apart: Collection[Value]) -> int | float:
    """Bytes that are reduced in a step for one partial sum."""
    size = summed.value.bytes * summed.times
    if graph.origins(summed.value)[-1] not in apart:
        return size
    return size * summed.uses
