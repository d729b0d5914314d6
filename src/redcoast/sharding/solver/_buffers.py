"""Buffers of a program, from the operation that writes them to the last one that reads them."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from math import inf

from ..program._graph import Source, Value

WrittenBytes = tuple[int | float, Source]  # bytes, and the operation that writes them
# XLA sums gradients over devices together until there are so many bytes. Until then, each device
# keeps its own part of the sums.
_COMBINED = 30e6


def bytes_of_parts(parts: Iterable[WrittenBytes]) -> int | float:
    return sum(size for size, _ in parts)


@dataclass(frozen=True, eq=False)
class ModelArray:
    """An array of the model, by its bytes on each device.

    `stored` are those that it has between steps, and `gathered` those of the array that it is
    all-gathered into before it is used, or 0. `gradient` are those of its gradient, and `local`
    those of the device's own part of the sum that the gradient is, or 0 if it is no sum over
    devices. `first_use` is an operation that reads it.
    """

    stored: int | float = 0.0
    gathered: int | float = 0.0
    gradient: int | float = 0.0
    local: int | float = 0.0
    first_use: Source = ()

    def part(self, share: float) -> "ModelArray":
        """A slice of the array. Its gradient is written into that of the array."""
        return ModelArray(
            stored=share * self.stored,
            gathered=share * self.gathered,
            local=share * self.local,
            first_use=self.first_use,
        )


@dataclass(eq=False)
class Buffer:
    """Bytes on each device from the time `born` to `last`.

    `parts` are the operations that write them. An argument has none: its bytes are counted
    elsewhere, and `argument_bytes` has them. `parameter` is the array of the model that it is or is
    gathered from, and `reread` whether it can be read from arguments again. `stored_in` is the
    stored array that it is gathered from or a slice of, and `is_layer` whether it is what an
    iteration of a loop gets of such an array. `is_gradient` is whether it is a result.
    `read_narrow` and `read_wide` are whether something reads it in bfloat16 and as it is.
    """

    parts: tuple[WrittenBytes, ...]
    born: int
    last: int
    parameter: ModelArray | None = None
    reread: bool = False
    argument_bytes: int | float = 0.0
    stored_in: "Buffer | None" = None
    is_layer: bool = False
    is_gradient: bool = False
    read_narrow: bool = False
    read_wide: bool = False

    @property
    def bytes(self) -> int | float:
        return bytes_of_parts(self.parts)

    @property
    def size(self) -> int | float:
        """The bytes of the value, whether they are counted here or elsewhere."""
        return self.bytes or self.argument_bytes

    @property
    def is_gathered(self) -> bool:
        """Whether it is an array of the model that is all-gathered before it is used."""
        return self.parameter is not None and self.parameter.gathered > 0

    @property
    def kept(self) -> tuple[WrittenBytes, ...]:
        """The parts as they are in memory: what is read in bfloat16 alone takes half as much."""
        # An array of the model is only cast before it is gathered if that is done before a loop.
        may_be_narrow = self.parameter is None or self.is_layer
        if self.read_wide or not self.read_narrow or not may_be_narrow:
            return self.parts
        return tuple((size / 2, source) for size, source in self.parts)


# The buffers that a value is computed from; one of its own if it is in memory. The tuple itself, by
# its `id`, stands for the value.
Roots = tuple[Buffer, ...]


def union(several: Iterable[Roots]) -> Roots:
    """All buffers, each once, in their order. Of one value alone, these are its own roots."""
    values = list(filter(None, several))
    if len(values) == 1:
        return values[0]
    return tuple(dict.fromkeys(chain.from_iterable(values)))


def is_stored(roots: Roots) -> bool:
    """Whether these are an array of the model as it is stored, in parts that are gathered."""
    return len(roots) == 1 and roots[0].argument_bytes > 0 and roots[0].is_gathered


def parameter_of(roots: Roots) -> ModelArray | None:
    """The array of the model that a value is or is gathered from, if it is one."""
    if len(roots) == 1:
        return roots[0].parameter
    return None


def argument(size: int | float, parameter: ModelArray | None = None) -> Roots:
    """The buffer of an argument."""
    return (Buffer((), 0, 0, parameter, reread=True, argument_bytes=size),)


@dataclass(frozen=True)
class Peak:
    """What is in use when most bytes are.

    `parts` are the bytes of temporaries and the operations that write them, and `gradients` the
    bytes of the gradients that are complete by then.
    """

    parts: tuple[WrittenBytes, ...] = ()
    gradients: int | float = 0.0

    @property
    def temporaries(self) -> int | float:
        return bytes_of_parts(self.parts)

    @property
    def bytes(self) -> int | float:
        return self.temporaries + self.gradients


@dataclass
class Timeline:
    """Buffers over time. `spikes` are the peaks inside of loops, at the time of the loop."""

    size_of: Callable[[Value], int | float]  # bytes on each device
    compiler: str
    gathered_size_of: Callable[[Value], int | float]  # those while a product reads or writes it
    keeps_gradients: bool = True
    now: int = 0
    buffers: list[Buffer] = field(default_factory=list)
    spikes: dict[int, Peak] = field(default_factory=dict)
    # Arrays of the model whose gradient has been written, and whether no sum is to come.
    summed: set[ModelArray] = field(default_factory=set)
    complete: set[ModelArray] = field(default_factory=set)
    # The bytes of the gradients of all uses of an array of the model and of its slices.
    of_uses: dict[ModelArray, int | float] = field(default_factory=dict)
    # Of values that were fused at first and are written later: their roots, and their own buffer.
    fused: dict[int, tuple[Roots, Roots]] = field(default_factory=dict)
    # The roots of values that are computed from one buffer, and are not what it contains.
    others: dict[int, Roots] = field(default_factory=dict)
    # Gradients whose sum over devices is still to come.
    unsummed: list[tuple[Buffer, ModelArray]] = field(default_factory=list)
    unsummed_bytes: int | float = 0.0
    # What the last gradient of an array of the model is computed from.
    postponed: Roots = ()

    def empty(self) -> "Timeline":
        """The timeline of what runs inside of an operation."""
        return Timeline(self.size_of, self.compiler, self.gathered_size_of, self.keeps_gradients)

    def write(self, size: int | float, source: Source) -> Buffer:
        return self.write_parts(((size, source),))

    def write_parts(self, parts: tuple[WrittenBytes, ...]) -> Buffer:
        buffer = Buffer(parts, self.now, self.now)
        self.buffers.append(buffer)
        return buffer

    def read(self, roots: Roots, *, narrow: bool = False) -> None:
        """Reads buffers, as they are or in bfloat16."""
        for buffer in roots:
            buffer.last = self.now
            source: Buffer | None = buffer
            while source is not None:
                source.read_narrow |= narrow
                source.read_wide |= not narrow
                source = source.stored_in

    def fuse(self, roots: Roots, value: Value, source: Source) -> Buffer:
        """Writes a value that is computed from some buffers, which may be written over."""
        self.read(roots)
        self.now += 1
        return self.write(self.size_of(value), source)

    def written(self, roots: Roots) -> Roots:
        """The buffer of a value if it has been written meanwhile, or those it is computed from."""
        _, own = self.fused.get(id(roots), (roots, roots))
        return own

    def computed(self, roots: Roots) -> Roots:
        """The roots of a new value that is computed from some buffers."""
        if not roots or is_stored(roots):
            return roots
        other = (*roots,)  # another object than the roots of the operand
        self.others[id(other)] = other
        return other

    def saved(self, roots: Roots, value: Value, source: Source, begin: int) -> Roots:
        """What a rematerialised region that began at the time `begin` keeps of a value.

        It takes memory if it is read later.
        """
        size = self.size_of(value)
        if self.is_one_buffer(roots, size):
            return roots
        buffer = self.write(size, source)
        buffer.born = buffer.last = begin
        return (buffer,)

    def in_memory(self, roots: Roots, value: Value, source: Source) -> Roots:
        """The one buffer of a value, which is gathered or written first if need be."""
        own = self._in_memory(self.written(roots), value, source)
        if roots:  # all that is computed from no buffer has the same empty tuple
            self.fused[id(roots)] = roots, own
        return own

    def _in_memory(self, roots: Roots, value: Value, source: Source) -> Roots:
        size = self.size_of(value)
        if is_stored(roots):
            (root,) = roots
            gathered = self.write(size, source)
            gathered.parameter, gathered.reread = root.parameter, True
            gathered.stored_in, gathered.is_layer = root, root.is_layer
            return (gathered,)
        if self.is_one_buffer(roots, size):
            return roots
        buffer = self.fuse(roots, value, source)
        # What is computed from arguments alone can be computed again.
        buffer.reread = bool(roots) and all(root.reread for root in roots)
        buffer.parameter = parameter_of(roots)
        return (buffer,)

    def is_one_buffer(self, roots: Roots, size: int | float) -> bool:
        """Whether a value of so many bytes is what one buffer contains."""
        return len(roots) == 1 and id(roots) not in self.others and roots[0].size == size

    def spike(self, peak: Peak) -> None:
        """Adds the peak inside of what runs now."""
        if peak.bytes > self.spikes.get(self.now, Peak()).bytes:
            self.spikes[self.now] = peak

    def use_gradient(self, parameter: ModelArray, size: int | float, source: Source) -> None:
        """Writes the gradient of one use of an array of the model, or of a slice of it.

        The gradients of slices take as much together as that of the array, which is written with
        the first, until there are more of them.
        """
        self.of_uses[parameter] = size + self.of_uses.get(parameter, 0)
        if parameter not in self.summed:
            self.add_gradient(parameter, source)
        elif self.of_uses[parameter] > parameter.local:
            self.add_gradient(parameter, source, share=min(1.0, size / max(1, parameter.local)))

    def add_gradient(
        self,
        parameter: ModelArray,
        source: Source = (),
        *,
        summed: bool = False,
        share: float = 1.0,
    ) -> None:
        """Writes the gradient of an array of the model. It may be `summed` already.

        The cotangents of several uses are added up in one buffer, but on CPUs, where each is summed
        over devices by itself. A later one may be that of a `share` of the array.
        """
        if not max(parameter.gradient, parameter.local):
            return
        if parameter in self.summed:
            if self.compiler != "cpu" or parameter in self.complete or not parameter.local:
                return
            parameter = parameter.part(share)  # whose sum is added to the gradient
        self.summed.add(parameter)
        if summed or not parameter.local:
            self.complete.add(parameter)
            self._write_gradient(parameter)
            return
        buffer = self.write(parameter.local, source or parameter.first_use)
        self.unsummed.append((buffer, parameter))
        self.unsummed_bytes += self._summed_bytes(parameter)
        if self.unsummed_bytes > _COMBINED:
            self.sum_gradients()

    def _summed_bytes(self, parameter: ModelArray) -> int | float:
        """The bytes of the result of the sum of a gradient over devices."""
        if self.compiler == "cpu" or not (parameter.gathered and parameter.gradient):
            return parameter.local
        return parameter.local * parameter.gradient / parameter.gathered  # a reduce-scatter's

    def sum_gradients(self) -> None:
        """Sums the gradients that are not summed over devices yet."""
        self.now += 1
        for buffer, parameter in self.unsummed:
            self.read((buffer,))
            is_slice = not parameter.gradient
            if self.compiler == "cpu" and (parameter.gathered or is_slice):
                # Without a reduce-scatter, the sum is there as a whole too.
                self.write(parameter.local, parameter.first_use)
            self._write_gradient(parameter)
        self.unsummed, self.unsummed_bytes = [], 0.0

    def _write_gradient(self, parameter: ModelArray) -> None:
        buffer = self.write(parameter.gradient, parameter.first_use)
        buffer.is_gradient = self.keeps_gradients

    def finish(self) -> None:
        """Sums the gradients that are left; all are results."""
        self.sum_gradients()
        self.now += 1
        for buffer in self.buffers:
            if buffer.is_gradient:
                self.read((buffer,))

    def peak(self, since: int = 0, until: int | float = inf) -> Peak:
        """What is in use when most bytes are, at any time from `since` to `until`."""
        change: Counter[int] = Counter()
        for buffer in self.buffers:
            if buffer.last >= since:
                size = bytes_of_parts(buffer.kept)
                change[max(buffer.born, since)] += size  # pyright: ignore
                change[buffer.last + 1] -= size  # pyright: ignore
        for time in self.spikes:
            if time >= since:
                change[time] += 0
        total = most = 0.0
        when = since
        for time in sorted(change):
            if time > until:
                break
            total += change[time]
            here = total
            if time in self.spikes:
                here += self.spikes[time].bytes
            if here > most:
                most, when = here, time
        # What is alive then. Gradients are counted by themselves.
        parts: list[WrittenBytes] = []
        gradients = 0.0
        for buffer in self.buffers:
            if not buffer.born <= when <= buffer.last:
                continue
            if buffer.is_gradient:
                gradients += buffer.bytes
            else:
                parts += buffer.kept
        parts += self.spikes.get(when, Peak()).parts
        return Peak(tuple(parts), gradients)
