"""The options of `generate`, in the form that compiled programs take them."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

# A NumPy scalar outside of `jax.jit`.
Scalar = Float[np.ndarray, ""] | Float[Array, ""]


class Request(eqx.Module):
    """How to decode. A new compilation is needed only if a static field changes, or if another
    field becomes None or not None.

    - `limit`, `room`: the number of new tokens, and the size of the array for them.
    - `key`, `temperature`: for sampling; None decodes greedily.
    - `tail`: `1 - top_p`, the probability that may be excluded.
    - `norms`: the divisor of a hypothesis' score for each number of tokens.
    - `eos`, `pad`: the tokens that end a row, and the token after that.
    """

    limit: Int[np.ndarray, ""] | Int[Array, ""]
    key: PRNGKeyArray | None
    temperature: Scalar | None
    tail: Scalar | None
    norms: Float[np.ndarray, " room"] | Float[Array, " room"] | None
    room: int = eqx.field(static=True)
    top_k: int | None = eqx.field(static=True)
    beams: int = eqx.field(static=True)
    eos: tuple[int, ...] = eqx.field(static=True)
    pad: int = eqx.field(static=True)


def make_request(
    config: Any,
    *,
    max_new_tokens: int,
    room: int,
    key: PRNGKeyArray | None,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    beams: int,
    length_penalty: float,
    eos: int | Sequence[int] | None,
) -> Request:
    """Makes a request from the arguments of `generate` and the model's configuration."""
    sampled = temperature > 0
    ends = stop_tokens(config, eos)
    # In double precision first, as in `transformers`.
    lengths = np.arange(1, room + 1, dtype=np.float64)
    return Request(
        limit=np.asarray(max_new_tokens, np.int32),
        key=key if sampled else None,
        temperature=np.asarray(temperature, np.float32) if sampled else None,
        # `top_p=1` excludes nothing, not even by rounding.
        tail=np.asarray(1 - top_p, np.float32) if sampled and top_p and top_p < 1 else None,
        norms=(lengths**length_penalty).astype(np.float32) if beams > 1 else None,
        room=room,
        top_k=top_k if sampled else None,
        beams=beams,
        eos=ends,
        pad=_padding(config, ends),
    )


def stop_tokens(config: Any, eos: int | Sequence[int] | None) -> tuple[int, ...]:
    """Returns the distinct tokens that end a row, by default those of the configuration."""
    given = getattr(config, "eos", ()) if eos is None else eos
    several = [given] if isinstance(given, (int, np.integer)) else given
    return tuple(dict.fromkeys(int(token) for token in several))


def _padding(config: Any, eos: tuple[int, ...]) -> int:
    pad = getattr(config, "pad", None)
    # Some configurations use a negative id if there is no padding token.
    return pad if pad is not None and pad >= 0 else next(iter(eos), 0)
