"""Over which axes a plan splits the batch, in words."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..choice.dataflow import Decision, batch_dims, parts
from ..nodes import flat_leaves
from .braces import shortened

# Sizes of arrays that came with the batch and are no rows.
_SHOWN = 6


def batch_axes(decision: Decision, axes: Mapping[str, int]) -> list[str]:
    """The axes that the batch is split over: fewer than the plan wants if it does not divide."""
    used = [axis for axis in decision.way.batch if axes[axis] > 1]
    while used and not batch_dims(decision.program, parts(used, axes)).roots:
        used = used[:-1]
    return used


def batch_sentences(decision: Decision, axes: Mapping[str, int], others: Mapping[str, int]) -> str:
    """What happens to the batch, and to what came with it and is no rows; empty without one."""
    by_size: dict[int, list[str]] = {}
    for name, size in others.items():
        by_size.setdefault(size, []).append(name)
    named = [f"{shortened(names)} ({size:,})" for size, names in by_size.items()]
    more = f" and {len(named) - _SHOWN} more sizes" if len(named) > _SHOWN else ""
    listed = ", ".join(named[:_SHOWN]) + more
    also = f" It has {_sizes(decision)} rows; arrays in it that are not taken as rows: {listed}."
    return _sentence(decision, axes) + (also if named else "")


def _sizes(decision: Decision) -> str:
    program = decision.program
    return _listed([f"{n}" for n in sorted({program.graph.sizes[d] for d in program.batch.given})])


def _sentence(decision: Decision, axes: Mapping[str, int]) -> str:
    """What happens to the batch, and why where that is not the usual."""
    program, way = decision.program, decision.way
    if not program.batch.given:
        return ""
    wanted = [axis for axis in way.batch if axes[axis] > 1]
    used = batch_axes(decision, axes)
    split = f"split over {_listed(used)}" if used else "whole on every device"
    if "model" in way.batch:
        return f"The batch is {split}: nothing is worth computing split over model."
    if "fsdp" in way.model:
        alone = "split over data alone" if used else "whole on every device"
        return (
            "There are few examples for so many parameters: arrays are computed split over fsdp "
            f"too, and the batch is {alone}."
        )
    if not wanted:
        return f"The batch is {split}: data and fsdp have one device each."
    if used == wanted:
        return f"The batch is {split}."
    over = f"{' x '.join(wanted)} = {parts(wanted, axes)}"
    return f"A batch of {_sizes(decision)} does not divide over {over}: it is {split}."


def not_rows(batch: Sequence[Any], decision: Decision) -> dict[str, int]:
    """Arrays of the batch that are not split with it, and the size of their first dimension.

    `batch` is the first of a function's arguments, alone.
    """
    given = [leaf for leaf in flat_leaves(tuple(batch)) if leaf is not None]
    left_out = [given[place] for place in decision.program.batch.left_out]
    return {"/".join(leaf.path[1:]): leaf.shape[0] for leaf in left_out}


def _listed(names: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
