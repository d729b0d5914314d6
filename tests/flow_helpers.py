"""Programs as the planner follows them, in the notation of `einsum`."""

from collections import Counter
from itertools import count

import jax
import jax.numpy as jnp
from sharding_helpers import array

from redcoast._sharding.classes import Classes
from redcoast._sharding.dataflow import follow_program
from redcoast._sharding.trace import trace
from redcoast._sharding.walk import outputs_of


class Followed:
    """A function of arrays, followed with gradients flowing into each of them.

    `letters` has a letter for each class of dimensions of the arguments and results when they are
    split over `n` devices; "." stands for a dimension that does not divide and "#" for one that
    must not be split.
    """

    def __init__(self, fn, *given, n=2):
        arrays = [array(*x) if isinstance(x, tuple) else x for x in given]
        # A scalar first: of other functions there are no gradients.
        traced, _ = trace(lambda tree: (jnp.float32(0), fn(*tree)), arrays, ())
        program = follow_program(traced, [True] * len(arrays))
        self.graph = program.graph
        self.arguments = program.parameters
        self.results = tuple(outputs_of(self.graph, program.scope)[1:])
        self.classes = Classes(self.graph, n)
        self._blocked = self.classes.of(self.graph.blocked)
        names = map(chr, count(ord("a")))
        roots = [self.classes[d] for value in (*self.arguments, *self.results) for d in value.dims]
        roots = [r for r in roots if self.classes.divides(r) and r not in self._blocked]
        self.letters = dict(zip(dict.fromkeys(roots), names, strict=False))

    def letter(self, node):
        if not self.classes.divides(node):
            return "."
        root = self.classes[node]
        return "#" if root in self._blocked else self.letters.get(root, "?")

    def __str__(self):
        show = lambda values: ",".join("".join(map(self.letter, v.dims)) for v in values)
        return f"{show(self.arguments)}->{show(self.results)}"


def links(fn, *given, n=2):
    """Which dimensions are split together, such as "ab,bc->ac" for a matrix product.

    Letters are given in order, one for each set of dimensions that are split alike.
    """
    return str(Followed(fn, *given, n=n))


def costs(fn, *given, n=2):
    """Elements that have to be sent if a dimension is split, for example {"sum b": 32}.

    "sum" is for partial sums forward and "back" backward; "gather" for an array that cannot stay
    split forward, and "regather" for its cotangent.
    """
    found = Followed(fn, *given, n=n)
    total = Counter()
    for one in found.graph.sums.values():
        total[f"{'back' if one.backward else 'sum'} {found.letter(one.node)}"] += (
            one.bytes * one.times // 4
        )
    for cut in found.graph.cuts:
        if None not in (cut.source, cut.target) and (
            found.classes[cut.source] == found.classes[cut.target]
        ):
            continue
        if cut.source is not None:
            total[f"gather {found.letter(cut.source)}"] += cut.source_bytes * cut.times // 4
        if cut.target is not None and cut.grad:
            total[f"regather {found.letter(cut.target)}"] += cut.target_bytes * cut.times // 4
    return {key: int(size) for key, size in total.items() if key[-1].isalpha() and size}


def unknown(fn, *given):
    """How often each primitive occurs that is not understood."""
    return dict(Followed(fn, *given).graph.unknown)


def keys(*shape):
    return jax.eval_shape(lambda: jax.random.split(jax.random.key(0), shape))


def integers(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)
