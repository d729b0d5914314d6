"""Reads compiled programs: collectives, with their devices and bytes, and memory at its peak."""

from ._collectives import Collective as Collective
from ._collectives import collectives as collectives
from ._collectives import sent_bytes as sent_bytes
from ._liveness import HeldBuffer as HeldBuffer
from ._liveness import peak_buffers as peak_buffers
from ._program_memory import peak_bytes as peak_bytes
from ._program_memory import temporary_bytes as temporary_bytes
