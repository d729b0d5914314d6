"""Over which axes a plan splits the batch, in words."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..choice.dataflow import Decision, batch_dims, parts
from ..nodes import flat_leaves


def batch_axes(decision: Decision, axes: Mapping[str, int]) -> list[str]:
    """The axes that the batch is split over: fewer than the plan wants if it does not divide."""
    used = [axis for axis in decision.way.batch if axes[axis] > 1]
    while used and not batch_dims(decision.program, parts(used, axes)).roots:
        used = used[:-1]
    return used


def batch_sentence(decision: Decision, axes: Mapping[str, int]) -> str:
    """What happens to the batch, and why where that is not the usual; empty without a batch."""
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
    sizes = _listed(sorted({f"{program.graph.sizes[node]}" for node in program.batch.given}))
    n = parts(wanted, axes)
    return f"A batch of {sizes} does not divide over {' x '.join(wanted)} = {n}: it is {split}."


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
