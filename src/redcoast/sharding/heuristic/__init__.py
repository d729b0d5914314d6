"""The rules of the RedCoast paper, for a tree without a function that uses it.

`_matrices.py` reads the tree as blocks of matrices, each with an input and an output side.
`_rules.py` shards matrices over `model`. `_structural.py` plans a tree by both.
"""
