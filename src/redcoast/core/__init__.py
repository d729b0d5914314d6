"""What all others use, and what imports none of them: PyTrees, jaxprs, errors, dtypes, JSON."""
