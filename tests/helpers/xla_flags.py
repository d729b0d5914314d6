"""The flags of XLA that the installed compiler knows: it ends a process that sets another one."""

import os
import subprocess
import sys
from collections.abc import Sequence

START = "import jaxlib.xla_client as xla; xla.make_cpu_client()"


def known_flags(flags: Sequence[str]) -> list[str]:
    """Returns the flags with which a compiler starts."""
    if _starts(flags):
        return list(flags)
    return [flag for flag in flags if _starts([flag])]


def _starts(flags: Sequence[str]) -> bool:
    environment = os.environ | {"XLA_FLAGS": " ".join(flags)}
    process = subprocess.run([sys.executable, "-c", START], env=environment, capture_output=True)
    return process.returncode == 0
