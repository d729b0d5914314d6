"""From the nodes of a tree to groups of matrices."""

import re
from collections import Counter
from dataclasses import replace

import equinox as eqx

from ..nodes import Leaf, Node
from .sides import WEIGHTS, custom_unit
from .units import Group, Unit, Votes, scope

NORMS = (eqx.nn.LayerNorm, eqx.nn.RMSNorm, eqx.nn.GroupNorm, eqx.nn.BatchNorm)
RECURRENT = (eqx.nn.LSTMCell, eqx.nn.GRUCell)
_WHOLE_LAYERS = NORMS + RECURRENT


def read_group(node: Node, stacks: dict[int, int], votes: Votes) -> Group:
    """`node` with its matrices found, each with its input and output side."""
    members: dict[str, Unit | Group] = {}
    whole = isinstance(node.owner, _WHOLE_LAYERS)
    for name, child in node.children.items():
        if isinstance(child, Node):
            members[name] = _container(child, stacks, votes) or read_group(child, stacks, votes)
        elif not whole:
            unit = _bare(name, child, node, stacks, votes)
            members |= {name: unit} if unit is not None else {}
    units = [member for member in members.values() if isinstance(member, Unit)]
    biases = {unit.bias.index for unit in units if unit.bias is not None}
    members = {name: m for name, m in members.items() if not _is_one_of(m, biases)}
    taken = {unit.weight.index for unit in units} | biases
    leaves = [child for child in node.children.values() if isinstance(child, Leaf)]
    loose = tuple(leaf for leaf in leaves if leaf.index not in taken)
    return Group(node.path, node.owner, node.ordered, members, loose)


def _is_one_of(member: Unit | Group, biases: set[int]) -> bool:
    """Biases with a dimension of heads look like matrices themselves."""
    return isinstance(member, Unit) and member.weight.index in biases


def _container(node: Node, stacks: dict[int, int], votes: Votes) -> Unit | None:
    """A node that is one matrix: a stock layer, or a dict or module of `weight` and `bias`."""
    leaves = {name: child for name, child in node.children.items() if isinstance(child, Leaf)}
    key = next((key for key in WEIGHTS if key in leaves), None)
    if key is None or isinstance(node.owner, _WHOLE_LAYERS):
        return None
    weight, bias = leaves[key], leaves.get("bias", leaves.get("b"))
    stack, names = stacks[weight.index], node.path[-1:]
    if isinstance(node.owner, (eqx.nn.Linear, eqx.nn.Conv, eqx.nn.ConvTranspose, eqx.nn.Embedding)):
        return _stock(node.owner, names, weight, bias, stack)
    if len(node.children) > 1 + (bias is not None):
        return None
    return custom_unit(names, key, weight, bias, stack, votes[scope(weight.path)])


def _stock(
    owner: eqx.Module, names: tuple[str, ...], weight: Leaf, bias: Leaf | None, stack: int
) -> Unit | None:
    if len(weight.shape) < stack + 2:
        return None
    first, second = (stack,), (stack + 1,)
    if isinstance(owner, eqx.nn.Embedding):
        return Unit(names, weight, None, "table", stack, first, second)
    unit = Unit(names, weight, bias, "linear", stack, second, first)
    if isinstance(owner, (eqx.nn.Conv, eqx.nn.ConvTranspose)):
        spatial = tuple(range(stack + 2, len(weight.shape)))
        unit = replace(unit, kind="conv", spatial=spatial, groups=owner.groups)
    return unit


def _bare(name: str, leaf: Leaf, node: Node, stacks: dict[int, int], votes: Votes) -> Unit | None:
    """An array that stands by itself in a module or dict, `wq` say, with its bias if it has one."""
    sizes: Counter[int] = votes[scope(leaf.path)]
    bias = _bias_of(name, leaf, node)
    return custom_unit((name,), name, leaf, bias, stacks[leaf.index], sizes)


def _bias_of(name: str, weight: Leaf, node: Node) -> Leaf | None:
    """The array beside `name` that is called like its bias, or comes next, and fits it."""
    following = list(node.children)[list(node.children).index(name) + 1 :][:1]
    candidates = (
        re.sub("weight|kernel", "bias", name),
        re.sub("^[wW]", "b", name),
        f"{name}_bias",
        f"b{name}",
        re.sub("_proj$", "", name) + "_bias",
        *(following if node.ordered else ()),
    )
    for candidate in candidates:
        bias = node.children.get(candidate)
        if candidate == name or not isinstance(bias, Leaf) or len(bias.shape) >= len(weight.shape):
            continue
        if bias.shape and bias.shape[-1] in weight.shape:
            return bias
    return None
