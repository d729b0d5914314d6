"""Low-rank adapters of a model's matrices, and their files."""
