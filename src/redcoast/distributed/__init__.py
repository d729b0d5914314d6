"""Meshes, the processes of a run and their agreement, and arrays that several processes share."""
