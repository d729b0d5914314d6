"""What a plan sends, by axis of the mesh and by cause, as it was priced."""

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from .dataflow import Decision, batch_dims, parts, stored
from .hardware import Hardware, all_gather, all_reduce
from .nodes import Leaf
from .overrides import spec_axes
from .price import gathers, over_batch, sum_bytes
from .rows import Row


def traffic(
    rows: Sequence[Row], decision: Decision, axes: Mapping[str, int], hardware: Hardware
) -> list[dict[str, Any]]:
    """Bytes that each device sends in a step: `axis`, `cause` and `bytes`, largest first."""
    batch = batch_dims(decision.program, parts(decision.way.batch, axes))
    n = parts(decision.way.model, axes)
    over = " x ".join(axis for axis in decision.way.model if axes[axis] > 1)
    sent: dict[tuple[str, str], float] = {}

    def add(axis: str, cause: str, size: int | float) -> None:
        if size > 0:
            sent[axis, cause] = sent.get((axis, cause), 0.0) + size

    names = _class_names(rows, decision)
    spread = " x ".join(axis for axis in decision.way.batch if axes[axis] > 1)
    for found in decision.program.graph.sums.values():
        root = decision.classes[found.node]
        if decision.classes.divides(found.node) and root in decision.chosen:
            way = "backward" if found.backward else "forward"
            cause = f"partial sums {way}, split along {names[root]}"
            size = sum_bytes(found, hardware) / batch.parts(found.dims)
            add(over, cause, all_reduce(n, size))
        if batch.has(found.node):
            split = n if _is_split(decision, found.dims) else 1
            cause = "gradients and sums over the batch"
            size = over_batch(found, batch, stored(decision.way, axes), hardware)
            add(spread, cause, size / split)
    _cuts(decision, batch, (over, n), names, add)
    for row, value, computed in zip(
        rows, decision.program.parameters, decision.computed, strict=True
    ):
        times = gathers(decision.program.graph, value)
        _gathers(row, value.bytes * times, computed, axes, add)
    ordered = sorted(sent.items(), key=lambda item: (-item[1], item[0]))
    return [{"axis": a, "cause": c, "bytes": round(size)} for (a, c), size in ordered]


def _is_split(decision: Decision, dims: Sequence[int]) -> bool:
    classes = decision.classes
    return any(classes.divides(n) and classes[n] in decision.chosen for n in dims)


def _cuts(
    decision: Decision, batch: Any, axis: tuple[str, int], names: Mapping[int, str], add: Any
) -> None:
    classes, (over, n) = decision.classes, axis
    for cut in decision.program.graph.cuts:
        source, target = (
            None if node is None or not classes.divides(node) else classes[node]
            for node in (cut.source, cut.target)
        )
        if source == target:
            continue
        share = batch.parts(cut.dims)
        for root, size in ((source, cut.source_bytes), (target, cut.grad * cut.target_bytes)):
            if root in decision.chosen:
                sent = all_gather(n, size * cut.times / share)
                add(over, f"split otherwise behind {names[root]}", sent)


def _gathers(
    row: Row, size: int | float, computed: int | None, axes: Mapping[str, int], add: Any
) -> None:
    """What is stored split is gathered, over the axes not computed over."""
    used = {axis for entry in row.spec for axis in spec_axes(entry)}
    kept = set() if computed is None else set(spec_axes([*row.spec, *[None] * 9][computed]))
    over = [axis for axis in axes if axis in used - kept]
    size = size / prod(axes[axis] for axis in kept)
    cause = "parameters gathered" if over == ["fsdp"] else f"{_numberless(row.leaf)} gathered"
    add(" x ".join(over), cause, all_gather(parts(over, axes), size))


def _class_names(rows: Sequence[Row], decision: Decision) -> dict[int, str]:
    members: dict[int, list[str]] = {}
    for row, value, d in zip(rows, decision.program.parameters, decision.computed, strict=True):
        if d is not None:
            members.setdefault(decision.classes[value.dims[d]], []).append(_numberless(row.leaf))
    return {root: _shown(list(dict.fromkeys(names))) for root, names in members.items()}


def _shown(names: list[str]) -> str:
    more = len(names) - 4
    return ", ".join(names[:4]) + (f" and {more} more" if more > 0 else "")


def _numberless(leaf: Leaf) -> str:
    return re.sub(r"\d+", "*", leaf.name)
