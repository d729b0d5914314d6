"""Measurements are only printed for runs that took all of their steps."""

import os

from jaxtyping import PyTree


def complete(state: PyTree, steps: int) -> PyTree:
    """The state of a run; exits with `EX_TEMPFAIL` if a signal stopped the run before its end."""
    if int(state.step) < steps:
        print(f"Stopped after step {int(state.step)} of {steps}, so nothing is measured.")
        raise SystemExit(os.EX_TEMPFAIL)
    return state
