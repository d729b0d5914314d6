"""The memory plan: which values a program keeps for its backward pass, and which it recomputes.

`_flat.py` reads a program as a list of steps, with what each needs for its derivative. `_blocks.py`
divides the steps into blocks, `_min_cut.py` decides what a block keeps at a price of memory, and
`_decide.py` does so for a program. `_rebuild.py` runs the program again with each block in
`jax.checkpoint`. `_search.py` finds the price at which a program fits.
"""
