"""A case of the benchmark."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jaxtyping import PyTree

Family = Literal["transformer", "other"]


@dataclass(frozen=True)
class Case:
    """A model with its loss, of the size that is measured.

    - `init`: from a key to the parameters, a tree of float32 arrays.
    - `loss`: `(params, batch, key)` to a scalar, `(scalar, aux)` or `(scalar, aux, params)`.
    - `batch`: makes the batch, always the same; of shapes only where `abstract`.
    - `megatron`: from the parameters to their specs in Megatron's hand-written split.
    - `abstract`: whether the model is too large for one machine: it is compiled, never run.
    - `compiled`: whether a step is compiled as well as planned.
    """

    name: str
    family: Family
    init: Callable[[jax.Array], Any]
    loss: Callable[[Any, Any, jax.Array], Any]
    batch: Callable[[], Any]
    megatron: Callable[[Any], Any] | None = None
    abstract: bool = False
    compiled: bool = True

    def abstract_params(self) -> PyTree:
        return jax.eval_shape(self.init, jax.random.key(0))
