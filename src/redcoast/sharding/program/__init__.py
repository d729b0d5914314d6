"""The dimensions of a traced program: which are sharded alike, and what sharding them costs.

`_trace.py` traces a function. `_walk.py` goes through its jaxpr, into loops, branches and calls.
For each operation, `_follow_rule.py` reads the rule of its primitive from the table of
`operations`, and records in the `Graph` of `_graph.py` what links dimensions, what has to be summed
or gathered, and how much is computed and kept. The `Cursor` of the graph says where the walk is,
and how often that runs. `_classes.py` joins linked dimensions into classes, `_batch.py` finds the
rows of the batch, and `_program.py` puts all of this together; `_batch_dims.py` has the dimensions
that are sharded like the batch over a number of devices. `_remat.py` finds what is used and what is
computed again. `_facts.py` follows other facts through the walked program for those who ask, such
as whether a value depends on the model.
"""
