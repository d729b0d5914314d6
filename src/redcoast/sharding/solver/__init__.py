"""The choice: which dimensions are sharded over which axes of a mesh.

`_planned_collectives.py` lists what devices send if a class or the batch is sharded, once for the
choice and for the report; `_moved_rows.py` has those of rows that operations move. `_cost.py` makes
a problem of it, in seconds, `_eliminate.py` solves the problem, and `_strategy.py` compares three
ways to use the axes. Its `Decision` says what is computed in parts, and the `StorageLayout` of
`_layout.py` where each array is stored. `_split_examples.py` lists programs whose examples are
split, where rows do not divide or a step does not fit into memory, or the program asks for it.
`_hardware.py` has the speeds of devices and the bytes of collectives.

`_memory_estimate.py` estimates the memory of a layout: arrays and gradients from the specs, and
activations, which the layout finds by running the program on buffers without data (`_peak.py`,
`_memory_access.py`, `_buffers.py`, and `_residuals.py` for what loops stack). `_figures.py` has the
estimates as data. `_replicate.py` replicates arrays where memory is left.
"""
