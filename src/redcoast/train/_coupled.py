"""Losses that are no mean over examples, named where a batch is taken in parts."""

import functools as ft
import warnings
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from ..core._pytree import Static, join, split
from ..core._tracing import abstract_key
from ..sharding import coupling_sentence, examples_coupled
from ._loss import LossFn, evaluate_loss

Coupled = Sequence[dict[str, str]]
Shapes = tuple[jax.ShapeDtypeStruct, ...]


def warn_of_microbatches(coupled: Coupled, batch_size: int, accumulate: int) -> None:
    for one in coupled:
        warnings.warn(
            f"{coupling_sentence(one)} With `accumulate={accumulate}` the loss of the "
            f"{batch_size} examples of a batch is the mean over microbatches of "
            f"{batch_size // accumulate}, which is another loss. Leave `accumulate` out to train "
            "on that of the batch.",
            stacklevel=4,
        )


def warn_of_batches(coupled: Coupled, batch_size: int) -> None:
    for one in coupled:
        warnings.warn(
            f"{coupling_sentence(one)} An evaluation takes the mean over batches of {batch_size}, "
            "so that its result depends on `batch_size`. Compare results of one `batch_size` only, "
            "best with a number of examples that it divides.",
            stacklevel=4,
        )


def find_coupled(
    loss_fn: LossFn,
    model: PyTree,
    batch: PyTree,
    mesh: Mesh,
    compute_dtype: Any,
    *,
    training: bool,
) -> Coupled:
    """The first operation by which the examples of a batch depend on each other, if any."""
    arrays, static = split(model)
    shapes = lambda leaves: tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
    leaves, structure = split(batch)
    given = (shapes(arrays), static, shapes(leaves), structure, mesh, compute_dtype, training)
    try:
        return _find(loss_fn, *given)
    except TypeError:  # callables that hold arrays, say, have no hash
        return _find.__wrapped__(loss_fn, *given)


# Remembered, so that a loop that evaluates the same loss again traces it once.
@ft.lru_cache(maxsize=16)
def _find(
    loss_fn: LossFn,
    arrays: Shapes,
    static: Static,
    leaves: Shapes,
    structure: Static,
    mesh: Mesh,
    compute_dtype: Any,
    training: bool,
) -> Coupled:
    def loss(model: PyTree, batch: PyTree, key: Any) -> Any:
        model = model if training else eqx.nn.inference_mode(model)
        return evaluate_loss(loss_fn, model, batch, key, compute_dtype).loss

    model, batch = join(list(arrays), static), join(list(leaves), structure)
    return examples_coupled(loss, model, (batch, abstract_key()), mesh)
