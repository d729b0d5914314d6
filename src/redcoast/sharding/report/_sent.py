"""What a device sends, and why."""

from dataclasses import dataclass

from ..program._graph import Source
from ._data import TrafficKind

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Sent:
    """Bytes that each device sends in a step over some axes, and the operation that causes it."""

    axes: Axes
    kind: TrafficKind
    cause: str
    bytes: int | float
    source: Source = ()
