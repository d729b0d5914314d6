"""The loops `fit`, `evaluate` and `predict_examples`, with their checks and stopping conditions."""
