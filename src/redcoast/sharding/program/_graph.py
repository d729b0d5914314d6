"""The dimensions of a traced program: which are sharded alike, and what sharding them costs."""

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from jax.extend.core import Jaxpr, JaxprEqn

from ...core._jaxpr import is_inexact
from ..operations import TURNED, Rule, opaque_rule, rule_of
from ._interpolation import Constants, Interpolation
from ._remat import Region

Nodes = tuple[int, ...]  # of an array: the node of each dimension
# An equation, after the loops, branches and calls around it, outermost first.
Source = tuple[JaxprEqn, ...]
SourcePath = tuple[int, ...]  # the `id`s of a source's equations: layers may have the same jaxpr
BytesByNodes = defaultdict[Nodes, float]


@dataclass(frozen=True, eq=False)
class Value:
    """An array of the program, with a node for each dimension; linked nodes are sharded alike.

    `grad` is whether a gradient flows into it, so that its cotangent costs something.
    `cotangent_sums` is how often the cotangent is summed over devices in a step; None means at
    every use.
    """

    nodes: Nodes
    shape: tuple[int, ...]
    itemsize: int
    grad: bool
    cotangent_sums: int | float | None = None

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.itemsize


def path_of(source: Sequence[object]) -> SourcePath:
    return tuple(map(id, source))


def have_grad(values: Iterable[Value]) -> bool:
    """Whether a gradient flows into any of the values."""
    return any(value.grad for value in values)


@dataclass(frozen=True)
class PartialSum:
    """Partial sums: sharding `node` needs an all-reduce of `value`, or `backward` of its cotangent.

    They are summed `times` times in a step. In the backward pass, `uses` is the number of uses of
    the value whose cotangents are added. `unless` are other dimensions of the arrays, which take
    the devices first: if `node` and one of them are both dimensions of the batch, `node` is not
    sharded, and there are no partial sums. `rows` are as in `Cursor`.
    """

    node: int
    value: Value
    times: int | float
    backward: bool
    uses: int = 1
    unless: Nodes = ()
    source: Source = ()
    rows: Nodes = ()


@dataclass(frozen=True)
class Reshard:
    """A dimension of an operand that becomes one of the result, with other elements on each device.

    Among `Graph.reshards`, no sharding over `model` survives it; among `Graph.moves`, rows stay
    sharded, and some of them are sent. It is `before` in the operand and `after` in the result, and
    None where it ends or begins. The array is gathered or moved `times` times in a step, forward
    and in each rematerialisation that runs it again, and its cotangent `backward` times.
    """

    operand: Value
    before: int | None
    result: Value
    after: int | None
    times: int | float
    backward: int | float
    source: Source = ()
    rows: Nodes = ()  # of the loops around it


@dataclass(frozen=True)
class HostCall:
    """An operation that calls a function on the host of one device.

    `operands` are gathered there, and `results` sent to all devices. In a branch or a loop
    (`is_inside`), as of `eqx.error_if`, each device may call it for its own rows, and if one of
    `along` counts rows, as `jax.vmap` of such a function does.
    """

    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    times: int | float
    is_inside: bool
    source: Source = ()
    along: Nodes = ()


@dataclass(frozen=True)
class ProgramConstraint:
    """A sharding constraint of the program's own: for each dimension the axes, or None if any.

    The array becomes so sharded `times` times in a step, forward and in each rematerialisation.
    Its cotangent has this sharding, and becomes sharded as the array was before `backward` times.
    """

    value: Value
    axes: tuple[tuple[str, ...] | None, ...]
    times: int | float
    backward: int | float
    source: Source = ()


@dataclass(frozen=True)
class BatchGather:
    """An operand that is gathered `times` times if `node` is a dimension of the batch.

    With `preceding`, these precede `node` in the result, such as in a table of all pairs of
    examples, and the operand is only gathered if one of them is a dimension of the batch too. It is
    not gathered if one of `along` is one.
    """

    operand: Value
    node: int
    preceding: Nodes
    along: Nodes
    times: int | float
    source: Source = ()
    rows: Nodes = ()  # of the loops around it


@dataclass(frozen=True)
class Halo:
    """Elements of `operand` at the edges of a part along `node`, which its neighbour needs.

    `target` is the dimension of the result. `bytes` are those at one edge for each of the `times`
    that the operation runs forward, with its rematerialisation and its derivative. If the operand
    is needed as a `whole` along `node`, it is split along another dimension, and back again.
    """

    operand: Value
    node: int
    target: int
    bytes: int | float
    times: int | float
    source: Source = ()
    whole: bool = False
    rows: Nodes = ()  # of the loops around it


@dataclass(frozen=True)
class Work:
    """Floating point operations that are divided among devices if one of `nodes` is sharded.

    `flops` are those of a step, and `forward` those of its forward pass, in which the operation
    runs `times` times. With rematerialisation, it runs `forwards` times as often. `rows`, the first
    of `nodes`, are as in `Cursor`. `of` are the nodes of each operand, and `grads` is the
    number of operands that a gradient flows into.
    """

    nodes: Nodes
    flops: int | float
    forward: int | float
    of: tuple[Nodes, ...]
    source: Source = ()
    grads: int = 0
    times: int | float = 1
    forwards: int | float = 1
    rows: Nodes = ()

    @property
    def own(self) -> Nodes:
        """The dimensions of one run of the operation."""
        return self.nodes[len(self.rows) :]


@dataclass(frozen=True)
class Cursor:
    """Where the walk through a program is: an equation, and how what it does counts.

    - `regions`: for the jaxpr of the equation, what is used of it, what the loss depends on, and
      what each rematerialised region around it recomputes.
    - `needed`: what each of `regions` needs of the jaxprs that the equation calls.
    - `rows`: the nodes that scans around the equation go along, if their iterations are independent
        as those of `lax.map`. The values of an iteration lack these dimensions.
    """

    regions: tuple[Region, ...] = ()
    source: Source = ()  # the equation, after those around it
    times: int | float = 1.0  # how often it runs in the forward pass of a step
    forwards: int | float = 1.0  # one, and one more for each rematerialisation that runs it again
    is_saved: bool = True  # whether its results may be saved for the backward pass
    needed: tuple[dict[Jaxpr, Region], ...] = ()
    rows: Nodes = ()

    @property
    def runs(self) -> int | float:
        """How often the equation runs in a step, in rematerialised regions too."""
        return self.times * self.forwards


@dataclass
class Graph:
    """The nodes of a program, with what links them and what sharding them costs."""

    sizes: list[int] = field(default_factory=list)
    blocked: set[int] = field(default_factory=set)  # never tensor-parallel
    # Blocked nodes along which an example can be split: elements depend on few others, or the array
    # is split along another dimension during the operation.
    near: set[int] = field(default_factory=set)
    stacks: set[int] = field(default_factory=set)  # blocked nodes that count a scan's layers
    unrolled: set[int] = field(default_factory=set)  # those of a scan that does not loop
    mapped: set[int] = field(default_factory=set)  # those of a scan of independent iterations
    # First dimensions that are divided, as 12 layers into 6 groups of 2, or joined from parts: that
    # of all, and its parts.
    groupings: list[tuple[int, Nodes]] = field(default_factory=list)
    singled: set[int] = field(default_factory=set)  # those of which single elements are taken
    created: set[int] = field(default_factory=set)  # created by the program: noise, zeros, copies
    of_constants: set[int] = field(default_factory=set)  # nodes of arrays that are closed over
    # The axes that the program itself constrains a dimension to; `()` if it is replicated.
    constrained: dict[int, tuple[str, ...]] = field(default_factory=dict)
    links: list[tuple[int, int]] = field(default_factory=list)
    soft_links: list[tuple[int, int]] = field(default_factory=list)
    partial_sums: dict[object, PartialSum] = field(default_factory=dict)
    reshards: list[Reshard] = field(default_factory=list)  # of arrays sharded over `model`
    moves: list[Reshard] = field(default_factory=list)  # of rows, which stay sharded
    # Arrays of which two dimensions of one size are swapped, and those of them that are combined
    # with other arrays, as in `x + x.T`.
    transposed: dict[Value, Reshard] = field(default_factory=dict)
    turns: list[Reshard] = field(default_factory=list)
    host_calls: list[HostCall] = field(default_factory=list)
    constraints: list[ProgramConstraint] = field(default_factory=list)
    batch_gathers: list[BatchGather] = field(default_factory=list)
    halos: list[Halo] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    # The dimensions that an array has together, in the order of the program.
    together: dict[Nodes, None] = field(default_factory=dict)
    # Bytes of values, by their dimensions: what is read from and written to memory, what is saved
    # for the backward pass, and the results of contractions.
    memory_traffic: BytesByNodes = field(default_factory=lambda: defaultdict(float))
    saved: BytesByNodes = field(default_factory=lambda: defaultdict(float))
    large_result_bytes: BytesByNodes = field(default_factory=lambda: defaultdict(float))
    # By the dimensions of a value: the first operation that reads it, and the first but lookups.
    first_use: dict[Nodes, Cursor] = field(default_factory=dict)
    first_whole_use: dict[Nodes, Cursor] = field(default_factory=dict)
    looked_up: set[Value] = field(default_factory=set)  # tables
    last_use: dict[Value, Source] = field(default_factory=dict)  # of origins with a cotangent
    # What arrays with a cotangent are rearranged from: transposed, cast, reshaped or cut, or closed
    # over by a loop after which their cotangents are summed.
    rearranged: dict[Value, Value] = field(default_factory=dict)
    # What is known of the constants that an equation reads, by its `id`.
    constants: dict[int, Constants] = field(default_factory=dict)
    unknown: Counter[str] = field(default_factory=Counter)
    rules: dict[int, Rule] = field(default_factory=dict)  # that were asked for, by the same
    # By the `id` of a scan, how often it runs in the forward pass, and what its body closes over.
    scans: dict[int, tuple[int | float, Sequence[Value]]] = field(default_factory=dict)
    # The part of a scan's iterations that one device runs, by the `id` of the equation.
    shares: Mapping[int, float] = field(default_factory=dict)
    cursor: Cursor = Cursor()

    def node(self, size: int, *, blocked: bool = False, created: bool = False) -> int:
        node = len(self.sizes)
        self.sizes.append(size)
        if blocked:
            self.block(node)
        if created:
            self.created.add(node)
        return node

    def block(self, node: int, *, near: bool = False) -> None:
        """Records that a node is never tensor-parallel.

        If `near`, an example can still be split along it, unless another operation blocks it.
        """
        if not near:
            self.near.discard(node)
        elif node not in self.blocked:
            self.near.add(node)
        self.blocked.add(node)

    def value(
        self,
        aval: object,
        nodes: Nodes | None = None,
        *,
        grad: bool = False,
        cotangent_sums: int | float | None = None,
    ) -> Value:
        """Adds a value of an abstract shape; without `nodes`, each dimension is a new one."""
        shape = tuple(getattr(aval, "shape", ()))
        if nodes is None:
            nodes = tuple(map(self.node, shape))
        if len(nodes) > 1:
            self.together[nodes] = None
        itemsize = getattr(getattr(aval, "dtype", None), "itemsize", 0)
        return Value(nodes, shape, itemsize, grad and is_inexact(aval), cotangent_sums)

    def link(self, a: int, b: int) -> None:
        if a != b:
            self.links.append((a, b))

    def add_partial_sum(
        self, node: int, value: Value, *, backward: bool = False, unless: Nodes = ()
    ) -> None:
        """Records that sharding `node` makes partial sums of `value`, or of its cotangent."""
        if (backward and not value.grad) or not self.cursor.times:
            return
        times, uses = self.cursor.times, 1
        rows = self.cursor.rows
        key: object = (value, node, unless)
        if not backward:
            times *= self.cursor.forwards
            key = len(self.partial_sums)  # each is summed by itself
        # Accumulated in a loop, and summed over devices after it.
        elif value.cotangent_sums is not None:
            times, rows = value.cotangent_sums, ()
        elif key in self.partial_sums:
            uses += self.partial_sums[key].uses
        self.partial_sums[key] = PartialSum(
            node, value, times, backward, uses, unless, self.cursor.source, rows
        )

    def sum_after(self, scans: Iterable[JaxprEqn], is_rows: Callable[[int], bool]) -> None:
        """Records that gradients of constants are summed over rows once after each scan."""
        for scan in scans:
            times, consts = self.scans[id(scan)]
            inside: list[object] = []  # sums of gradients in its iterations
            for key, partial in self.partial_sums.items():
                if not partial.backward or not is_rows(partial.node):
                    continue
                if any(equation is scan for equation in partial.source):
                    inside.append(key)
            if not inside:
                continue
            removed = list(map(self.partial_sums.pop, inside))
            for value in filter(operator.attrgetter("grad"), consts):
                partial = replace(removed[0], value=value, times=times, uses=1, unless=())
                self.partial_sums[value, partial.node, ()] = partial

    def is_stacked(self, value: Value) -> bool:
        """Whether a scan goes over an array, one layer after the other."""
        return not self.stacks.isdisjoint(value.nodes)

    def is_looped(self, value: Value) -> bool:
        """Whether a loop does, and not a scan that is unrolled."""
        return self.is_stacked(value) and self.unrolled.isdisjoint(value.nodes)

    def first_use_of(self, value: Value) -> Cursor:
        """The first operation that reads an array, or one layer of it."""
        if value.nodes not in self.first_use and self.is_stacked(value):
            return self.first_use.get(value.nodes[1:], Cursor())
        return self.first_use.get(value.nodes, Cursor())

    def gathered_for(self, value: Value) -> Cursor:
        """The operation that an array is gathered for. Lookups in it may share what others need."""
        return self.first_whole_use.get(value.nodes, self.first_use_of(value))

    def origins(self, value: Value, *, through_casts: bool = True) -> list[Value]:
        """An array, what it is rearranged from, and so on."""
        origins = [value]
        while origins[-1] in self.rearranged:
            origin = self.rearranged[origins[-1]]
            if not through_casts and origin.itemsize != value.itemsize:
                break
            origins.append(origin)
        return origins

    def rule_at(self, source: Source) -> Rule:
        """The rule of an operation. A loop, which has none, needs its arrays as a whole."""
        equation = source[-1]
        if id(equation) not in self.rules:
            self.rules[id(equation)] = rule_of(equation) or opaque_rule(equation)
        return self.rules[id(equation)]

    def interpolation(self, equation: JaxprEqn) -> Interpolation | None:
        """What an equation interpolates; None for others."""
        constants = self.constants.get(id(equation))
        return constants and constants.interpolation(equation)

    def link_softly(self, before: int, after: int) -> None:
        """Links a node to the one that rows go on in after a cut or a join.

        A batch is sharded again there, since the operations that follow act on each example.
        Parameters are not.
        """
        self.soft_links.append((before, after))

    def add_batch_gather(
        self, operand: Value, node: int, *, preceding: Nodes = (), along: Nodes = ()
    ) -> None:
        """Records that an operand is needed as a whole along `node`, if that counts rows."""
        cursor = self.cursor
        self.batch_gathers.append(
            BatchGather(operand, node, preceding, along, cursor.runs, cursor.source, cursor.rows)
        )

    def add_reshard(
        self, operand: Value, before: int | None, result: Value, after: int | None
    ) -> None:
        """Records that `before` of `operand` does not stay sharded as `after` of `result`."""
        self.reshards.append(self._reshard(operand, before, result, after))
        if before is not None and after is not None:
            self.link_softly(before, after)

    def add_move(self, operand: Value, node: int, result: Value, target: int | None) -> None:
        """Records that elements along `node` change their places, or are needed as a whole."""
        self.moves.append(self._reshard(operand, node, result, target))

    def add_transposed(self, operand: Value, result: Value) -> None:
        """Records that two dimensions of one size are swapped."""
        self.transposed[result] = self._reshard(operand, None, result, None)

    def _reshard(
        self, operand: Value, before: int | None, result: Value, after: int | None
    ) -> Reshard:
        cursor = self.cursor
        backward = cursor.times * operand.grad
        runs, source, rows = cursor.runs, cursor.source, cursor.rows
        return Reshard(operand, before, result, after, runs, backward, source, rows)

    def add_host_call(
        self,
        operands: Sequence[Value],
        results: Sequence[Value],
        *,
        is_inside: bool,
        along: Nodes = (),
    ) -> None:
        """Records that a function runs on the host of one device.

        What an earlier one returns is there already.
        """
        sent = list(operands)
        for place, call in enumerate(self.host_calls):
            sent = [value for value in sent if value not in call.results]
            still_sent = tuple(value for value in call.results if value not in operands)
            self.host_calls[place] = replace(call, results=still_sent)
        cursor = self.cursor
        call = HostCall(tuple(sent), tuple(results), cursor.runs, is_inside, cursor.source, along)
        self.host_calls.append(call)

    def add_halo(self, operand: Value, node: int, result: Value, target: int, count: int) -> None:
        """Records that `target` of a result needs `count` neighbours along `node` of an operand.

        Halos are those of the operand, which are kept for the gradient of a kernel, and in the
        derivative those of its cotangent.
        """
        self.link_softly(node, target)
        elements = max(1, self.sizes[node])
        whole = count == TURNED
        width = elements if whole else min(count, elements)
        at_edge = operand.bytes / elements * width
        of_cotangent = at_edge
        if whole:
            of_cotangent = result.bytes  # the cotangent of a transform is that of its result
        size = at_edge * self.cursor.forwards + operand.grad * of_cotangent
        times, source, rows = self.cursor.times, self.cursor.source, self.cursor.rows
        self.halos.append(Halo(operand, node, target, size, times, source, whole, rows))

    def add_bytes(self, by_nodes: BytesByNodes, value: Value, passes: int | float = 1) -> None:
        """Adds the bytes of a value, as often as the equation runs, to those of its nodes."""
        nodes = (*self.cursor.rows, *value.nodes)
        by_nodes[nodes] += value.bytes * self.cursor.times * passes

    def add_saved(self, value: Value) -> None:
        """Records a value that is kept for the backward pass, unless it is recomputed there."""
        if value.grad and self.cursor.is_saved:
            self.add_bytes(self.saved, value)

    def add_work(
        self, nodes: Nodes, flops: int | float, passes: int | float, *operands: Value
    ) -> None:
        """Adds `flops` operations for each of the forward and backward `passes`."""
        cursor = self.cursor
        forward = flops * cursor.times
        self.works.append(
            Work(
                nodes=(*cursor.rows, *nodes),
                flops=forward * passes,
                forward=forward,
                of=tuple(value.nodes for value in operands),
                source=cursor.source,
                grads=sum(value.grad for value in operands),
                times=cursor.times,
                forwards=cursor.forwards,
                rows=cursor.rows,
            )
        )
