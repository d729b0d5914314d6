"""The public function. What it does is imported when it is first done."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int, PRNGKeyArray, PyTree, Shaped


def generate(
    model: PyTree,
    tokens: Shaped[Array | np.ndarray, "batch ..."],
    *,
    max_new_tokens: int,
    key: PRNGKeyArray | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    beams: int = 1,
    length_penalty: float = 1.0,
    eos: int | Sequence[int] | None = None,
    mask: Shaped[Array | np.ndarray, "batch ..."] | None = None,
    stream: Callable[[Int[np.ndarray, " batch"]], Any] | None = None,
) -> Int[Array, "batch new"]:
    """Continues texts: by the likeliest tokens, by drawn ones, or by beam search.

    Called as it is, it compiles itself: once for each batch size and each bucket of prompt
    lengths and of new tokens, whatever the temperature, `top_p` and the limit. Inside of
    `jax.jit`, `plan.constrain(fn)` or a `predict_fn`, it is traced like any function. A model
    that is split over a mesh stays split; the tokens are those of one device.

    **Arguments:**

    - `model`: a decoder or an encoder-decoder of `redcoast.models`, or any model with
        their `config`, `init_cache`, `decode` and `unembed`, and perhaps `encode`.
    - `tokens`: the prompts, integers of shape (batch, seq), to be continued by a decoder; or the
        input of an encoder, which may be images of any shape, for which a decoder makes a text.
    - `max_new_tokens`: how many tokens to make at most.
    - `key`: of the draws. Draw `i` of row `r` depends on the key, `i` and `r` alone.
    - `temperature`: 0 takes the likeliest token. Otherwise tokens are drawn from the softmax of
        the logits, divided by this.
    - `top_k`: draw only from as many of the likeliest tokens, and from those as likely as the
        last of them.
    - `top_p`: of what `top_k` leaves, draw only from the fewest tokens with together at least
        this probability (Holtzman et al., 2019, <https://arxiv.org/abs/1904.09751>).
    - `beams`: with more than 1, beam search with as many hypotheses for each row.
    - `length_penalty`: the score of a hypothesis is its log-probability over its number of new
        tokens to this power. Only for beam search.
    - `eos`: the token, or tokens, that end a row; by default those of `model.config.eos`. With
        `()`, rows go on to `max_new_tokens`.
    - `mask`: 1 at real tokens, 0 at padding, which may be on either side; (batch, seq).
    - `stream`: called with the tokens of each step, a NumPy array of shape (batch,), as they
        come: while the next step is under way, and until all rows have ended. Not for beam
        search, and not while a program is traced.

    **Returns:**

    The new tokens alone, int32 of shape (batch, `max_new_tokens`). Behind the token that ended
    it a row is filled with `model.config.pad`, or else with the first of `eos`, or else with 0.
    Where logits are NaN, which a traced program cannot refuse, the token is -1 and the row ends.

    **Raises:**

    `ValueError` or `TypeError` if an argument is out of its range or does not go with another, if
    a row has no real token, if all tokens but the last new one are more than the positions, or
    if logits are NaN.

    !!! Example

        ```python
        prompts = np.array([[5, 3, 8], [0, 0, 7]])
        mask = np.array([[1, 1, 1], [0, 0, 1]])
        likeliest = rc.generate(model, prompts, mask=mask, max_new_tokens=20)
        drawn = rc.generate(
            model, prompts, mask=mask, max_new_tokens=20, key=jax.random.key(0),
            temperature=0.8, top_p=0.95, stream=lambda tokens: print(tokens),
        )
        ```
    """
    from ._checks import check_model, check_numbers, check_positions, check_prompt, check_stream
    from ._compiled import decode, decode_compiled
    from ._prompt import bucket
    from ._request import make_request
    from ._streaming import decode_streaming

    options = {
        "max_new_tokens": max_new_tokens,
        "key": key,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "beams": beams,
        "length_penalty": length_penalty,
    }
    check_numbers(**options)
    check_model(model)
    check_prompt(model, tokens, mask)
    check_positions(model, tokens, mask, max_new_tokens)
    traced = any(isinstance(x, Tracer) for x in jax.tree.leaves((model, tokens, mask, key)))
    room = max_new_tokens if traced else bucket(max_new_tokens)
    request = make_request(model.config, room=room, eos=eos, **options)
    if stream is not None:
        check_stream(beams, traced=traced)
        return decode_streaming(model, tokens, mask, request, stream)
    return (decode if traced else decode_compiled)(model, tokens, mask, request)
