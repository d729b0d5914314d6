"""Hugging Face's names: for each family, its settings and its tensors, in both directions.

A file has the table of one family. It says which tensor of a file is which leaf of a model, and how
its dimensions are ordered; loading and saving read the same table.
"""
