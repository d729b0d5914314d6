"""Hugging Face's names: for each family, its settings and its tensors, in both directions."""
