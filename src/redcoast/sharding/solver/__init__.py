"""The choice: which dimensions are sharded over which axes of a mesh.

`_planned_collectives.py` lists what devices send if a class or the batch is sharded, once for the
choice and for the report. `_cost.py` makes a problem of it, in seconds, `_eliminate.py` solves the
problem, and `_strategy.py` compares three ways to use the axes; its `Decision` is what the report
and the specs of arrays follow from. `_memory.py` estimates memory.
"""
