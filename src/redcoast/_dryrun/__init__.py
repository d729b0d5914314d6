from .dry_run import dry_run as dry_run
from .meshes import suggest_mesh as suggest_mesh
from .result import DryRun as DryRun
from .suggestion import MeshSuggestion as MeshSuggestion
