"""The order in which a tree stores input and output, told from the matrices that show it."""

from collections import Counter
from dataclasses import replace

from .names import reads_width, role_of, writes_width
from .units import GENERIC, Group, Unit, Votes, units_below


def settle(group: Group, votes: Votes) -> Group:
    """The group with every matrix of unknown order, squares above all, turned as the others are.

    Arrays called alike (`weight`, say) are stored alike; so are all those with names of their own.
    """
    first: Counter[str] = Counter()
    for unit in units_below(group):
        if unit.kind == "linear" and not unit.square:
            first[_kind(unit)] += _output_first(unit, votes)
    return _turned(group, first)


def _kind(unit: Unit) -> str:
    key = unit.weight.path[-1] if unit.weight.path else ""
    return key if key in GENERIC else "own name"


def _output_first(unit: Unit, votes: Votes) -> int:
    """1 where the output is stored before the input, -1 where after, 0 where that is not known."""
    known = unit if unit.sure else _by_role(unit, votes)
    if known is None:
        return 0
    return 1 if known.outs[0] < known.ins[0] else -1


def _by_role(unit: Unit, votes: Votes) -> Unit | None:
    """The sides of a matrix whose name says whether it reads or writes the residual width."""
    sizes = votes[unit.scope]
    if sizes[unit.in_size] == sizes[unit.out_size]:
        return None
    reads = unit if sizes[unit.in_size] > sizes[unit.out_size] else unit.flipped()
    if role_of(unit) in ("query", "key", "value", "fused") or reads_width(unit):
        return reads
    return reads.flipped() if writes_width(unit) else None


def _turned(group: Group, first: Counter[str]) -> Group:
    members: dict[str, Unit | Group] = {}
    for name, member in group.members.items():
        if isinstance(member, Group):
            members[name] = _turned(member, first)
        else:
            votes = 0 if member.sure or member.kind != "linear" else first[_kind(member)]
            output_first = member.outs[0] < member.ins[0]
            wrong = votes and output_first != (votes > 0)
            turned = member.flipped() if wrong else member
            members[name] = replace(turned, sure=True) if votes else member
    return replace(group, members=members)
