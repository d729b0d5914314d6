"""Loggers (console, W&B, TensorBoard, trackio, JSON lines) and their metrics."""
