"""The dimensions of a traced program: which are sharded alike, and what sharding them costs.

`_walk.py` goes through a jaxpr with a rule for each primitive, and records in a `Graph` what links
dimensions, what has to be summed or gathered, and how much is computed and kept.
"""
