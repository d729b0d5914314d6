"""Compiles a training step for devices that need not be present, and reads its memory and traffic.

`_target_name.py` reads the name of a target, `_chips.py` has the published figures of its chips,
and `_devices.py` describes its devices to the compilers. `_job.py` is the step that `fit` would
run. `_compile_job.py` compiles it, and reads the compiler's figures with `hlo/`, a parser of the
compilers' text. `_dry_run.py` collects them in a report, with bounds on the time (`_roofline.py`),
an estimate (`_step_time.py`), and changes by which the step would fit (`_changes.py`).
`_mesh_search.py` compares meshes, and `_compare_targets.py` targets.
"""

from ._chips import CHIPS as CHIPS
from ._chips import Chip as Chip
from ._compare_targets import TargetComparison as TargetComparison
from ._compare_targets import compare_targets as compare_targets
from ._devices import target_devices as target_devices
from ._dry_run import dry_run as dry_run
from ._mesh_search import suggest_mesh as suggest_mesh
from ._mesh_table import MeshSuggestion as MeshSuggestion
from ._report import DryRun as DryRun
