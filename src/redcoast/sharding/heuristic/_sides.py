"""Which dimensions of an array are its input and which its output, where no module says so."""

import re
from collections import Counter
from dataclasses import replace

import equinox as eqx

from ..tree._leaves import Leaf, Node
from ._units import GENERIC, Group, Unit, Votes, scope, units_below

_ROLES = {
    "q": "query",
    "query": "query",
    "k": "key",
    "key": "key",
    "v": "value",
    "value": "value",
    "kv": "fused",
    "key_value": "fused",
    "qkv": "fused",
    "query_key_value": "fused",
    "in": "fused",
    "c_attn": "fused",
    "pack": "fused",
    "o": "output",
    "out": "output",
    "output": "output",
    "c": "output",
    "attn_vec": "output",
    "": "output",
}
_SUFFIX = re.compile(r"(^|_)(proj|projection|linear|lin|layer|weight|kernel|dense|einsum|w)$")
_PREFIX = re.compile(r"^(w|to|linear)_?(?=(q|k|v|o|qkv|kv|out|pack)$)")
_READS = re.compile(r"w?_?(gate|up|fc_?1|c_fc|fc_?in|wi(_\d)?|expand|intermediate).*|.*h_to_4h")
_WRITES = re.compile(r"w?_?(down|fc_?2|fc_?out|contract).*|.*4h_to_h")


def role_of(unit: Unit) -> str | None:
    """What a name says: query, key, value, fused (several of them in one matrix) or output."""
    for name in unit.names:
        stem = re.sub("qkv.*", "qkv", name.lower())
        while _SUFFIX.search(stem):
            stem = _SUFFIX.sub("", stem)
        role = _ROLES.get(_PREFIX.sub("", stem))
        if role is not None:
            return role
    return None


def reads_width(unit: Unit) -> bool:
    """Whether the name is that of a matrix from the residual width to an inner one."""
    return any(_READS.fullmatch(name.lower()) for name in unit.names)


def writes_width(unit: Unit) -> bool:
    """Whether the name is that of a matrix from an inner width back to the residual one."""
    return any(_WRITES.fullmatch(name.lower()) for name in unit.names)


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


WEIGHTS = ("weight", "kernel", "embedding", "w", "W")
_OUT_NAME = re.compile(r"w?_?o|.*out.*|.*proj_o|attn_vec", re.IGNORECASE)
_KERNEL_WIDTH = 16  # convolutions in use are narrower; channels and heads times sizes are not
_TABLE_NAME = re.compile(r"embed|wte|wpe|shared$|vocab|relative|lookup", re.IGNORECASE)


def custom_unit(
    names: tuple[str, ...], key: str, weight: Leaf, bias: Leaf | None, stack: int, sizes: Counter
) -> Unit | None:
    """The array as a matrix, or None if it is none.

    `key` is the array's own name; `sizes` counts the sizes of the layer that it is in.
    """
    dims = [d for d in range(stack, len(weight.shape)) if weight.shape[d] > 1]
    conv = _conv_sides(key, weight.shape, stack)
    if conv is not None:
        ins, outs, spatial = conv
        return Unit(names, weight, bias, "conv", stack, ins, outs, spatial)
    if len(dims) == 2:
        return _matrix(names, key, weight, bias, stack, (dims[0], dims[1]))
    if len(dims) == 3:
        return _with_heads(names, weight, bias, stack, dims, sizes)
    return None


def _matrix(
    names: tuple[str, ...],
    key: str,
    weight: Leaf,
    bias: Leaf | None,
    stack: int,
    dims: tuple[int, int],
) -> Unit:
    first, last = (dims[0],), (dims[1],)
    if key == "kernel":
        return Unit(names, weight, bias, "linear", stack, first, last)
    if bias is None and (key == "embedding" or _TABLE_NAME.search("/".join(names))):
        return Unit(names, weight, None, "table", stack, first, last)
    torch = Unit(names, weight, bias, "linear", stack, last, first, sure=False)
    unit = torch if key.lower().endswith("weight") else torch.flipped()
    if bias is None or weight.shape[dims[0]] == weight.shape[dims[1]]:
        return unit
    outs = first if bias.shape[-1] == weight.shape[dims[0]] else last
    ins = last if outs == first else first
    return Unit(names, weight, bias, "linear", stack, ins, outs)


def _conv_sides(
    key: str, shape: tuple[int, ...], stack: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None:
    """Channels and window of a convolution: Flax stores the window first, torch last."""
    rank = len(shape) - stack
    if rank < 3 or rank > 5 or key not in ("kernel", "weight"):
        return None
    if key == "kernel":
        spatial, ins, outs = tuple(range(stack, stack + rank - 2)), (-2,), (-1,)
    else:
        spatial, ins, outs = tuple(range(stack + 2, stack + rank)), (stack + 1,), (stack,)
    ins, outs = (ins[0] % len(shape),), (outs[0] % len(shape),)
    narrow = max(shape[d] for d in spatial) <= _KERNEL_WIDTH
    if rank == 3 and narrow:
        narrow = shape[spatial[0]] < min(shape[outs[0]], max(shape[ins[0]], 2))
    return (ins, outs, spatial) if narrow else None


def _with_heads(
    names: tuple[str, ...],
    weight: Leaf,
    bias: Leaf | None,
    stack: int,
    dims: list[int],
    sizes: Counter,
) -> Unit | None:
    """Query, key, value (width, heads, head size) or an output (heads, head size, width)."""
    shape = weight.shape
    width = _width_dim(names, shape, dims, sizes)
    rest = tuple(d for d in dims if d != width)
    if width == dims[-1]:
        return Unit(names, weight, bias, "linear", stack, rest, (width,))
    return Unit(names, weight, bias, "linear", stack, (width,), rest)


def _width_dim(
    names: tuple[str, ...], shape: tuple[int, ...], dims: list[int], sizes: Counter
) -> int:
    most = max(sizes[shape[d]] for d in dims)
    candidates = [d for d in dims if sizes[shape[d]] == most]
    if len(candidates) > 1 and dims[-1] in candidates and _OUT_NAME.fullmatch(names[-1]):
        return dims[-1]
    return candidates[0]
