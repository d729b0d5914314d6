"""The public function `generate`. It imports its implementation on the first call."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int, PRNGKeyArray, PyTree, Shaped

from ..core._frames import hide_frames


@hide_frames
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
    """Generates tokens with a model, by greedy decoding, sampling or beam search.

    Outside of `jax.jit` the function is compiled automatically, once for each batch size and each
    bucket of prompt lengths and numbers of new tokens; other values of `temperature`, `top_p` and
    `max_new_tokens` within a bucket do not recompile it. Inside of `jax.jit`, `plan.constrain(fn)`
    or a `predict_fn` it is traced like any function. A sharded model stays sharded, and gives the
    same tokens as on one device.

    **Arguments:**

    - `model`: a decoder or an encoder-decoder of `redcoast.models`, or any model with the same
        `config`, `init_cache`, `decode` and `unembed`, and `encode` for an encoder-decoder.
    - `tokens`: for a decoder, the prompts to continue: integers of shape (batch, seq). For an
        encoder-decoder, the input of the encoder: tokens of the same shape, or images.
    - `max_new_tokens`: the maximum number of tokens to generate.
    - `key`: PRNG key for sampling. The sample at step `i` of row `r` depends only on the key, `i`
        and `r`.
    - `temperature`: with 0, decoding is greedy. Otherwise tokens are sampled from the softmax of
        the logits divided by the temperature.
    - `top_k`: sample only from the `top_k` most likely tokens, and from those that tie with the
        last of them.
    - `top_p`: of the tokens that `top_k` keeps, sample only from the smallest set with a total
        probability of at least `top_p` (nucleus sampling, Holtzman et al., 2019,
        <https://arxiv.org/abs/1904.09751>).
    - `beams`: the number of beams. More than 1 selects beam search.
    - `length_penalty`: beam search scores a hypothesis by its log-probability divided by its number
        of new tokens to this power.
    - `eos`: the token or tokens that end a row, by default `model.config.eos`. With `()`, all rows
        have `max_new_tokens` tokens.
    - `mask`: 1 at real tokens and 0 at padding tokens, which may be on either side, of shape
        (batch, seq).
    - `stream`: called after each step with its tokens, a NumPy array of shape (batch,), while the
        next step is running, until all rows have ended. Not supported for beam search, nor while
        tracing.

    **Returns:**

    The new tokens without the prompts, int32 of shape (batch, `max_new_tokens`). After the token
    that ends it, a row is padded with `model.config.pad`, or else with the first of `eos`, or else
    with 0. While tracing, NaN logits cannot raise an error: the token is -1, and the row ends.

    **Raises:**

    `ValueError` or `TypeError` if an argument is out of range or conflicts with another, if a row
    has no real token, if the model has too few positions, or if logits are NaN.

    !!! Example

        ```python
        prompts = np.array([[5, 3, 8], [0, 0, 7]])
        mask = np.array([[1, 1, 1], [0, 0, 1]])
        greedy = rc.generate(model, prompts, mask=mask, max_new_tokens=20)
        sampled = rc.generate(
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
