"""The settings of a run, as one record."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jax.sharding import Mesh

from ..checkpoint._policy import Checkpoints
from ..data._collate import CollateFn
from ..data._loading import Threads
from ..sharding import Plan
from ..sharding.tree._overrides import Override
from ..train._training import Training
from ._early_stopping import EarlyStopping
from ._evaluation import Evaluation


@dataclass(frozen=True)
class RunSettings:
    """The arguments of a call of `fit`, checked and completed: how it trains, on which batches, by
    which plan, and what is evaluated and saved."""

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
