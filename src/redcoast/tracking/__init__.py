"""Loggers (console, W&B, TensorBoard, trackio, JSON lines) and the metrics that they are given.

`_metrics.py` reads the metrics of a step while the next one runs, and passes them on. A logger is
any function of metrics and a step; the others here write them to a terminal, a notebook, a file or
a service.
"""
