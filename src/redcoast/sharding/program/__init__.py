"""The dimensions of a traced program: which are sharded alike, and what sharding them costs.

Each dimension of each value has a number, its *node*. Where an operation carries a dimension, the
result has the operand's node.

- *Links* join nodes that are sharded alike, such as the two that a product sums over. A link counts
  only if the number of devices divides both sizes. Linked nodes are a *class*, which is known by
  its smallest node, the *root*.
- *Soft links* join the nodes before and after an operation such as a slice. The batch is sharded
  again after it, and a tensor-parallel dimension is not: soft links count for the batch alone.
- *Blocked* nodes are never tensor-parallel, such as the layers that a scan goes over. Arrays are
  not stored in parts along them either, but over `pipe`. Rows that `lax.map` goes along are
  blocked, and still split with the batch.
- *Near* nodes are the blocked ones along which an example can be split, such as the height of an
  image.

`_trace.py` traces a function, and `_shared_programs.py` keeps traces for all the meshes that one
function is planned on. `_own_rows.py` writes indexing of rows by `jnp.arange` as a batch of
lookups. `_walk.py` goes through the jaxpr, into loops, branches and calls, with a `Scope` for the
values of each. For each operation, `_follow_rule.py` reads the rule of its primitive from the table
of `operations`, and records in the `Graph` of `_graph.py` what links nodes, what has to be summed
or gathered, and how much is computed and kept. The `Cursor` of the graph says where the walk is,
and how often that runs. For this, `_remat.py` finds what the results need, and what rematerialised
regions run again. `_classes.py` joins nodes. `_program.py` puts all of this together in a
`Program`.

`_batch.py` finds the rows of the batch, in the arguments and in arrays that the program creates.
`_batch_dims.py` finds all nodes that are sharded like these over a number of devices, and
`_tensor_sequence.py` the dimension that sequence parallelism splits.

Some loops sum gradients over the batch once, after the last iteration. `_loop_weights.py` finds
weights of which each shard of the batch can have a copy, and `_local_scans.py` loops that each
device runs on its own rows. For these, `_local_states.py` follows what a device has of each array.

`_interpolation.py` recognises indices and weights that interpolate between neighbours.
`_facts.py` is a walk for other questions to a program, such as whether a value depends on the
model.
"""
