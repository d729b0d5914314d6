"""What is asked of a decoding, in the form that compiled programs take it."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

# From outside of a program, NumPy's.
Scalar = Float[np.ndarray, ""] | Float[Array, ""]


class Request(eqx.Module):
    """How to decode. Only static fields and which others are `None` take a compilation.

    - `limit`: how many new tokens to make; `room` is how many there is room for.
    - `key`, `temperature`: of the draws; `None` decodes greedily.
    - `tail`: 1 - top_p, the probability that may be left out.
    - `norms`: by which a hypothesis' score is divided, for each number of its tokens.
    - `eos`: tokens that end a row; `pad` fills it from there.
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
    """The request that `generate`'s arguments stand for, with the model's own `eos` and `pad`."""
    drawn = temperature > 0
    ends = stop_tokens(config, eos)
    # All numbers in double precision first, as `transformers` has them.
    lengths = np.arange(1, room + 1, dtype=np.float64)
    return Request(
        limit=np.asarray(max_new_tokens, np.int32),
        key=key if drawn else None,
        temperature=np.asarray(temperature, np.float32) if drawn else None,
        # With top_p = 1 nothing is left out, not even what rounding would leave out.
        tail=np.asarray(1 - top_p, np.float32) if drawn and top_p and top_p < 1 else None,
        norms=(lengths**length_penalty).astype(np.float32) if beams > 1 else None,
        room=room,
        top_k=top_k if drawn else None,
        beams=beams,
        eos=ends,
        pad=_padding(config, ends),
    )


def stop_tokens(config: Any, eos: int | Sequence[int] | None) -> tuple[int, ...]:
    """The tokens that end a row, each once; by default those of the model's configuration."""
    given = getattr(config, "eos", ()) if eos is None else eos
    several = [given] if isinstance(given, (int, np.integer)) else given
    return tuple(dict.fromkeys(int(token) for token in several))


def _padding(config: Any, eos: tuple[int, ...]) -> int:
    pad = getattr(config, "pad", None)
    # Some configurations say that there is none by a number that is no token.
    return pad if pad is not None and pad >= 0 else next(iter(eos), 0)
