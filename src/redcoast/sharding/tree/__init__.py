"""The leaves of a PyTree as the planner sees them: paths, shapes, overrides, optimizer state.

`_leaves.py` lists the arrays of a tree with their paths. `_overrides.py` checks and applies the
specs that a user gives. `_leaf_plans.py` has what is decided: the spec of each array with its
reason, and `Compute`, how a program computes with them. `_state_plans.py` plans what is like the
parameters, as the optimizer's state is.
"""
