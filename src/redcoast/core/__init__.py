"""Helpers for PyTrees, jaxprs, errors, dtypes and JSON. They import no other folder of redcoast."""
