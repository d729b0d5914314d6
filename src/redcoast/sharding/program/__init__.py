"""The dimensions of a traced program: which are sharded alike, and what sharding them costs.

Each dimension of each value has a *node*: a result has the operand's node where a dimension is
carried. *Links* join nodes that meet and are sharded alike, and nodes that are joined are a
*class*, known by its smallest node. A *soft link* joins what a batch goes on after, as the rows
before and after a slice, which are sharded again: it counts for the batch, and not for parameters.
*Blocked* nodes are never tensor-parallel, and arrays are stored in parts along them over `pipe`
alone; rows that `lax.map` goes along are still split. An example can be split along the *near* ones
among them. Classes depend on the number of devices: what does not divide has no links.

`_trace.py` traces a function. `_walk.py` goes through its jaxpr, into loops, branches and calls.
For each operation, `_follow_rule.py` reads the rule of its primitive from the table of
`operations`, and records in the `Graph` of `_graph.py` what links nodes, what has to be summed or
gathered, and how much is computed and kept. The `Cursor` of the graph says where the walk is, and
how often that runs. `_classes.py` joins nodes, and `_program.py` puts all of this together.

`_batch.py` finds the rows of the batch: by the arguments, and by what is combined with them in
arrays that the program creates. `_batch_dims.py` has the dimensions that are sharded like the batch
over a number of devices, and `_tensor_sequence.py` finds the dimension that sequence parallelism
splits. `_remat.py` finds what is used and what is computed again. `_loop_weights.py` and
`_local_scans.py` find the loops after which gradients are summed over the batch once, the first by
weights that can be copied, the second by rows that are independent, which `_local_states.py`
follows through a jaxpr as each device has them. `_facts.py` follows other facts through the walked
program for those who ask, such as whether a value depends on the model. `_shared_programs.py` keeps
traces for all the meshes that one function is planned on.
"""
