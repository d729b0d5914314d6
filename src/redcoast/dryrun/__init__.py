from ._dry_run import dry_run as dry_run
from ._mesh_search import suggest_mesh as suggest_mesh
from ._mesh_table import MeshSuggestion as MeshSuggestion
from ._report import DryRun as DryRun
