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
    return {"transitions": arrays, "added": jnp.int32(0)}


def add(buffer: Arrays, transitions: Arrays) -> Arrays:
    """Adds transitions of shape `num_envs steps ...`, in place of the oldest if the buffer is full.

    The number of steps has to divide that of the buffer.
    """
    arrays, added = {}, buffer["added"]
    for name, old in buffer["transitions"].items():
        new = jnp.asarray(transitions[name], old.dtype)
        start = added % old.shape[1]
        arrays[name] = jax.lax.dynamic_update_slice_in_dim(old, new, start, axis=1)
    return {"transitions": arrays, "added": added + transitions["reward"].shape[1]}


def sample(buffer: Arrays, rows: int, key: PRNGKeyArray) -> Arrays:
    """Draws transitions of shape `num_envs rows ...`: the same number from each environment, on its
    own device."""
    num_envs, capacity = buffer["transitions"]["reward"].shape
    filled = jnp.minimum(buffer["added"], capacity)
    indices = jax.random.randint(key, (num_envs, rows), 0, filled)
    pick = jax.vmap(lambda x, index: x[index])  # of each environment
    return {name: pick(x, indices) for name, x in buffer["transitions"].items()}
