from typing import Any

import jax
import jax.numpy as jnp


def example_inputs(config: Any, rows: int) -> tuple[jax.ShapeDtypeStruct]:
    """Abstract tokens from which a call of a model with learned positions can be planned."""
    return (jax.ShapeDtypeStruct((rows, min(128, config.positions)), jnp.int32),)
