"""What all others use, and what imports none of them: PyTrees, jaxprs, errors, dtypes, JSON.

Whatever differs between versions of JAX, and is read from its undocumented parts, is here, such as
the layout of loops in a jaxpr (`_control_flow.py`) and the context of a trace (`_tracing.py`).
"""
