"""Recomputation: which values a program keeps for its backward pass, and which it computes again.

Memory is estimated in `solver`. If a step takes more than it may, `_memory_plan.py` plans again,
with what is chosen here.

`_flat.py` reads a program as a list of steps, with what each needs for its derivative.
`_partition.py` divides the steps into blocks. `_block_policies.py` lists what a block can keep, by
`_min_cut.py`. `_recompute_solver.py` chooses the division into blocks that costs least, and a
policy for each. `_rebuild.py` runs the program with each block in `jax.checkpoint`, and
`_summarise.py` says what is computed again by the lines of the user's code.
"""
