from .dry_run import dry_run as dry_run
from .result import DryRun as DryRun
from .suggest_mesh import suggest_mesh as suggest_mesh
from .suggestion import MeshSuggestion as MeshSuggestion
