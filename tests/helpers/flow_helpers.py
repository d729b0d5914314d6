"""Programs as the planner follows them, in the notation of `einsum`."""

from itertools import count

import jax
import jax.numpy as jnp
from sharding_helpers import array

from redcoast.sharding.program._classes import Classes
from redcoast.sharding.program._program import follow_program
from redcoast.sharding.program._trace import trace
from redcoast.sharding.program._walk import outputs_of


class Followed:
    """A function of arrays, followed with gradients flowing into each of them.

    `letters` has a letter for each class of dimensions of the arguments and results when they are
    split over `n` devices; "." stands for a dimension that does not divide and "#" for one that
    must not be split.
    """

    def __init__(self, fn, *given, n=2):
        arrays = [array(*x) if isinstance(x, tuple) else x for x in given]
        traced, _ = trace(lambda tree: with_loss(fn(*tree)), arrays, ())
        program = follow_program(traced, [True] * len(arrays))
        self.graph = program.graph
        self.arguments = program.parameters
        self.results = tuple(outputs_of(self.graph, program.scope)[1:])
        self.classes = Classes(self.graph, n)
        self._blocked = self.classes.of(self.graph.blocked)
        names = map(chr, count(ord("a")))
        roots = [self.classes[d] for value in (*self.arguments, *self.results) for d in value.nodes]
        roots = [r for r in roots if self.classes.divides(r) and r not in self._blocked]
        self.letters = dict(zip(dict.fromkeys(roots), names, strict=False))

    def letter(self, node):
        if not self.classes.divides(node):
            return "."
        root = self.classes[node]
        return "#" if root in self._blocked else self.letters.get(root, "?")

    def __str__(self):
        show = lambda values: ",".join("".join(map(self.letter, v.nodes)) for v in values)
        return f"{show(self.arguments)}->{show(self.results)}"


def with_loss(results):
    """A scalar first, which all of them lead to at no cost: into others no gradients flow."""
    differentiable = [x for x in jax.tree.leaves(results) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jax.lax.optimization_barrier((jnp.float32(0), *differentiable))[0], results


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
    actual = Followed(fn, *given, n=n)
    sent: dict[str, float] = {}

    def add(kind, node, size):
        if (letter := actual.letter(node)).isalpha() and size:
            sent[f"{kind} {letter}"] = sent.get(f"{kind} {letter}", 0) + size / 4

    for partial_sum in actual.graph.partial_sums.values():
        add(
            "back" if partial_sum.backward else "sum",
            partial_sum.node,
            partial_sum.value.bytes * partial_sum.times,
        )
    for cut in actual.graph.reshards:
        ends = [node for node in (cut.before, cut.after) if node is not None]
        if len(ends) == 2 and len(actual.classes.of(ends)) == 1:
            continue
        if cut.before is not None:
            add("gather", cut.before, cut.operand.bytes * cut.times)
        if cut.after is not None and cut.backward:
            add("regather", cut.after, cut.result.bytes * cut.times)
    return sent


def unknown(fn, *given):
    """How often each primitive occurs that is not understood."""
    return dict(Followed(fn, *given).graph.unknown)


def keys(*shape):
    return jax.eval_shape(lambda: jax.random.split(jax.random.key(0), shape))


def integers(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)
