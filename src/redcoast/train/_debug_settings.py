"""Settings of JAX by which a user debugs the functions of a step."""

import contextlib
from collections.abc import Callable
from typing import TypeVar

import jax
from jaxtyping import PyTree

T = TypeVar("T")


def is_debugged() -> bool:
    """Whether the user's functions are to be debugged: JAX runs them operation by operation, at
    once or after a program of them has computed NaN."""
    settings = "jax_disable_jit", "jax_debug_nans", "jax_debug_infs"
    return any(getattr(jax.config, name) for name in settings)


def call_debugged(run: Callable[..., T], *args: PyTree) -> T:
    """Calls a jitted function so that JAX checks its results, if it has been asked to."""
    # JAX switches this off for a while where it traces a derivative or a loop, and then checks no
    # program of this thread any more, until the setting is made again.
    with contextlib.ExitStack() as stack:
        if getattr(jax.config, "jax_debug_nans"):  # noqa: B009  # it has no type
            stack.enter_context(jax.debug_nans(True))
        if getattr(jax.config, "jax_debug_infs"):  # noqa: B009
            stack.enter_context(jax.debug_infs(True))
        return run(*args)
