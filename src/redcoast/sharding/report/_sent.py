"""What devices send for functions on the host, and where they send all that they have of an array.

XLA runs a function on the host of one device: its operands are gathered there, and its results go
to all devices.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ...core._program_lines import line_of
from .._mesh_axes import parts, used_axes
from ..program._graph import Source
from ..solver._hardware import all_gather, all_reduce
from ..solver._strategy import Decision
from ._constraint_traffic import Axes, constraint_reshards
from ._data import TrafficKind
from ._text import scaled


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
        if any(map(decision.batch.has, call.along)) or call.is_inside:
            continue  # each device calls it for its own rows
        cause = "functions on the host: what they receive and return"
        for value in call.operands:
            size = all_gather(decision.batch.parts(value.nodes), value.bytes) * call.times
            yield Sent(rows, "activations", cause, size, call.source)
        for value in call.results:
            size = all_reduce(parts(everyone, sizes), value.bytes) * call.times
            yield Sent(everyone, "activations", cause, size, call.source)


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
    for constraint, change, times in constraint_reshards(decision):
        if change.gathers_all and times:
            line = line_of_source(constraint.source)
            texts.append(
                f"{line} asks for a sharding that the compiler cannot reach step by step: it "
                f"gathers the entire array, {scaled(constraint.value.bytes)}, on every device. "
                "A constraint in between, which moves one axis at a time, avoids that."
            )
    return tuple(dict.fromkeys(texts))


def line_of_source(source: Source) -> str:
    """The line of an operation, or else of the innermost call around it, to begin a sentence."""
    lines = map(line_of, reversed(source))
    return next(filter(None, lines), "The program")
