"""Attention: query, key and value split on their outputs, the matrix after them on its input.

This is the second rule of RedCoast (arXiv:2310.16355, section 3.1), which is Megatron's split
(arXiv:1909.08053, section 3).
"""

from typing import Any

import equinox as eqx

from ._sides import role_of
from ._splits import Splits, column, row
from ._units import Group, Unit, near_units

_SAYS = {
    "query": "attention query",
    "key": "attention key",
    "value": "attention value",
    "fused": "attention query, key and value in one",
}
_HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "heads")
_KV_HEADS = ("num_kv_heads", "n_kv_heads", "num_key_value_heads", "kv_heads")


def split_attention(group: Group, parent: Group | None, done: Splits, n: int) -> Splits:
    """The splits of the group's query, key, value and output, where it has them."""
    units = _open(group, done)
    explicit = _explicit_heads(units, n)
    if explicit:
        return explicit
    inputs = _inputs_by_name(units) or _inputs_by_shape(units, group, parent)
    if not inputs:
        return {}
    beside = _open(parent, done) if parent is not None else []
    ids = {unit.weight.index for unit in inputs.values()}
    output = _output([u for u in units if u.weight.index not in ids], inputs)
    output = output or _output([u for u in beside if u.weight.index not in ids], inputs)
    return _split(inputs, output, group.owner, n)


def _open(group: Group, done: Splits) -> list[Unit]:
    units = [unit for unit in near_units(group) if unit is not None]
    return [unit for unit in units if unit.kind == "linear" and unit.weight.index not in done]


def _explicit_heads(units: list[Unit], n: int) -> Splits:
    """Where heads are a dimension of their own, shapes tell everything."""
    splits: Splits = {}
    apart = any(unit.outs[-1] - unit.outs[0] > 1 for unit in units)  # (experts, width, hidden)
    what = "heads or experts" if apart else "heads"
    for unit in units:
        if len(unit.outs) == 2:
            splits |= column(unit, n, f"{what} of {unit.name}")
        if len(unit.ins) == 2:
            splits |= row(unit, n, f"{what} into {unit.name}")
    return splits


def _inputs_by_name(units: list[Unit]) -> dict[str, Unit]:
    named = [(role_of(unit), unit) for unit in units]
    roles = [role for role, _ in named]
    found = {role: unit for role, unit in named if role in ("query", "key", "value", "fused")}
    if set(found) not in ({"query", "key", "value"}, {"query", "fused"}, {"fused"}):
        return {}
    if any(roles.count(role) > 1 for role in found):
        return {}
    if set(found) == {"fused"} and found["fused"].out_size <= found["fused"].in_size:
        return {}
    return {role: _turned(unit, units) for role, unit in found.items()}


def _turned(unit: Unit, units: list[Unit]) -> Unit:
    """A query, key or value reads the width that all of them share: turn it if it does not."""
    if unit.sure or unit.square:
        return unit
    width = max({unit.in_size, unit.out_size}, key=lambda s: (_count(s, units), s == unit.in_size))
    return unit if unit.in_size == width else unit.flipped()


def _count(size: int, units: list[Unit]) -> int:
    return sum(size in (unit.in_size, unit.out_size) for unit in units)


def _inputs_by_shape(units: list[Unit], group: Group, parent: Group | None) -> dict[str, Unit]:
    """Four squares; two squares and two alike; three squares and one beside; one thrice as wide."""
    if group.ordered:
        return {}
    squares = [u for u in units if u.square]
    same = len({u.in_size for u in squares}) == 1
    others = [u for u in units if not u.square and squares and squares[0].in_size == u.in_size]
    reads = [u for u in others if not any(v.in_size == u.out_size for v in units)]
    if same and len(squares) == 4:
        return dict(zip(("query", "key", "value"), squares[:3], strict=True))
    if same and len(squares) == 2 and len(reads) == 2 and reads[0].out_size == reads[1].out_size:
        return {"query": squares[0], "key": reads[0], "value": reads[1]}
    if same and len(squares) == len(units) == 3 and _square_beside(squares[0], parent):
        return dict(zip(("query", "key", "value"), squares, strict=True))
    if same and len(squares) == 1 and len(reads) == 1 and reads[0].out_size == 3 * reads[0].in_size:
        return {"fused": reads[0]}
    return {}


def _square_beside(square: Unit, parent: Group | None) -> bool:
    beside = near_units(parent) if parent is not None else []
    return [u.out_size for u in beside if u and u.square] == [square.out_size]


def _output(units: list[Unit], inputs: dict[str, Unit]) -> Unit | None:
    """The matrix that reads what attention makes of the values and writes the queries' width."""
    fits = [side for unit in units for side in _sides(unit) if _closes(side, inputs)]
    named = [unit for unit in fits if role_of(unit) == "output"]
    return (named or fits or [None])[-1]


def _sides(unit: Unit) -> list[Unit]:
    return [unit] if unit.sure or unit.square else [unit, unit.flipped()]


def _closes(unit: Unit, inputs: dict[str, Unit]) -> bool:
    """Reads what heads leave, which is as wide as the values, or as the queries if keys are few."""
    query = inputs.get("query", inputs.get("fused"))
    assert query is not None
    inner = {inputs[role].out_size for role in ("query", "value") if role in inputs}
    inner = inner or {query.in_size}  # several in one: as wide as what they read, as a rule
    back = unit.out_size == query.in_size or role_of(unit) == "output"
    return back and unit.in_size in inner


def _split(inputs: dict[str, Unit], output: Unit | None, owner: Any, n: int) -> Splits:
    heads, kv_heads = _heads(owner)
    splits: Splits = {}
    for role, unit in inputs.items():
        parts = _parts(unit, output, inputs) if role == "fused" else 1
        count = kv_heads if role in ("key", "value") else heads
        splits |= column(unit, n, _SAYS[role], parts=parts, heads=count)
    if output is not None:
        splits |= row(output, n, "attention output", heads=heads)
    return splits


def _parts(fused: Unit, output: Unit | None, inputs: dict[str, Unit]) -> int:
    """How many matrices, each as large as the keys', stand side by side in a fused one."""
    if "query" in inputs:
        return 2
    keys = (fused.out_size - (output.in_size if output else fused.out_size // 3)) // 2
    return fused.out_size // keys if keys and fused.out_size % keys == 0 else 1


def _heads(owner: Any) -> tuple[int | None, int | None]:
    """Numbers of heads, of all and of keys and values, that a module has in its fields."""
    if not isinstance(owner, eqx.Module):
        return None, None
    heads = [getattr(owner, name, None) for name in _HEADS]
    kv_heads = [getattr(owner, name, None) for name in _KV_HEADS]
    count = next((h for h in heads if isinstance(h, int)), None)
    return count, next((h for h in kv_heads if isinstance(h, int)), count)
