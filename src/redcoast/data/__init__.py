"""From raw examples to batches on the devices: sources, their order, threads, and resumption.

A batch is a function of the seed and the step where the source has an index, so a resumed run reads
what it would have read.
"""
