"""What a plan sends, by axis of the mesh and by cause, as it was priced."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from .dataflow import Decision, batch_dims
from .graph import Value
from .hardware import all_gather, all_reduce
from .nodes import Leaf
from .rows import Row


def traffic(
    rows: Sequence[Row], decision: Decision, axes: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Bytes that each device sends in a step: `axis`, `cause` and `bytes`, largest first."""
    count = 1
    for axis in decision.batch_axes:
        count *= axes[axis]
    batch = batch_dims(decision.program, count)
    sent: dict[tuple[str, str], float] = {}

    def add(axis: str, cause: str, size: int | float) -> None:
        if size > 0:
            sent[axis, cause] = sent.get((axis, cause), 0.0) + size

    names = _class_names(rows, decision)
    spread = " x ".join(axis for axis in decision.batch_axes if axes[axis] > 1)
    for found in decision.program.graph.sums.values():
        size = found.bytes * found.times
        root = decision.classes[found.node]
        if decision.classes.divides(found.node) and root in decision.chosen:
            way = "backward" if found.backward else "forward"
            cause = f"partial sums {way}, split along {names[root]}"
            add("model", cause, all_reduce(axes["model"], size / batch.parts(found.dims)))
        if batch.has(found.node):
            parts = axes["model"] if _is_split(decision, found.dims) else 1
            cause = "gradients and sums over the batch"
            add(spread, cause, all_reduce(batch.count, size / parts))
    _cuts(decision, batch, axes["model"], names, add)
    for row, value, computed in zip(
        rows, decision.program.parameters, decision.computed, strict=True
    ):
        _gathers(row, value, computed, axes, add)
    ordered = sorted(sent.items(), key=lambda item: (-item[1], item[0]))
    return [{"axis": a, "cause": c, "bytes": round(size)} for (a, c), size in ordered]


def _is_split(decision: Decision, dims: Sequence[int]) -> bool:
    classes = decision.classes
    return any(classes.divides(n) and classes[n] in decision.chosen for n in dims)


def _cuts(decision: Decision, batch: Any, n: int, names: Mapping[int, str], add: Any) -> None:
    classes = decision.classes
    for cut in decision.program.graph.cuts:
        source, target = (
            None if node is None or not classes.divides(node) else classes[node]
            for node in (cut.source, cut.target)
        )
        if source == target:
            continue
        parts = batch.parts(cut.dims)
        for root, size in ((source, cut.source_bytes), (target, cut.grad * cut.target_bytes)):
            if root in decision.chosen:
                sent = all_gather(n, size * cut.times / parts)
                add("model", f"split otherwise behind {names[root]}", sent)


def _gathers(
    row: Row, value: Value, computed: int | None, axes: Mapping[str, int], add: Any
) -> None:
    passes = 1 + value.grad
    size, name = value.bytes * passes, _numberless(row.leaf)
    if "fsdp" in row.spec:
        parts = axes["model"] if "model" in row.spec else 1
        add("fsdp", "parameters gathered", all_gather(axes["fsdp"], size / parts))
    if "model" in row.spec and computed is None:
        add("model", f"{name} gathered", all_gather(axes["model"], size))


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
