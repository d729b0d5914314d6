"""Runs a function with its activations constrained to a plan, by evaluating its jaxpr again.

`_function.py` traces a function at the shapes that it is called with. `_shardings.py` finds the
sharding of each of its values, from the tensor-parallel dimensions of the model and from the batch.
`_interpreter.py` evaluates the jaxpr with constraints on the results of products and lookups. What
XLA partitions wrongly or with needless communication, files beside it run in another way:
convolutions, transforms, kernels, weights of loops, and loops whose length depends on data. They
take an equation with its operands and shardings, a `BoundEquation`.
"""
