"""What devices send: for functions on the host, and for shardings that the program asks for.

XLA runs a function on the host of one device: its operands are gathered there, and its results go
to all devices. To reach another sharding, it gathers dimensions that are split less, exchanges
parts between a dimension that is split less and one that is split as much more, or permutes
devices. If none of these applies, it gathers the entire array on every device, which it calls an
involuntary full rematerialization.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ...core._program_lines import line_of
from .._mesh_axes import parts, used_axes
from ..program._graph import Asked, Dims, Source
from ..solver._hardware import all_gather, all_reduce
from ..solver._strategy import Decision
from ..tree._overrides import axes_of_spec, spec_parts
from ._data import TrafficKind
from ._text import scaled

Axes = tuple[str, ...]
Sizes = Mapping[str, int]
Spec = Sequence[Axes]  # the axes of each dimension


@dataclass(frozen=True)
class Sent:
    """Bytes that each device sends in a step over some axes, and the operation that causes it."""

    axes: Axes
    kind: TrafficKind
    cause: str
    bytes: int | float
    source: Source = ()


def sent_to_hosts(decision: Decision) -> Iterator[Sent]:
    """What functions on the host receive and return, but for gathers over tensor-parallel axes."""
    sizes = decision.sizes
    rows = used_axes(decision.batch_axes, sizes)
    everyone = used_axes(tuple(sizes), sizes)
    for call in decision.program.graph.host_calls:
        values = (*call.operands, *call.results)
        sharded = any(decision.is_parallel(value.dims) for value in values)
        if call.is_inside and not sharded:
            continue  # each device calls it for its own rows
        cause = "functions on the host: what they receive and return"
        for value in call.operands:
            size = all_gather(decision.batch.parts(value.dims), value.bytes) * call.times
            yield Sent(rows, "activations", cause, size, call.source)
        for value in call.results:
            size = all_reduce(parts(everyone, sizes), value.bytes) * call.times
            yield Sent(everyone, "activations", cause, size, call.source)


def sent_as_asked(decision: Decision) -> Iterator[Sent]:
    """What is sent to reach the shardings that the program itself asks for."""
    for asked, change in _changes(decision):
        over = used_axes(axes_of_spec(change.before), decision.sizes)
        cause = "shardings that the program asks for"
        yield Sent(over, "activations", cause, change.sent * asked.times, asked.source)


def find_gathered_whole(decision: Decision) -> tuple[str, ...]:
    """Sentences on the lines at which every device sends all that it has of an array."""
    texts: list[str] = []
    sizes: Counter[str] = Counter()
    for sent in sent_to_hosts(decision):
        sizes[line_of_source(sent.source)] += round(sent.bytes)
    for line, size in sizes.most_common():
        if size:
            texts.append(
                f"{line} calls a function on the host, such as `jax.pure_callback` or "
                f"`eqx.error_if`. It runs for one device: each device sends {scaled(size)} in a "
                "step, since operands are gathered there and results are sent to all devices."
            )
    for asked, change in _changes(decision):
        if change.gathers_all:
            line = line_of_source(asked.source)
            texts.append(
                f"{line} asks for a sharding that the compiler cannot reach step by step: it "
                f"gathers the entire array, {scaled(asked.value.bytes)}, on every device. "
                "A constraint in between, which moves one axis at a time, avoids that."
            )
    return tuple(dict.fromkeys(texts))


def line_of_source(source: Source) -> str:
    """The line of an operation, or else of the innermost call around it, to begin a sentence."""
    lines = map(line_of, reversed(source))
    return next(filter(None, lines), "The program")


@dataclass(frozen=True)
class _Change:
    """A change of sharding: bytes that each device sends, and whether it gathers the array."""

    before: Spec
    sent: int | float
    gathers_all: bool


def _changes(decision: Decision) -> Iterator[tuple[Asked, _Change]]:
    sizes = decision.sizes
    known: dict[Dims, Spec] = {}  # what the program has asked for
    for asked in decision.program.graph.asked:
        dims = asked.value.dims
        planned = [used_axes(axes or (), sizes) for axes in decision.axes_of(dims)]
        before = known.get(dims) or planned
        after: list[Axes] = []
        for axes_before, axes_asked in zip(before, asked.axes, strict=True):
            if axes_asked is None:  # any sharding will do
                axes_asked = axes_before
            after.append(used_axes(axes_asked, sizes))
        known[dims] = after
        yield asked, _change(asked, before, after, sizes)


def _change(asked: Asked, before: Spec, after: Spec, axes: Sizes) -> _Change:
    """What a change between two shardings sends.

    `less` are the factors by which dimensions are split less than before, and `more` those by which
    others are split more. A factor in both is exchanged between two dimensions.
    """
    less: Counter[float] = Counter()
    more: Counter[float] = Counter()
    for axes_before, axes_after in zip(before, after, strict=True):
        ratio = parts(axes_after, axes) / parts(axes_before, axes)
        if ratio < 1:
            less[1 / ratio] += 1
        elif ratio > 1:
            more[ratio] += 1
    exchanged = less & more
    count = spec_parts(before, axes)
    # No factor of one dimension fits into another, so that nothing can be exchanged.
    if less and more and not exchanged:
        return _Change(before, all_gather(count, asked.value.bytes), True)
    size = asked.value.bytes / count  # of the part that a device has
    size /= prod((more - exchanged).elements())  # what is split further sends nothing
    sent = sum(size * (1 - 1 / ratio) for ratio in exchanged.elements())
    for ratio in (less - exchanged).elements():
        sent += size * (ratio - 1)
        # The next gather has what this one has brought together.
        size *= ratio
    if any(map(_is_permuted, before, after)):
        sent += size  # each device has the part of another one
    return _Change(before, sent, False)


def _is_permuted(before: Axes, after: Axes) -> bool:
    """Whether a dimension is split over other axes, and not only over more or fewer of them."""
    common = min(len(before), len(after))
    return before[:common] != after[:common]
