"""A replay buffer on the devices, whose first dimension counts environments, as that of a batch
does."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

Arrays = dict[str, Any]


def empty_buffer(num_envs: int, steps: int, **shapes: tuple[int, ...]) -> Arrays:
    """Creates a buffer for the newest `steps` transitions of each environment, given the shapes of
    what is kept of a transition, such as `reward=()`."""
    arrays = {name: jnp.zeros((num_envs, steps, *shape)) for name, shape in shapes.items()}
    # The number of transitions that were added of each environment, which may exceed `steps`.
    return {"kept": arrays, "added": jnp.int32(0)}


def add(buffer: Arrays, transitions: Arrays) -> Arrays:
    """Adds transitions of shape `num_envs steps ...`, in place of the oldest if the buffer is full.

    The number of steps has to divide that of the buffer.
    """
    capacity, count = (next(iter(x.values())).shape[1] for x in (buffer["kept"], transitions))
    start = buffer["added"] % capacity

    def write(old: jax.Array, new: Any) -> jax.Array:
        new = jnp.asarray(new, old.dtype)
        return jax.lax.dynamic_update_slice_in_dim(old, new, start, axis=1)

    arrays = {name: write(old, transitions[name]) for name, old in buffer["kept"].items()}
    return {"kept": arrays, "added": buffer["added"] + count}


def sample(buffer: Arrays, rows: int, key: PRNGKeyArray) -> Arrays:
    """Draws transitions of shape `num_envs rows ...`: the same number from each environment, on its
    own device."""
    num_envs, capacity = next(iter(buffer["kept"].values())).shape[:2]
    filled = jnp.minimum(buffer["added"], capacity)
    drawn = jax.random.randint(key, (num_envs, rows), 0, filled)
    pick = jax.vmap(lambda x, index: x[index])
    return {name: pick(x, drawn) for name, x in buffer["kept"].items()}
