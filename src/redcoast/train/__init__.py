"""The training step: a state, a loss and its gradients, precision, accumulation, compilation.

`_step.py` has the pure functions. `_training.py` has what a step depends on, as one record.
`_compile.py` compiles steps over the shardings of a plan, `_programs.py` keeps what was compiled
for later runs, and `_prepare.py` does all of it for a loop of the user's own.
"""
