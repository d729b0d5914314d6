"""Automatic distributed training and inference of any PyTree model, in plain functions."""
