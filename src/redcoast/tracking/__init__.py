"""Loggers (console, W&B, TensorBoard, trackio, JSON lines) and the metrics that they are given."""
