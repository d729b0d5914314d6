"""The options of decoding. A model's configuration may contain its defaults."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from jaxtyping import Array, Float

from ._errors import check_integer, check_kind, check_number
from ._frames import hide_frames_of_init

_SAMPLING = ("top_k", "top_p", "min_p")
_SMALLEST, _LARGEST = 1e-30, 1e30
UNSAMPLED: dict[str, float | None] = {"temperature": 0.0, **dict.fromkeys(_SAMPLING)}


@hide_frames_of_init
@dataclass(frozen=True)
class Decoding:
    """The decoding options of [`redcoast.generate`][], with the same meaning as in `transformers`.

    **Arguments:**

    - `temperature`: with 0, decoding is greedy. Otherwise tokens are sampled from the softmax of
        the logits divided by the temperature.
    - `top_k`: sample only from the `top_k` most likely tokens, and from tokens that tie with the
        last one.
    - `top_p`: of the tokens that `top_k` keeps, sample only from the smallest set with a total
        probability of at least `top_p` (nucleus sampling, Holtzman et al., 2019,
        <https://arxiv.org/abs/1904.09751>).
    - `min_p`: of these, sample only from tokens that are at least `min_p` times as likely as the
        most likely one (Nguyen et al., 2024, <https://arxiv.org/abs/2407.01082>).
    - `beams`: the number of beams. More than 1 selects beam search.
    - `length_penalty`: beam search scores a hypothesis by its log-probability divided by its number
        of new tokens to this power.
    - `early_stopping`: when the beam search of a row ends: `True`, once there are `beams` finished
        hypotheses; `False`, once no running hypothesis would be better if it ended now; `"never"`,
        once none can become better.
    - `num_return_sequences`: the number of samples, or of hypotheses, of each row.
    - `repetition_penalty`: the logits of tokens that occur in the prompt or the new tokens are
        divided by this number if they are positive, and multiplied by it otherwise (Keskar et al.,
        2019, <https://arxiv.org/abs/1909.05858>). Beam search applies it to log-probabilities.
    - `no_repeat_ngram_size`: no sequence of this many tokens occurs twice in a row; 0 allows all.
    - `min_length`, `min_new_tokens`: a row does not end before it has this many tokens, with and
        without its prompt. Padding does not count.
    - `forced_bos`: the first new token of an encoder-decoder.
    - `prefix`: the tokens of an encoder-decoder between `decoder_start` and the first new token,
        such as Whisper's language and task.
    - `forced_eos`: tokens; a row ends with one of them at `max_new_tokens`.
    - `suppress`, `begin_suppress`: tokens that are never generated, and tokens that are not
        generated first.
    - `bad_words`: sequences of tokens that are never generated.
    - `eos`: the token or tokens that end a row, by default `model.config.eos`. With `()`, all rows
        have `max_new_tokens` tokens.
    - `pad`: the token after the end of a row, by default `model.config.pad`, or else the first of
        `eos`, or else 0.
    - `logits_fn`: a function of the logits of a step, float32 of shape (rows, vocab), that returns
        new logits. It is applied before all other options.

    **Raises:**

    `ValueError` or `TypeError` if an option is out of range or conflicts with another.

    !!! Example

        ```python
        decoding = rc.Decoding(beams=4, no_repeat_ngram_size=3, min_new_tokens=5)
        config = LlamaConfig(
            vocab=256, width=64, layers=2, heads=4, kv_heads=2, hidden=128, decoding=decoding
        )  # `rc.generate` uses them for models with this configuration
        ```
    """

    temperature: int | float = 0.0
    top_k: int | None = None
    top_p: int | float | None = None
    min_p: int | float | None = None
    beams: int = 1
    length_penalty: int | float = 1.0
    early_stopping: bool | Literal["never"] = False
    num_return_sequences: int = 1
    repetition_penalty: int | float = 1.0
    no_repeat_ngram_size: int = 0
    min_length: int = 0
    min_new_tokens: int = 0
    forced_bos: int | None = None
    prefix: Sequence[int] = ()
    forced_eos: int | Sequence[int] = ()
    suppress: Sequence[int] = ()
    begin_suppress: Sequence[int] = ()
    bad_words: Sequence[Sequence[int]] = ()
    eos: int | Sequence[int] | None = None
    pad: int | None = None
    logits_fn: Callable[[Float[Array, "rows vocab"]], Float[Array, "rows vocab"]] | None = None

    def __post_init__(self):
        # Frozen dataclasses set fields in this way.
        object.__setattr__(self, "prefix", as_tuple(self.prefix, "prefix"))
        for name in ("forced_eos", "suppress", "begin_suppress", "eos"):
            if getattr(self, name) is not None:  # distinct tokens, in a form that can be hashed
                tokens = dict.fromkeys(as_tuple(getattr(self, name), name))
                object.__setattr__(self, name, tuple(tokens))
        check_kind("bad_words", self.bad_words, Sequence, "a sequence of sequences of tokens")
        words = tuple(as_tuple(word, "bad_words") for word in self.bad_words)
        object.__setattr__(self, "bad_words", words)
        _check_counts(self)
        _check_numbers(self)
        _check_conflicts(self)

    def without_sampling(self) -> "Decoding":
        """Returns the same options without sampling, for greedy decoding or beam search."""
        return dataclasses.replace(self, **UNSAMPLED)


def as_tuple(tokens: int | Sequence[int], name: str = "eos") -> tuple[int, ...]:
    """Returns the token ids of an option that may have one or several."""
    several = (tokens,)
    # Arrays of NumPy have a length, and are no `Sequence`.
    if hasattr(tokens, "__len__"):
        several = tokens
    return tuple(check_integer(name, token, least=None) for token in several)  # pyright: ignore[reportGeneralTypeIssues, reportOptionalIterable]


def _check_counts(d: Decoding) -> None:
    least = {"top_k": 1, "beams": 1, "num_return_sequences": 1}
    least |= dict.fromkeys(("no_repeat_ngram_size", "min_length", "min_new_tokens"), 0)
    for name, bound in least.items():
        value = getattr(d, name)
        if value is not None:
            check_integer(name, value, least=bound)
    for name in ("forced_bos", "pad"):
        if getattr(d, name) is not None:
            check_integer(name, getattr(d, name), least=None)
    if not all(d.bad_words):
        raise ValueError("`bad_words` holds an empty sequence. Each must have at least one token.")


def _check_numbers(d: Decoding) -> None:
    for name in ("temperature", "top_p", "min_p", "length_penalty", "repetition_penalty"):
        value = getattr(d, name)
        if value is not None or name not in _SAMPLING:
            check_number(name, value)
    # Logits are divided in float32, in which smaller numbers would be 0 and larger ones infinite.
    if d.temperature != 0 and not _SMALLEST <= d.temperature <= _LARGEST:
        raise ValueError(
            f"`temperature` is {d.temperature}. It must be positive, from {_SMALLEST} to "
            f"{_LARGEST}, or 0 for greedy decoding."
        )
    for name in ("top_p", "min_p"):
        value = getattr(d, name)
        if value is not None and not 0 < value <= 1:
            raise ValueError(
                f"`{name}` is {value}. It must be a probability above 0 and at most 1."
            )
    check_number("length_penalty", d.length_penalty, finite=True)
    if not _SMALLEST <= d.repetition_penalty <= _LARGEST:
        raise ValueError(
            f"`repetition_penalty` is {d.repetition_penalty}. It must be positive, from "
            f"{_SMALLEST} to {_LARGEST}; 1 penalises nothing."
        )
    if d.early_stopping not in (True, False, "never"):
        raise ValueError(
            f"`early_stopping` is {d.early_stopping!r}. It must be True, False or 'never'."
        )


def _check_conflicts(d: Decoding) -> None:
    chosen = [name for name in _SAMPLING if getattr(d, name) is not None]
    if d.beams > 1 and (chosen or d.temperature > 0):
        raise ValueError(
            f"Beam search does not sample, but `beams` is {d.beams} and "
            f"{' and '.join(chosen) or 'temperature'} is given. Pass `beams=1` and a "
            "`temperature`, or leave the others out."
        )
    if chosen and d.temperature == 0:
        raise ValueError(
            f"`{chosen[0]}={getattr(d, chosen[0])}` only applies to sampling, but `temperature` is "
            "0, which decodes greedily. Pass a `temperature`, such as 1.0, and a `key`."
        )
    if d.beams == 1 and (d.length_penalty != 1 or d.early_stopping is not False):
        name = "length_penalty"
        if d.length_penalty == 1:
            name = "early_stopping"
        raise ValueError(
            f"`{name}={getattr(d, name)!r}` only applies to beam search, but `beams` is 1. "
            f"Pass more beams, or no `{name}`."
        )
    if d.num_return_sequences > 1 and d.temperature == 0 and d.num_return_sequences > d.beams:
        raise ValueError(
            f"`num_return_sequences` is {d.num_return_sequences}, but greedy decoding has one "
            f"result for each row, and beam search has `beams`, here {d.beams}. Pass more beams, "
            "or a `temperature`."
        )


GREEDY = Decoding()
