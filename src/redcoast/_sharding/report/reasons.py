"""Why arrays are computed split, or are not."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..choice.dataflow import Decision, parts
from ..nodes import Leaf
from .braces import shortened
from .together import Set, find_sets


@dataclass(frozen=True)
class Reasons:
    """The reasons behind a decision; `place` is that of an array among the tree's."""

    decision: Decision
    axes: Mapping[str, int]
    sets: Mapping[int, Set]
    snags: Mapping[int, int]

    def computed(self, place: int, d: int) -> str:
        """What is split together with an array, and along what."""
        value = self.decision.program.parameters[place]
        return self.sets[self.decision.classes[value.dims[d]]].reason

    def not_computed(self, place: int) -> str:
        """Why an array is not computed split; empty where nothing is."""
        n = parts(self.decision.way.model, self.axes)
        if n == 1 or "model" in self.decision.way.batch:
            return self.indivisible(place, n)
        return self.indivisible(place, 2) or "computing it split would cost more"

    def indivisible(self, place: int, least: int) -> str:
        """A size that stands in the way of computing it split.

        That is one that the program takes a dimension apart into, or that of a dimension, if it
        is at least so large.
        """
        program, over = self.decision.program, self.decision.way.model
        n, value = parts(over, self.axes), program.parameters[place]
        for d, (node, size) in enumerate(zip(value.dims, value.shape, strict=True)):
            if node in program.graph.blocked or d == self.decision.computed[place]:
                continue
            if size % n == 0 and (inner := self.snags.get(self.decision.classes[node])):
                of = f"{size} is {inner} x {size // inner}, and " if size % inner == 0 else ""
                return of + self._trouble(inner, over)
            if size % n and size >= least:
                return self._trouble(size, over)
        return ""

    def not_stored(self, place: int) -> str:
        """Why an array is not even stored split."""
        value, blocked = (
            self.decision.program.parameters[place],
            self.decision.program.graph.blocked,
        )
        sizes = [s for node, s in zip(value.dims, value.shape, strict=True) if node not in blocked]
        axis = min((a for a in ("fsdp", "model") if self.axes[a] > 1), key=lambda a: self.axes[a])
        if not any(sizes):
            return "it has no dimension that may be split"
        return self._trouble(max(sizes), (axis,))

    def _trouble(self, size: int, over: Sequence[str]) -> str:
        n, names = parts(over, self.axes), [axis for axis in over if self.axes[axis] > 1]
        shown = f"{names[0]}={n}" if len(names) == 1 else f"{' x '.join(names)} = {n}"
        below = size // n * n
        near = f"{below} or {below + n}" if below else f"{n}"
        return f"{size} does not divide over {shown} ({near} would)"


def find_reasons(leaves: Sequence[Leaf], decision: Decision, axes: Mapping[str, int]) -> Reasons:
    return Reasons(decision, axes, find_sets(leaves, decision, axes), _snags(decision))


def hindrances(reasons: Reasons, leaves: Sequence[Leaf]) -> list[dict[str, str]]:
    """Of arrays that are computed split: why not along another dimension, if that is its size."""
    n = parts(reasons.decision.way.model, reasons.axes)
    found: dict[str, list[str]] = {}
    for place, leaf in enumerate(leaves):
        if reasons.decision.computed[place] is not None and (why := reasons.indivisible(place, n)):
            found.setdefault(why, []).append(leaf.name)
    return [{"arrays": shortened(names), "why": why} for why, names in found.items()]


def _snags(decision: Decision) -> dict[int, int]:
    """For classes that divide, the first size that they are linked to and that does not."""
    classes, graph = decision.classes, decision.program.graph
    found: dict[int, int] = {}
    for a, b in graph.links:
        for one, other in ((a, b), (b, a)):
            if classes.divides(one) and not classes.divides(other) and graph.sizes[other] > 1:
                found.setdefault(classes[one], graph.sizes[other])
    return found
