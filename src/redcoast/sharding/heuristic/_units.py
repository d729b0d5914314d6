"""Matrices with an input and an output side, in groups of neighbours."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ..tree._leaves import Leaf, Node, leaves_below

GENERIC = ("weight", "kernel", "embedding", "w", "W", "bias", "b", "scale")
Scope = tuple[str, ...]
Votes = dict[Scope, Counter[int]]


@dataclass(frozen=True)
class Unit:
    """A weight whose dimensions `ins` are contracted with the input and `outs` are the output's.

    `kind` is "linear", "conv" or "table". `stack` leading dimensions count layers. `sure` says
    whether a module, a name or a bias told the sides apart; otherwise a convention did.
    """

    names: tuple[str, ...]
    weight: Leaf
    bias: Leaf | None
    kind: str
    stack: int
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    spatial: tuple[int, ...] = ()
    groups: int = 1
    sure: bool = True

    @property
    def name(self) -> str:
        return "/".join(self.names)

    @property
    def in_size(self) -> int:
        return prod(self.weight.shape[d] for d in self.ins)

    @property
    def out_size(self) -> int:
        return prod(self.weight.shape[d] for d in self.outs)

    @property
    def square(self) -> bool:
        return self.in_size == self.out_size

    @property
    def scope(self) -> Scope:
        return scope(self.weight.path, len(self.names) - 1)

    def flipped(self) -> "Unit":
        return replace(self, ins=self.outs, outs=self.ins)

    def called(self, *names: str) -> "Unit":
        return replace(self, names=names)


@dataclass(frozen=True)
class Group:
    """A node with its matrices and smaller groups, in order, and its other arrays."""

    path: tuple[str, ...]
    owner: Any
    ordered: bool
    members: "dict[str, Unit | Group]"
    loose: tuple[Leaf, ...]

    def __iter__(self) -> Iterator["Group"]:
        """The groups below, innermost first, then this one."""
        for member in self.members.values():
            if isinstance(member, Group):
                yield from member
        yield self


def units_below(group: Group) -> Iterator[Unit]:
    for member in group.members.values():
        if isinstance(member, Unit):
            yield member
        else:
            yield from units_below(member)


def near_units(group: Group) -> list[Unit | None]:
    """The matrices of a group; a smaller group with only one counts as that one.

    A group with more is None in their place, one without any (a norm, a function) is left out. The
    names of what is returned are relative to the group.
    """
    near: list[Unit | None] = []
    for key, member in group.members.items():
        below = [member] if isinstance(member, Unit) else list(units_below(member))
        if len(below) > 1:
            near.append(None)
        elif below:
            names = (key,) if isinstance(member, Unit) else (key, *below[0].names)
            near.append(below[0].called(*names))
    return near


def scope(path: tuple[str, ...], above: int = 0) -> Scope:
    """The repeated layer that an array is in: the path up to its last number, numbers left out.

    The names of the array's own matrix, and of `above` nodes over that, are not looked at.
    """
    own = 1 + (path[-1:] != () and path[-1] in GENERIC) + above
    templates = [re.sub(r"\d+", "*", part) for part in path[: max(0, len(path) - own)]]
    last = max((i for i, part in enumerate(templates) if "*" in part), default=-1)
    return tuple(templates[: last + 1])


def size_votes(root: Node, stacks: dict[int, int]) -> Votes:
    """For each repeated layer, how many arrays have a dimension of each size.

    The most frequent is the width of the residual stream, which every block reads and writes.
    First and last dimensions count more: heads and their sizes stand in the middle somewhere.
    """
    votes: Votes = {}
    for leaf in leaves_below(root):
        shape = [size for size in leaf.shape[stacks[leaf.index] :] if size > 1]
        counter = votes.setdefault(scope(leaf.path), Counter())
        counter.update(dict.fromkeys(set(shape), 4))
        counter.update(shape[:1] + shape[-1:])
    return votes
