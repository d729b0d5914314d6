"""Saves trees to disk: atomic Orbax checkpoints, checksums, and the policy that deletes old
ones."""
