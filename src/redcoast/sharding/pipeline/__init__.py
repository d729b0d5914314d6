"""Pipelines: layers as stages, each with its own devices, and microbatches that go through them.

The program is traced three times: for all rows, for few, and for those of one microbatch on one
device. `_stages.py` finds the scans over layers. `_follow.py` compares the first two traces, which
differ in the sizes of dimensions that count rows, and follows rows through a layer by the rules of
`_row_rules.py`. It refuses a layer that combines rows, since microbatches run one after the other.
`_draws.py` makes random bits for some rows equal to those for all. `_run_pipeline.py` runs the
schedule, with the third trace as the layer.
"""
