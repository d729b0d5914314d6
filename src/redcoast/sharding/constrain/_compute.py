"""How a program computes with the arrays of a plan."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Compute:
    """How a program computes with a tree's arrays.

    `dims` has for each array the dimension that is tensor-parallel (sharded over `model_axes`), or
    None. `batch_axes` are the axes that the batch is split over. With `sequence`, values without a
    tensor-parallel dimension are sharded along the sequence. `constants` are the large arrays that
    the function closes over, each as its dtype and shape and its tensor-parallel dimension. With
    `tokens`, a batch with fewer rows than `batch_axes` have devices is split along its sequence.
    `microbatches` is how many a pipeline divides a batch into, if a user has decided it.
    """

    dims: tuple[int | None, ...]
    batch_axes: tuple[str, ...] = ("data", "fsdp")
    model_axes: tuple[str, ...] = ("model",)
    sequence: bool = False
    constants: tuple[tuple[str, int | None], ...] = ()
    tokens: bool = False
    microbatches: int | None = None
