"""Pipelines: layers as stages, each with its own devices, and microbatches that go through them.

`_stages.py` finds the scans over layers. It traces the function again for few rows, and for those
of one microbatch on one device if that is another number. `_follow.py` compares the traces for few
and for all rows: dimensions that count rows differ in size. It follows rows through a layer by the
rules of `_row_rules.py`, and refuses a layer that combines rows, since microbatches run one after
the other. `_draws.py` makes random bits for some rows equal to those for all. `_run_pipeline.py`
runs the schedule, with the trace for a microbatch as the layer.
"""
