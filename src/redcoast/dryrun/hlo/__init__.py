"""Reads compiled programs: collectives, with their devices and bytes, and trip counts of loops."""

from ._collectives import Collective as Collective
from ._collectives import by_kind_and_axes as by_kind_and_axes
from ._collectives import collectives as collectives
from ._collectives import sent_bytes as sent_bytes
