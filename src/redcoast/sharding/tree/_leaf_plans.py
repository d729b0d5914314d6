"""The spec of every array of a tree, the reason for it, and how a program computes with it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jax.sharding import PartitionSpec as P

from ...distributed._mesh import BATCH_AXES
from ._leaves import Leaf

Kind = Literal["tensor-parallel", "fsdp", "replicated", "follows", "override", "pipeline"]
Role = Literal["parameter", "optimizer state", "other"]


@dataclass(frozen=True)
class Reason:
    """Why an array is sharded as it is.

    - `kind`: `"tensor-parallel"` (computed with in parts; large arrays may be FSDP-sharded along
        another dimension as well), `"fsdp"` (sharded in storage, all-gathered for use),
        `"replicated"`, `"follows"` (optimizer state, sharded like its parameter or like the
        parts of it that devices update), `"pipeline"` (on its stage) or `"override"`.
    """

    kind: Kind
    text: str  # the reason in words, such as `"10 does not divide over model=4 (8 or 12 would)"`
    together: str = ""  # the paths of the arrays that can only be tensor-parallel together, if any


HOST = "pinned_host"  # the memory of the host, in JAX
OVERRIDE = Reason("override", "override")
STORED = "all-gathered where used"  # the reason for FSDP where there is no other
ON_STAGES = Reason("pipeline", "its layers are divided over the stages")


@dataclass(frozen=True)
class LeafPlan:
    """One array of a plan, its spec, and the reason for it."""

    leaf: Leaf
    spec: P
    reason: Reason
    role: Role
    # Of a parameter, how its elements are updated; `None` if as it is stored.
    update_spec: P | None = None


@dataclass(frozen=True)
class Recompute:
    """Which values of a program are computed again in its backward pass, to fit into memory.

    A program that is traced again, for other shapes too, is divided and decided anew in the same
    way.

    - `share`: The memory within which values are kept, as a share of all bytes that derivatives
        need.
    """

    parts: int  # how many times less a block may need than the whole program
    share: float
    trained: tuple[bool, ...] = ()  # for each array of the model, whether it is trained


@dataclass(frozen=True)
class Compute:
    """How a program computes with a tree's arrays.

    - `dims`: For each array the dimension that is tensor-parallel, or `None`, as in the
        `parallel_dims` of a decision.
    - `batch_axes`, `model_axes`: The axes of the batch, and those of tensor-parallel dimensions.
    - `sequence_parallel`: Whether values without a tensor-parallel dimension are sharded along the
        sequence.
    - `constants`: The large arrays that the function closes over, each as its dtype and shape and
        its tensor-parallel dimension.
    - `splits_examples`: Whether the batch is split along dimensions of its examples, as where its
        rows do not divide over `batch_axes` or a step does not fit into memory.
    - `microbatches`: How many a pipeline divides a batch into, if a user has decided it.
    - `split`: The dimensions that are split within examples: for axes of the mesh, the places of
        the batch's arrays, each with a dimension.
    - `recompute`: What the backward pass computes again.
    - `offloaded`: Whether the optimizer's state is in the memory of the host.
    """

    dims: tuple[int | None, ...]
    batch_axes: tuple[str, ...] = BATCH_AXES
    model_axes: tuple[str, ...] = ("model",)
    sequence_parallel: bool = False
    constants: tuple[tuple[str, int | None], ...] = ()
    splits_examples: bool = False
    microbatches: int | None = None
    split: tuple[tuple[tuple[str, ...], tuple[tuple[int, int], ...]], ...] = ()
    recompute: Recompute | None = None
    offloaded: bool = False


def trim_spec(entries: Sequence[object]) -> P:
    """A spec without trailing Nones, because `P("model") != P("model", None)`."""
    while entries and entries[-1] is None:
        entries = entries[:-1]
    return P(*entries)
