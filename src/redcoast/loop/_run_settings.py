"""The settings of a run, as one record."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from ..checkpoint._policy import Checkpoints
from ..data._collate import CollateFn
from ..data._loading import Threads
from ..sharding import Plan
from ..sharding.tree._overrides import Override
from ..train._training import Training
from ._early_stopping import EarlyStopping
from ._evaluation import Evaluation
from ._function_checksums import checksum_of_functions

N = TypeVar("N", bound=int | float | None)

# Of a run, in what a checkpoint has of its data.
SETTINGS, FUNCTIONS = "settings", "functions"


@dataclass(frozen=True)
class RunSettings:
    """The arguments of a call of `fit`, completed, and checked as far as that needs no data: how it
    trains, on which batches, by which plan, and what is evaluated and saved."""

    training: Training
    average: int | float | None
    collate_fn: CollateFn | None
    batch_size: int | None
    epochs: int | None
    steps: int | None
    threads: Threads
    mesh: Mesh  # of the plan, if one is given; otherwise the user's or the default
    chooses_mesh: bool  # whether the best mesh is to be searched
    plan: Plan | Literal["verify"] | None
    overrides: Sequence[Override]
    memory: int | float | Literal["auto"] | None
    evaluation: Evaluation | None
    early_stopping: EarlyStopping | None
    checkpoints: Checkpoints | None

    @property
    def of_results(self) -> dict[str, int | float | str | None]:
        """The settings that change the results of a run and may differ when it is resumed, in
        JSON."""
        compute_dtype = self.training.compute_dtype
        if compute_dtype is not None:
            compute_dtype = str(np.dtype(compute_dtype))
        return {
            "batch_size": self.batch_size,
            "accumulate": self.training.accumulate,
            "compute_dtype": compute_dtype,
            "average": self.average,
        }

    def functions_of_results(self, model: PyTree) -> dict[str, str]:
        """Checksums of the functions that change the results of a run, and of those in a model,
        such as its activation function."""
        leaves = [x for x in jax.tree.leaves(model) if not eqx.is_array(x)]
        functions = {
            "model": leaves,
            "optimizer": self.training.optimizer,
            "loss_fn": self.training.loss_fn,
            "collate_fn": self.collate_fn,
        }
        return {name: checksum_of_functions(fn) for name, fn in functions.items()}


def plain_number(value: N) -> N:
    """A number of NumPy as one of Python, which JSON supports; other values as they are."""
    if isinstance(value, np.integer | np.floating):
        return value.item()  # pyright: ignore[reportReturnType]
    return value
