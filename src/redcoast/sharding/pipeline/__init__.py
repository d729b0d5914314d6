"""Pipelines: which layers run as stages, whether they keep the rows of a batch apart, and the
schedule of microbatches."""
