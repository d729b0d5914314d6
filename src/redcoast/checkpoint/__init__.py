"""Trees on disk: Orbax checkpoints that are complete or not there, checksums, and what is kept."""
