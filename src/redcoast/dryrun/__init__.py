"""Compiles a training step for devices that need not be present, and reads its memory and traffic.

`hlo/` is a parser of the compilers' text: it finds collectives, their devices and their bytes, and
how many times loops run them.
"""

from ._chips import CHIPS as CHIPS
from ._chips import Chip as Chip
from ._compare_targets import TargetComparison as TargetComparison
from ._compare_targets import compare_targets as compare_targets
from ._dry_run import dry_run as dry_run
from ._mesh_search import suggest_mesh as suggest_mesh
from ._mesh_table import MeshSuggestion as MeshSuggestion
from ._report import DryRun as DryRun
from ._target_devices import target_devices as target_devices
