"""Why an array is sharded as it is."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["tensor-parallel", "fsdp", "replicated", "follows", "override", "pipeline"]


@dataclass(frozen=True)
class Reason:
    """Why an array is sharded as it is.

    **Attributes:**

    - `kind`: `"tensor-parallel"` (computed with in parts; large arrays may be FSDP-sharded along
        another dimension as well), `"fsdp"` (sharded in storage, all-gathered for use),
        `"replicated"`, `"follows"` (optimizer state, sharded like its parameter) or `"override"`.
    - `text`: The reason in words, such as `"10 does not divide over model=4 (8 or 12 would)"`.
    - `together`: The paths of the arrays that can only be tensor-parallel together, if any.
    """

    kind: Kind
    text: str
    together: str = ""


OVERRIDE = Reason("override", "override")
STORED = "all-gathered where used"  # the reason for FSDP where there is no other
ON_STAGES = Reason("pipeline", "its layers are divided over the stages")
