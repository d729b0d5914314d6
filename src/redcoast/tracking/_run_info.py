"""What is known of a run before its first step."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """The information about a run that its loggers receive before the first step.

    **Attributes:**

    - `directory`: the run's directory, if it has one.
    - `resumed`: whether the run was resumed from a checkpoint.
    - `plan`: the summary and the table of the plan, as text.
    - `config`: the settings of the run: batch size, number of examples and of parameters, mesh,
        devices, versions; from `fit`, also the optimizer, the compute dtype and others.
    - `step`, `steps`: the number of steps completed before, and in total if that is known.
    - `rows`: the arrays of the plan, as dicts with the same keys: how each is sharded, and why.
    """

    directory: Path | None = None
    resumed: bool = False
    plan: str = ""
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    step: int = 0
    steps: int | None = None
    rows: tuple[Mapping[str, Any], ...] = ()
