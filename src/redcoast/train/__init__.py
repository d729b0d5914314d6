"""The training step: a state, a loss and its gradients, precision, accumulation, compilation.

`_step.py` has the pure functions, `_compile.py` compiles them with the shardings of a plan, and
`_prepare.py` combines both for a custom training loop.
"""
