import ctypes
import sys
from typing import Any

from jax._src import distributed


def leave_on_error() -> None:
    """Lets an uncaught exception end this process although the others have not ended.

    At exit, JAX waits for all processes to end as well, while they wait for this one in a
    collective. Without its farewell they notice that it is gone.
    """
    before = sys.excepthook

    def leave(*error: Any) -> None:
        before(*error)
        state = distributed.global_state
        for connection in (state.client, state.service):
            # What is never freed does not wait in its destructor either.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
        state.client = state.service = None

    sys.excepthook = leave
