"""Meshes, checks that the processes of a run agree, and arrays over several processes."""
