"""Warnings for losses that are not a mean over examples if a batch is divided."""

from typing import Any

import equinox as eqx
import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from ..core._frames import warn
from ..core._pytree import Static, join, split
from ..core._reuse import reuse
from ..core._tracing import abstract_key
from ..sharding import Coupling, coupling_sentence, examples_coupled
from ._loss import LossFn, evaluate_loss

_COUPLED: dict[Any, Any] = {}
Shapes = tuple[jax.ShapeDtypeStruct, ...]


def warn_of_microbatches(coupled: Coupling | None, batch_size: int, accumulate: int) -> None:
    if coupled is not None:
        warn(
            f"{coupling_sentence(coupled)} With `accumulate={accumulate}` the loss of the "
            f"{batch_size} examples of a batch is the mean over microbatches of "
            f"{batch_size // accumulate}, which is a different loss. Leave out `accumulate` to "
            "train on the loss of the full batch."
        )


def warn_of_batches(coupled: Coupling | None, batch_size: int) -> None:
    if coupled is not None:
        warn(
            f"{coupling_sentence(coupled)} An evaluation takes the mean over batches of "
            f"{batch_size}, so its result depends on `batch_size`. Compare only results with the "
            "same `batch_size`, preferably one that divides the number of examples."
        )


def find_coupled(
    loss_fn: LossFn,
    model: PyTree,
    batch: PyTree,
    mesh: Mesh,
    compute_dtype: Any,
    *,
    training: bool,
) -> Coupling | None:
    """Finds the first operation that makes the examples of a batch depend on each other."""
    arrays, static = split(model)
    shapes = lambda leaves: tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
    leaves, structure = split(batch)
    given = (shapes(arrays), static, shapes(leaves), structure, mesh, compute_dtype, training)
    # Repeated evaluations of the same loss trace it once.
    return reuse(_COUPLED, [loss_fn], given, lambda functions: _find(functions[0], *given))


def _find(
    loss_fn: LossFn,
    arrays: Shapes,
    static: Static,
    leaves: Shapes,
    structure: Static,
    mesh: Mesh,
    compute_dtype: Any,
    training: bool,
) -> Coupling | None:
    def loss(model: PyTree, batch: PyTree, key: Any) -> Any:
        model = model if training else eqx.nn.inference_mode(model)
        return evaluate_loss(loss_fn, model, batch, key, compute_dtype).loss

    model, batch = join(list(arrays), static), join(list(leaves), structure)
    return examples_coupled(loss, model, (batch, abstract_key()), mesh)
