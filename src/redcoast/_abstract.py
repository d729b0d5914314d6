"""Keys that are nothing but a shape, for tracing."""

from typing import Any

import jax


def abstract_key() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0))
