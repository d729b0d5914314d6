"""Calls of a model's methods, with checks of what they return, since a model may be the user's.

The checks read shapes and dtypes only, so compiled programs do not contain them.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from ..models._inputs import Mask
from ._request import LastHidden, Logits


def read_tokens(
    model: PyTree, tokens: Int[Array, "rows new"], cache: PyTree, mask: Mask | None = None
) -> tuple[Float[Array, "rows new width"], PyTree]:
    """Returns the hidden states of tokens, and the cache with them.

    Raises `TypeError` or `ValueError` if `decode` returns anything else.
    """
    results = model.decode(tokens, cache, mask=mask)
    if not isinstance(results, tuple) or len(results) != 2:
        raise TypeError(
            f"`decode` of a {type(model).__name__} returned one {type(results).__name__}. It must "
            "return the hidden states and the updated cache."
        )
    hidden, updated = results
    if jnp.ndim(hidden) != 3 or hidden.shape[:2] != tokens.shape:
        raise ValueError(
            f"`decode` of a {type(model).__name__} returned hidden states of shape "
            f"{jnp.shape(hidden)} for tokens of shape {tokens.shape}. It must return those of all "
            f"tokens, of shape ({tokens.shape[0]}, {tokens.shape[1]}, width)."
        )
    _check_cache(model, cache, updated)
    return hidden, updated


def last_logits(model: PyTree, hidden: LastHidden) -> Logits:
    """Returns the logits after the last token of each row.

    Raises `ValueError` if `unembed` returns anything else.
    """
    logits = model.unembed(hidden)
    if jnp.ndim(logits) != 3 or logits.shape[:2] != hidden.shape[:2]:
        raise ValueError(
            f"`unembed` of a {type(model).__name__} returned an array of shape "
            f"{jnp.shape(logits)} for hidden states of shape {hidden.shape}. It must return logits "
            f"of shape ({hidden.shape[0]}, {hidden.shape[1]}, vocab)."
        )
    return logits[:, 0]


def _check_cache(model: PyTree, cache: PyTree, updated: PyTree) -> None:
    """Raises if a cache has changed in more than the values of its arrays."""
    before, after = _types_by_path(cache), _types_by_path(updated)
    for path in before | after:
        if before.get(path) != after.get(path):
            raise ValueError(
                f"`decode` of a {type(model).__name__} got {before.get(path, 'nothing')} as "
                f"`{path}`, and returned {after.get(path, 'nothing')}. The updated cache must have "
                "the same structure, shapes and dtypes."
            )


def _types_by_path(cache: PyTree) -> dict[str, str]:
    types = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(cache):
        types[f"cache{jax.tree_util.keystr(path)}"] = f"{jnp.result_type(leaf)}{[*jnp.shape(leaf)]}"
    return types
