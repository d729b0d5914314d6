"""The training step: a state, a loss and its gradients, precision, accumulation, compilation.

`_step.py` has the pure functions; `_compile.py` compiles them over the shardings of a plan, and
`_prepare.py` does all of it for a loop of the user's own.
"""
