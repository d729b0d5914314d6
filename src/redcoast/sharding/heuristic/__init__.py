"""The rules of the RedCoast paper, for a tree without a function that uses it.

`_matrices.py` reads the tree as blocks of matrices of one layer, each with an input and an output
side. `_rules.py` decides what is sharded over `model`. `_structural.py` plans a tree by both, with
its adapters and quantised weights, and shards what is left over `fsdp`.
"""
