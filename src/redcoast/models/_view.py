"""Attention masks that need no array of all query-key pairs."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Integer

from ._inputs import AnyArray

# The minimum number of query-key pairs for which there is no array of all pairs.
MANY_PAIRS = 2048 * 2048


class View(eqx.Module):
    """Which keys each query sees: real keys of its segment, within its window.

    - `real`: which keys are real tokens; None if all of them are.
    - `slots`: the slot of each query among the keys, for causal attention; None if queries and keys
        are the same tokens.
    - `segments`: the segments of the queries and of the keys.
    - `causal`: whether a query sees only the keys in its own slot and before.
    - `window`: the number of slots that a query sees, its own included; without `causal`, this
        number in each direction.
    """

    real: Bool[Array, "#batch keys"] | None = None
    slots: Int[Array, " queries"] | None = None
    segments: (
        tuple[Integer[AnyArray, "#batch queries"], Integer[AnyArray, "#batch keys"]] | None
    ) = None
    causal: bool = eqx.field(static=True, default=False)
    window: int | None = eqx.field(static=True, default=None)

    def visible(self, queries: int, keys: int) -> Bool[Array, "#batch #queries #keys"]:
        """Returns the array of all pairs."""
        rows = self.slots
        if rows is None:
            rows = jnp.arange(queries)
        return see(self, rows, jnp.arange(keys), self.real, self.segments)


def see(
    view: View,
    rows: Int[Array, " queries"],
    columns: Int[Array, " keys"],
    real: Bool[Array, "#batch keys"] | None,
    segments: tuple[Any, Any] | None,
) -> Bool[Array, "#batch #queries #keys"]:
    """Returns which keys in the slots `columns` are seen by queries in the slots `rows`."""
    visible = jnp.ones((1, 1, 1), bool)  # (batch, queries, keys)
    if view.causal:
        visible = visible & (columns[None] <= rows[:, None])[None]
    if view.window is not None:
        visible = visible & (columns[None] > rows[:, None] - view.window)[None]
    if view.window is not None and not view.causal:
        visible = visible & (columns[None] < rows[:, None] + view.window)[None]
    if real is not None:
        visible = visible & real[:, None]  # padding is seen by none
    if segments is not None:
        visible = visible & (segments[0][:, :, None] == segments[1][:, None])
    return visible


def has_many_pairs(queries: int, keys: int) -> bool:
    return queries * keys >= MANY_PAIRS
