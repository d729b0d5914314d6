"""The choice: which dimensions are sharded over which axes of a mesh.

`_strategy.py` compares three ways to use the axes. For each, `_planned_collectives.py` lists what
devices send if a class or the batch is sharded (`_moved_rows.py`: where operations move rows),
`_cost.py` makes a problem of it, in seconds, and `_eliminate.py` finds the cheapest classes. The
report reads the same list. A `Decision` says what is computed in parts, and has the pipeline if
there is one. `_hardware.py` has the speeds of devices and the bytes of collectives.

The `StorageLayout` of `_layout.py` says where each array is stored, for a decision.
`_memory_estimate.py` estimates its memory: arrays and gradients by their specs, and activations by
running the program on buffers without contents. `_peak.py` runs jaxprs and loops, with the frames
of `_peak_frames.py`, and `_operation_buffers.py` single operations on the `_buffers.py`, as
`_memory_access.py` and, for what loops stack, `_residuals.py` say. `_figures.py` has the estimates
as data. `_replicate.py` replicates arrays where memory is left.

`_split_examples.py` lists ways to split the examples of a program, where rows do not divide or a
step does not fit into memory, or where the program asks for it.
"""
