"""Warnings for losses that are not a mean over examples if a batch is divided."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import PyTree

from ..core._frames import warn
from ..core._pytree import join, split
from ..core._reuse import reuse
from ..core._tracing import abstract_key
from ..sharding import Coupling, coupling_sentence, examples_coupled
from ._loss import LossFn, evaluate_loss

_COUPLED: dict[Any, Any] = {}


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
    mesh: Mesh | AbstractMesh,
    compute_dtype: Any,
    *,
    training: bool,
) -> Coupling | None:
    """Finds the first operation that makes the examples of a batch depend on each other."""
    shapes = lambda arrays: tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)
    arrays, static = split((model, batch))
    key = (shapes(arrays), static, mesh, compute_dtype, training)

    def find(functions: Sequence[LossFn]) -> Coupling | None:
        model, batch = join(list(key[0]), static)

        def loss(model: PyTree, batch: PyTree, key: Any) -> Any:
            model = model if training else eqx.nn.inference_mode(model)
            return evaluate_loss(functions[0], model, batch, key, compute_dtype).loss

        return examples_coupled(loss, model, (batch, abstract_key()), mesh)

    return reuse(_COUPLED, [loss_fn], key, find)  # repeated evaluations of a loss trace it once
