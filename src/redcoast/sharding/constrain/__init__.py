"""Runs a function with its activations constrained to a plan, by evaluating its jaxpr again."""
