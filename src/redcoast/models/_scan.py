"""Layers that are alike, stacked along their arrays' first dimension and scanned."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

Remat = Literal["none", "dots", "full"]

_POLICIES = {
    "none": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


def check_remat(remat: str) -> None:
    if remat not in _POLICIES:
        raise ValueError(f"`remat` must be 'none', 'dots' or 'full', but is {remat!r}.")


def scan_layers(
    layer_fn: Callable[..., tuple[Array, Any]],
    x: Float[Array, "..."],
    layers: PyTree,
    *,
    cache: PyTree = None,
    key: PRNGKeyArray | None = None,
    remat: Remat = "none",
) -> tuple[Float[Array, "..."], PyTree]:
    """Runs one layer after the other over the residual stream.

    **Arguments:**

    - `layer_fn`: `layer_fn(x, cache, layer, index, key)` returns the stream and the cache behind
        a layer; `layer` is one slice of `layers`, `index` its number.
    - `x`: the stream.
    - `layers`: a PyTree whose arrays have all layers along their first dimension.
    - `cache`: whatever the layers hand on beside the stream; a key-value cache, or nothing.
    - `key`: split into one for each layer; `None` gives each `None`.
    - `remat`: what the backward pass computes again, to save memory: `"none"`, `"dots"`
        (everything but the products with weights) or `"full"` (everything in a layer).

    **Returns:**

    The stream and the cache behind the last layer.
    """
    count = jax.tree.leaves(layers)[0].shape[0]
    keys = None if key is None else jax.random.split(key, count)

    def body(carry, inputs):
        return layer_fn(*carry, *inputs), None

    if policy := _POLICIES[remat]:
        # Inside a scan the compiler cannot undo remat, and need not be kept from it.
        body = jax.checkpoint(body, policy=policy, prevent_cse=False)
    (x, cache), _ = jax.lax.scan(body, (x, cache), (layers, jnp.arange(count), keys))
    return x, cache
