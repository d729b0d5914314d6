"""The choice: which dimensions are sharded over which axes of a mesh.

`_planned_collectives.py` lists what devices send if a class or the batch is sharded, once for the
choice and for the report. `_cost.py` makes a problem of it, in seconds, `_eliminate.py` solves the
problem, and `_strategy.py` compares three ways to use the axes; its `Decision` is what the report
and the specs of arrays follow from. `_split_examples.py` lists programs whose examples are split,
for batches with few rows.

`_memory.py` estimates memory: arrays and gradients from the specs, activations by running the
program on buffers without data (`_peak.py`, `_buffers.py`). `_replicate.py` replicates arrays where
memory is left. `_moved_rows.py` has the bytes of rows that operations move between devices.
"""
