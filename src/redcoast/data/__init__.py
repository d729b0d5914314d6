"""From raw examples to batches on the devices: sources, their order, threads, and resumption.

If the source has an index, a batch is a function of the seed and the step, so a resumed run reads
the same examples as an uninterrupted one.
"""
