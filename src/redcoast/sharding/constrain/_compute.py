"""How a program computes with arrays that are stored split."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Compute:
    """How a program computes with a tree's arrays.

    `dims` has for each array the dimension that is computed split over `model_axes`, or None;
    `batch_axes` are the axes that the batch is split over. With `sequence`, what is not computed
    split is split along the sequence. `constants` has the same as `dims` of large arrays that the
    function closes over, each with its dtype and shape.
    """

    dims: tuple[int | None, ...]
    batch_axes: tuple[str, ...] = ("data", "fsdp")
    model_axes: tuple[str, ...] = ("model",)
    sequence: bool = False
    constants: tuple[tuple[str, int | None], ...] = ()
