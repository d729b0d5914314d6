"""Trees on disk: Orbax checkpoints that are complete or not there, checksums, and what is kept.

`_tree.py` saves and loads one tree. `_policy.py` decides which checkpoints of a run are kept,
`_saver.py` saves them in the background, and `_checkpointer.py` is both for a loop. The others
protect them: checksums, locks of a run's directory, and writes that survive a loss of power.
"""
