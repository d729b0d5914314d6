"""Runs a function with its activations constrained to a plan, by evaluating its jaxpr again.

`_function.py` traces a function at the shapes that it is called with. `_shardings.py` finds the
sharding of each of its values, from the tensor-parallel dimensions of the model and from the batch.
`_interpreter.py` evaluates the jaxpr with constraints on the results of products and lookups, on
what loops carry, and on arrays of the model where they are used (`_stored_arrays.py`).
`_recompute.py` runs a function that computes values again in its backward pass, and `_verify.py`
compares a planned program with one on one device.

What XLA partitions wrongly or with needless communication runs in another way. An equation with its
operands and shardings is a `BoundEquation` (`_bound_equation.py`). For these, the interpreter asks
other files for the results:

- Arrays that are split: `_split_fft.py`, `_split_lookup.py` and `_split_conv.py`. For split
  examples, also `_split_pad.py`, `_split_interpolation.py` and `_split_product.py`, whose
  dimensions take axes in the order of `_product_order.py`. `_halos.py` has what a device needs of
  the parts of its neighbours.
- Rows that each device runs alone: `_local_choice.py` says which equations, `_local_region.py` runs
  them. `_local_operation.py` does so for single operations, and `_own_rules.py` for primitives of
  Equinox.
- Loops: `_copied_weights.py` and `_gathered_layers.py`.
- Custom derivatives: `_custom_rules.py`.
"""
