"""The options of `generate`, as arguments of compiled programs."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import equinox as eqx
import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int, PRNGKeyArray

from ..core._decoding import GREEDY, UNSAMPLED, Decoding, as_tuple
from ..core._errors import check_key, check_kind
from ..core._keywords import remedy_for

# A NumPy scalar outside `jax.jit`.
Scalar = Float[np.ndarray, ""] | Float[Array, ""]
Count = Int[np.ndarray, ""] | Int[Array, ""]
Rows = Int[Array, " rows"]
Prompt = Int[Array, "batch prompt"]  # tokens, with -1 at padding
LastHidden = Float[Array, "rows 1 width"]  # of the last token of each row
Logits = Float[Array, "rows vocab"]


# Replacements for arguments of `transformers`.
_ELSEWHERE = {
    "do_sample": "pass `key` and a `temperature` to sample, and neither for greedy decoding",
    "num_beams": "`beams`",
    "attention_mask": "`mask`",
    "input_ids": "`tokens`, the first argument",
    "inputs": "`tokens`, the first argument",
    "max_length": "`max_new_tokens`, without the prompt",
    "eos_token_id": "`eos`",
    "pad_token_id": "`pad`",
    "bad_words_ids": "`bad_words`",
    "suppress_tokens": "`suppress`",
    "begin_suppress_tokens": "`begin_suppress`",
    "forced_bos_token_id": "`forced_bos`",
    "forced_eos_token_id": "`forced_eos`",
    "forced_decoder_ids": "`prefix`",
    "generation_config": "`decoding`",
    "logits_processor": "`logits_fn`",
    "stopping_criteria": "`stop`",
    "stop_strings": "`stop`",
    "streamer": "`stream`",
}


class Request(eqx.Module):
    """The options of a decoding. It is compiled again only if a static field changes, or if another
    field changes between None and a value.

    - `limit`, `room`: the number of new tokens, of all rows or of each row, and the size of the
        array for them.
    - `key`, `temperature`: for sampling; None decodes greedily.
    - `tail`: `1 - top_p`, the probability that may be excluded.
    - `norms`: the divisor of a hypothesis' score for each number of tokens.
    - `least`, `least_with_prompt`: the minimum number of tokens of a row, without and with its
        prompt. Padding does not count.
    - `eos`, `pad`: the tokens that end a row, and the token after that.
    - `copies`: the number of results for each row.
    - `scored`: whether the log-probabilities of the new tokens are computed.
    """

    limit: Count | Int[np.ndarray, " rows"] | Int[Array, " rows"]
    key: PRNGKeyArray | None
    temperature: Scalar | None
    tail: Scalar | None
    min_p: Scalar | None
    norms: Float[np.ndarray, " room"] | Float[Array, " room"] | None
    repetition_penalty: Scalar | None
    least: Count | None
    least_with_prompt: Count | None
    top_k: Count | None
    room: int = eqx.field(static=True)
    beams: int = eqx.field(static=True)
    eos: tuple[int, ...] = eqx.field(static=True)
    pad: int = eqx.field(static=True)
    copies: int = eqx.field(static=True)
    scored: bool = eqx.field(static=True)
    early_stopping: bool | Literal["never"] = eqx.field(static=True)
    forced_bos: int | None = eqx.field(static=True)
    forced_eos: tuple[int, ...] = eqx.field(static=True)
    ngram: int = eqx.field(static=True)
    suppress: tuple[int, ...] = eqx.field(static=True)
    begin_suppress: tuple[int, ...] = eqx.field(static=True)
    prefix: tuple[int, ...] = eqx.field(static=True)
    bad_words: tuple[tuple[int, ...], ...] = eqx.field(static=True)
    logits_fn: Callable[..., Array] | None = eqx.field(static=True)

    @property
    def needs_history(self) -> bool:
        """Whether a choice depends on the earlier tokens of its row."""
        has_longer_words = any(len(word) > 1 for word in self.bad_words)
        return self.repetition_penalty is not None or self.ngram > 0 or has_longer_words


def choose_decoding(
    config: object, decoding: Decoding | None, options: Mapping[str, Any], key: PRNGKeyArray | None
) -> Decoding:
    """Returns the given decoding, or else the decoding of the configuration, with `options`.

    The configuration's sampling only applies if there is a key and no conflicting option.
    """
    _check_options(options)
    _check_concrete(options)
    if key is not None:
        check_key(key)
    changes: dict[str, object] = {}
    if decoding is not None:
        base = decoding
    else:
        base = decoding_of(config) or GREEDY
        if key is None or options.get("beams", 1) != 1 or options.get("temperature", 1) == 0:
            changes |= UNSAMPLED
        if options.get("beams") == 1 or options.get("temperature", 0) != 0:
            changes |= {"beams": 1, "length_penalty": 1.0, "early_stopping": False}
    chosen = dataclasses.replace(base, **{**changes, **options})
    if chosen.temperature > 0 and key is None:
        raise ValueError(
            f"`temperature={chosen.temperature}` samples tokens, which needs a `key`, such as "
            "`jax.random.key(0)`. For greedy decoding, pass `temperature=0`."
        )
    return chosen


def decoding_of(config: object) -> Decoding | None:
    """The default options of a model, or None if its configuration has none."""
    decoding = getattr(config, "decoding", None)
    if decoding is not None:
        check_kind("model.config.decoding", decoding, Decoding, "a `redcoast.Decoding` or None")
    return decoding


def _check_options(options: Mapping[str, object]) -> None:
    """Raises if `generate` has no such options, and says which one takes the place of each."""
    names = [field.name for field in dataclasses.fields(Decoding)]
    unknown = sorted(options.keys() - set(names))
    if not unknown:
        return
    message = (
        f"`generate` has no option {', '.join(unknown)}. The options of decoding are "
        f"{', '.join(names)}."
    )
    replaced = [f"{name}: {_ELSEWHERE[name]}." for name in unknown if name in _ELSEWHERE]
    if replaced:
        message += f" In place of {' '.join(replaced)}"
    for name in unknown:
        if name not in _ELSEWHERE and (remedy := remedy_for(name, ("key", "max_new_tokens"))):
            message += f" {remedy}"
    raise TypeError(message)


def _check_concrete(options: Mapping[str, object]) -> None:
    """Raises if an option is an argument of a traced function, since programs depend on them."""
    for name, value in options.items():
        if any(isinstance(x, Tracer) for x in jax.tree.leaves(value)):
            raise TypeError(
                f"`{name}` is traced, and options of decoding must be concrete. Make it a static "
                "argument of the function that is traced, or call `generate` outside."
            )


def make_request(
    config: object,
    d: Decoding,
    *,
    max_new_tokens: int,
    room: int,
    decoder_only: bool,
    key: PRNGKeyArray | None,
    scored: bool = False,
) -> Request:
    """Creates a request from a decoding and the configuration of a model."""
    eos = d.eos
    if eos is None:
        eos = getattr(config, "eos", ())
    ends = tuple(dict.fromkeys(as_tuple(eos)))  # each once
    pad = d.pad
    if pad is None:
        pad = getattr(config, "pad", None)
    if pad is None or pad < 0:  # some configurations use a negative id if there is no padding token
        pad = next(iter(ends), 0)
    temperature = d.temperature
    if temperature == 0:
        temperature = key = None  # greedy decoding is one program, whether there is a key or not
    tail = None
    if d.top_p and d.top_p < 1:  # `top_p=1` excludes nothing, not even by rounding
        tail = 1 - d.top_p  # subtracted here in double precision
    top_k = None
    if d.top_k is not None:  # a number larger than any vocabulary keeps everything
        top_k = np.asarray(min(d.top_k, 2**30), np.int32)
    norms = None
    if d.beams > 1:
        # In double precision first, as in `transformers`.
        lengths = np.arange(1, room + 1, dtype=np.float64)
        norms = (lengths**d.length_penalty).astype(np.float32)
    repetition_penalty = d.repetition_penalty
    if repetition_penalty == 1:
        repetition_penalty = None
    forced_bos, prefix = d.forced_bos, tuple(d.prefix)
    if decoder_only:
        forced_bos, prefix = None, ()  # a decoder continues its prompt
    return Request(
        limit=np.asarray(max_new_tokens, np.int32),
        key=key,
        temperature=_scalar(temperature),
        tail=_scalar(tail),
        min_p=_scalar(d.min_p),
        norms=norms,
        repetition_penalty=_scalar(repetition_penalty),
        least=_least(d.min_new_tokens, ends),
        least_with_prompt=_least(d.min_length, ends),
        top_k=top_k,
        room=room,
        beams=d.beams,
        eos=ends,
        pad=pad,
        copies=d.num_return_sequences,
        scored=scored,
        # If the penalty is not positive, a longer hypothesis cannot become better.
        early_stopping=d.early_stopping is True or (d.length_penalty > 0 and d.early_stopping),
        forced_bos=forced_bos,
        forced_eos=as_tuple(d.forced_eos),
        ngram=d.no_repeat_ngram_size,
        suppress=tuple(d.suppress),
        begin_suppress=tuple(d.begin_suppress),
        prefix=prefix,
        bad_words=tuple(map(tuple, d.bad_words)),
        logits_fn=d.logits_fn,
    )


def _scalar(x: int | float | None) -> np.ndarray | None:
    if x is None:
        return None
    return np.asarray(x, np.float32)


def _least(count: int, ends: tuple[int, ...]) -> np.ndarray | None:
    """A minimum number of tokens, which means something only if some tokens end a row."""
    if count <= 0 or not ends:
        return None
    return np.asarray(count, np.int32)
