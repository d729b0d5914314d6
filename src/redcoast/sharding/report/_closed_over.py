"""Arrays that the planned function closes over, which are in no state."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..program._constants import LARGE_CONSTANT
from ..solver._strategy import Decision, constant_dims
from ._text import megabytes

_SHOWN = 6


def closed_over(decision: Decision, axes: Mapping[str, int]) -> list[dict[str, Any]]:
    """Of each large one its shape and bytes, and the axes that it is computed split over."""
    over = [axis for axis in decision.way.model if axes[axis] > 1]
    split = {one for one, _, d in constant_dims(decision) if d is not None}
    return [
        {
            "name": one.name,
            "shape": list(one.shape),
            "dtype": str(one.dtype),
            "bytes": one.bytes,
            "axes": over if one in split else [],
        }
        for one in decision.program.constants
        if one.bytes >= LARGE_CONSTANT
    ]


def closed_over_sentences(entries: Sequence[Mapping[str, Any]]) -> str:
    """What they are, where they lie, and how to pass them."""
    count, size = len(entries), megabytes(sum(one["bytes"] for one in entries))
    arrays = "an array" if count == 1 else f"{count} arrays"
    kinds = Counter(_kind(one) for one in entries).most_common()
    shown = ", ".join(f"{n} x {kind}" if n > 1 else kind for kind, n in kinds[:_SHOWN])
    more = f" and {len(kinds) - _SHOWN} more shapes" if len(kinds) > _SHOWN else ""
    return (
        f"The function closes over {arrays} of {size} MB: {shown}{more}. Constants of the compiled "
        "program are replicated on every device. Pass them as a part of the model that "
        '`trainable` leaves out, such as `trainable={"student": True, "teacher": False}`, or in a '
        "state of your own, and they are planned and stored as its other arrays are."
    )


def _kind(one: Mapping[str, Any]) -> str:
    split = f", computed split over {' x '.join(one['axes'])}" if one["axes"] else ""
    return f"{one['name']} ({megabytes(one['bytes'])} MB{split})"
