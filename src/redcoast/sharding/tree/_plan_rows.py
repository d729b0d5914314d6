"""The spec of every array of a tree, the reason for it, and how a program computes with it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

import numpy as np
from jax.sharding import PartitionSpec as P

from ...core._train_state import AbstractTrainState
from ._leaves import Leaf, flat_leaves

Kind = Literal["tensor-parallel", "fsdp", "replicated", "follows", "override", "pipeline"]
Role = Literal["parameter", "optimizer state", "other"]


@dataclass(frozen=True)
class Reason:
    """Why an array is sharded as it is.

    **Attributes:**

    - `kind`: `"tensor-parallel"` (computed with in parts; large arrays may be FSDP-sharded along
        another dimension as well), `"fsdp"` (sharded in storage, all-gathered for use),
        `"replicated"`, `"follows"` (optimizer state, sharded like its parameter), `"pipeline"`
        (on its stage) or `"override"`.
    - `text`: The reason in words, such as `"10 does not divide over model=4 (8 or 12 would)"`.
    - `together`: The paths of the arrays that can only be tensor-parallel together, if any.
    """

    kind: Kind
    text: str
    together: str = ""


OVERRIDE = Reason("override", "override")
STORED = "all-gathered where used"  # the reason for FSDP where there is no other
ON_STAGES = Reason("pipeline", "its layers are divided over the stages")


@dataclass(frozen=True)
class Row:
    """One array of a plan, its spec, and the reason for it."""

    leaf: Leaf
    spec: P
    reason: Reason
    role: Role


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


def plan_rows(tree: Any, model: list[Row]) -> list[Row]:
    """Returns a row for each array, in flattened order; `model` are those of the model alone.

    The optimizer's state and an average of the weights are sharded like the parameters.
    """
    if model_of(tree) is tree:
        return model
    leaves = flat_leaves(tree)
    inside = [leaf.index for leaf in leaves if leaf.path[0] == "model"]
    placed = zip(model, inside, strict=True)
    rows = [replace(row, leaf=replace(row.leaf, index=index)) for row, index in placed]
    by_path = {row.leaf.path: row for row in model}
    for leaf in leaves:
        if leaf.path[0] == "opt_state":
            rows.append(Row(leaf, *_follow(leaf, by_path), "optimizer state"))
        elif leaf.path[0] == "average":
            rows.append(Row(leaf, *_follow(leaf, by_path), "other"))
        elif leaf.path[0] != "model":
            text = "not a parameter" if leaf.shape else "scalar"
            rows.append(Row(leaf, P(), Reason("replicated", text), "other"))
    return sorted(rows, key=lambda row: row.leaf.index)


def model_of(tree: Any) -> Any:
    """The model of a training state, or the tree itself if it is not a training state."""
    return tree.model if isinstance(tree, AbstractTrainState) else tree


def _follow(state: Leaf, by_path: Mapping[tuple[str, ...], Row]) -> tuple[P, Reason]:
    """The spec of an array of the optimizer's state or of an average, and the reason for it.

    Optimizers keep their arrays in trees like the parameters', so the path of an array ends with
    the path of its parameter. If it ends with several paths, the longest is used.
    """
    candidates = list(_candidates(state, by_path))
    for row, rest in candidates:
        spec = _matching_spec(state, row.leaf, rest, row.spec)
        if spec is not None:
            return spec, Reason("follows", f"sharded like {row.leaf.name or 'the model'}")
    if not candidates or not candidates[0][0].leaf.path:
        text = "belongs to no parameter" if state.shape else "scalar"
    else:
        text = f"its sharding cannot be inferred from that of {candidates[0][0].leaf.name}"
    return P(), Reason("replicated", text)


def _candidates(
    state: Leaf, by_path: Mapping[tuple[str, ...], Row]
) -> Iterator[tuple[Row, tuple[str, ...]]]:
    """The rows that an array may belong to, the likeliest first, and the rest of its path.

    The rest is a number for SM3, which numbers its accumulators by dimension. A model that is one
    array has the empty path.
    """
    for path, rest in ((state.path, ()), (state.path[:-1], state.path[-1:])):
        if not rest or rest[0].isdigit():
            starts = (path[start:] for start in range(len(path)))
            yield from ((by_path[end], rest) for end in starts if end in by_path)
    if () in by_path:
        yield by_path[()], ()


def _matching_spec(state: Leaf, parameter: Leaf, rest: tuple[str, ...], spec: P) -> P | None:
    shape, like = state.shape, parameter.shape
    entries = (*spec, *(None,) * (len(like) - len(spec)))
    if rest:
        dim = int(rest[0])
        return trim_spec(entries[dim : dim + 1]) if shape == like[dim : dim + 1] else None
    if shape == like:
        return spec
    extra = len(shape) - len(like)
    if extra > 0 and shape[extra:] == like:
        return trim_spec((None,) * extra + entries)
    if len(shape) == len(like) and all(s in (1, size) for s, size in zip(shape, like, strict=True)):
        return trim_spec(tuple(e if s > 1 else None for s, e in zip(shape, entries, strict=True)))
    if prod(shape) == 1:
        return P()
    return _without_one(state, like, entries) if extra == -1 else None


def _without_one(state: Leaf, like: tuple[int, ...], entries: tuple) -> P | None:
    """The spec of an array with one dimension less, such as the row means of Adafactor."""
    removed = [d for d in range(len(like)) if like[:d] + like[d + 1 :] == state.shape]
    specs = {trim_spec(entries[:d] + entries[d + 1 :]) for d in removed}
    if len(specs) > 1:
        # With equal sizes, the shape does not tell which dimension was removed. Adafactor removes
        # the largest for its rows, and the second largest for its columns.
        order = [int(d) for d in np.argsort(like)]
        dropped = order[-1] if "v_row" in state.path else order[-2]
        adafactor = "v_row" in state.path or "v_col" in state.path
        specs = {trim_spec(entries[:dropped] + entries[dropped + 1 :])} if adafactor else set()
    return specs.pop() if specs else None


def trim_spec(entries: tuple) -> P:
    """A spec without trailing Nones, because `P("model") != P("model", None)`."""
    while entries and entries[-1] is None:
        entries = entries[:-1]
    return P(*entries)
