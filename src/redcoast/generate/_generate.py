"""The public function `generate`. It imports its implementation on the first call."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray, PyTree, Shaped

from ..core._axis_types import auto_ambient_mesh, explicit_mesh_of, on_auto_axes, on_mesh
from ..core._decoding import Decoding
from ..core._errors import check_flag, check_integer
from ..core._frames import hide_frames
from ..distributed._arrays import allowed_transfers
from ._generated import Generated

Tokens = Shaped[Array | np.ndarray, "batch ..."] | Sequence[Any]


@overload
def generate(
    model: PyTree,
    tokens: Tokens,
    max_new_tokens: int,
    *,
    log_probabilities: Literal[False] = False,
    **options: Any,
) -> Int[Array, "results new"]: ...


@overload
def generate(
    model: PyTree,
    tokens: Tokens,
    max_new_tokens: int,
    *,
    log_probabilities: Literal[True],
    **options: Any,
) -> Generated: ...


@hide_frames
def generate(
    model: PyTree,
    tokens: Tokens,
    max_new_tokens: int,
    *,
    log_probabilities: bool = False,
    key: PRNGKeyArray | None = None,
    decoding: Decoding | None = None,
    mask: Tokens | None = None,
    rows: int | None = None,
    exact: bool = False,
    stream: Callable[[Int[np.ndarray, " results"]], object] | None = None,
    stop: Callable[[Int[np.ndarray, " new"]], object] | None = None,
    **options: Any,
) -> Int[Array, "results new"] | Generated:
    """Generates tokens with a model, by greedy decoding, sampling or beam search.

    Outside `jax.jit`, the function is compiled automatically, once for each batch size and each
    size of the cache, a power of two. Prompts of other lengths, and other values of `temperature`,
    `top_k`, `top_p` and `max_new_tokens`, do not recompile it. Inside `jax.jit`,
    `plan.constrain(fn)` or a `predict_fn`, it is traced like any function. A sharded model stays
    sharded, and generates the same tokens as on one device.

    **Arguments:**

    - `model`: a decoder or an encoder-decoder of `redcoast.models`, or any model with the same
        `config`, `init_cache`, `decode` and `unembed`, and `encode` for an encoder-decoder.
    - `tokens`: for a decoder, the prompts to continue: integers of shape (batch, seq), or a list of
        rows of one length. For an encoder-decoder, the input of the encoder: tokens of the same
        shape, or images.
    - `max_new_tokens`: the maximum number of tokens to generate.
    - `log_probabilities`: whether to return a [`redcoast.Generated`][], which also has the
        log-probability of each new token. Not supported for beam search.
    - `key`: PRNG key for sampling. The sample at step `i` of row `r` depends only on the key, `i`
        and `r`.
    - `decoding`: a [`redcoast.Decoding`][], by default `model.config.decoding`, which
        [`redcoast.load_pretrained`][] reads from the model's files. The default samples only if a
        `key` is given; otherwise, decoding is greedy.
    - `mask`: 1 at real tokens and 0 at padding tokens, which may be anywhere in a row, of shape
        (batch, seq).
    - `rows`: the number of results that are generated at once; all by default. The others wait, and
        each begins when a row ends, so that no row waits for the longest one. The results are the
        same. For decoders, outside of traced functions; not with beam search, `stream` or `stop`.
    - `exact`: whether the log-probabilities are those of [`redcoast.log_probabilities`][] with
        `exact=True`, to the last bit. Rows are then decoded in small blocks, prompts are read one
        token at a time, and each device needs memory for all weights, which takes several times as
        long. For decoders; not with beam search, `rows`, `stream` or `stop`.
    - `stream`: called after each step with its tokens, a NumPy array of shape (results,), while
        the next step is running, until all rows have ended. Not supported for beam search, nor
        while tracing.
    - `stop`: called after each step with the new tokens of each row that has not ended. The row
        ends if it returns true, for example if the decoded text ends with a certain string. Not
        supported for beam search, nor while tracing.
    - `options`: options of [`redcoast.Decoding`][] that replace options in `decoding`, such as
        `temperature`, `top_p`, `beams`, `repetition_penalty` or `eos`.

    **Returns:**

    The new tokens without the prompts, int32 of shape (results, `max_new_tokens`), where results is
    batch times `num_return_sequences`, and the results of a row are adjacent. After the token that
    ends it, a row is padded with `pad`. With `log_probabilities`, a [`redcoast.Generated`][] of
    them. While tracing, NaN logits, and options that exclude all tokens, cannot raise an error:
    the token is then -1 or -2, and the row ends.

    **Raises:**

    `ValueError` or `TypeError` if an option is unknown, if an argument is out of range or conflicts
    with another, if a row has no real token, if the model has too few positions, if logits are NaN,
    or if all tokens are excluded.

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
    from ._check_arguments import (
        as_matrix,
        check_exact_options,
        check_model,
        check_positions,
        check_prompt,
        check_rows,
        check_same_prompts,
        check_scored,
        check_stream,
        check_stream_in_turn,
    )
    from ._compiled import decode, decode_compiled
    from ._exact import check_exact, decode_exactly, is_traced
    from ._prefill import LEAST_ROOM, at_least, room_for
    from ._prompt import is_encoder_decoder
    from ._request import choose_decoding, make_request
    from ._row_turns import decode_in_turn
    from ._streaming import decode_streaming

    prompts, real = as_matrix("tokens", tokens), as_matrix("mask", mask)
    devices = explicit_mesh_of((prompts, model))
    model, prompts, real, key = on_auto_axes((model, prompts, real, key))
    with allowed_transfers(), auto_ambient_mesh():
        check_integer("max_new_tokens", max_new_tokens)
        check_model(model)
        chosen = choose_decoding(model.config, decoding, options, key)
        check_scored(chosen.beams, log_probabilities)
        check_flag("exact", exact)
        if exact:
            check_exact(model)
            check_exact_options(chosen.beams, rows, stream, stop)
        prompts = check_prompt(model, prompts, real)
        check_positions(model, prompts, real, chosen.prefix, max_new_tokens)
        traced = is_traced((model, prompts, real, key))
        results = prompts.shape[0] * chosen.num_return_sequences
        if rows is not None:
            check_rows(model, prompts, real, rows, chosen.beams, traced=traced)
            check_stream_in_turn(stream, stop)
        in_turn = rows is not None and rows < results
        if traced:
            room = max_new_tokens
        elif in_turn or exact:
            room = at_least(LEAST_ROOM, max_new_tokens)
        else:
            room = room_for(model, prompts, real, max_new_tokens)
        request = make_request(
            model.config,
            chosen,
            max_new_tokens=max_new_tokens,
            room=room,
            decoder_only=not is_encoder_decoder(model),
            key=key,
            scored=log_probabilities,
        )
        if not traced:
            check_same_prompts(model, prompts, real, request)
        if exact:
            new = decode_exactly(model, prompts, real, request)
        elif in_turn and rows is not None:
            new = decode_in_turn(model, prompts, real, request, rows)
        elif stream is not None or stop is not None:
            check_stream(request.beams, traced=traced)
            new = decode_streaming(model, prompts, real, request, stream, stop)
        else:
            run = decode_compiled
            if traced:
                run = decode
            new = run(model, prompts, real, request)
    return on_mesh(new, devices)
