"""The flags of XLA that the installed compiler knows: it ends a process that sets another one."""

import os
import subprocess
import sys
from collections.abc import Sequence

START = "import jaxlib.xla_client as xla; xla.make_cpu_client()"


def known_flags(flags: Sequence[str]) -> list[str]:
    """Returns the flags with which a compiler starts."""
    error = _error_of_start(flags)
    if not error:
        return list(flags)
    known = [flag for flag in flags if flag not in error]
    if len(known) < len(flags):
        return known_flags(known)
    return [flag for flag in flags if not _error_of_start([flag])]


def _error_of_start(flags: Sequence[str]) -> str:
    """What a compiler that does not start prints: it names the flags that it does not know."""
    environment = os.environ | {"XLA_FLAGS": " ".join(flags)}
    command = [sys.executable, "-c", START]
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    if process.returncode == 0:
        return ""
    return process.stderr or "It printed nothing."
