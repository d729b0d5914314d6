"""Meshes, the processes of a run and their agreement, and arrays that several processes share.

`_initialize.py` connects the processes and `_mesh.py` arranges their devices. `_kv_store.py`
exchanges small values between processes, `_agreement.py` compares what they are about to run, and
`_heartbeat.py` notices those that died. `_arrays.py` places arrays of the host on devices.
"""
