"""The options that change the scores of a step, against their definitions in plain Python.

`tests/parity/decoding_parity.py` compares them with `transformers`. These tests protect the
definitions where `transformers` is not installed, and that padding is no part of a history.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generate_helpers import TinySeq2Seq, prompts, slow_logits, tiny

import redcoast as rc

MODEL = tiny(3)
ROWS, (LEFT, MASK), _ = prompts([3, 7, 1, 5])
COUNT = 9


def has_word(history, word):
    return history[len(history) - len(word) + 1 :] == list(word[:-1])


def slow_scores(scores, prompt, new, d: rc.Decoding):
    """The definitions, one token after the other."""
    history, scores = [*prompt, *new], scores.copy()
    for token in set(history):
        scores[token] *= d.repetition_penalty if scores[token] < 0 else 1 / d.repetition_penalty
    n = d.no_repeat_ngram_size
    grams = [tuple(history[i : i + n]) for i in range(len(history) - n + 1)] if n else []
    for gram in grams:
        if n == 1 or history[-(n - 1) :] == list(gram[:-1]):
            scores[gram[-1]] = -np.inf
    for word in d.bad_words:
        if len(word) == 1 or has_word(history, word):
            scores[word[-1]] = -np.inf
    if len(new) < d.min_new_tokens or len(history) < d.min_length:
        scores[list(d.eos)] = -np.inf  # pyright: ignore[reportArgumentType]
    if len(new) + 1 == COUNT and d.forced_eos:
        scores[:] = np.where(np.isin(np.arange(len(scores)), d.forced_eos), 0, -np.inf)
    scores[list(d.suppress)] = -np.inf
    return scores


def slow_greedy(model, prompt, d: rc.Decoding):
    new: list[int] = []
    while len(new) < COUNT and not (new and new[-1] in d.eos):  # pyright: ignore
        scores = slow_scores(slow_logits(model, [*prompt, *new]), prompt, new, d)
        new.append(int(np.argmax(scores)))
    return new + [d.pad] * (COUNT - len(new))


DECODINGS = [
    rc.Decoding(repetition_penalty=1.7, min_new_tokens=4, eos=(2, 5), pad=8),
    rc.Decoding(no_repeat_ngram_size=2, forced_eos=6, bad_words=[[4]], eos=6, pad=8),
    rc.Decoding(
        repetition_penalty=0.7,
        no_repeat_ngram_size=3,
        suppress=[1, 9],
        bad_words=[[3, 7], [4, 4, 4], [0]],
        eos=(),
        pad=0,
    ),
    # The prompts have 3, 7, 1 and 5 tokens, and all are padded to 7.
    rc.Decoding(min_length=6, eos=range(9), pad=8),
    rc.Decoding(min_length=4, min_new_tokens=2, eos=range(9), pad=8),
]


@pytest.mark.few("decoding0")
@pytest.mark.parametrize("decoding", DECODINGS)
def test_greedy_tokens_are_those_of_the_definitions(decoding):
    actual = rc.generate(MODEL, LEFT, mask=MASK, max_new_tokens=COUNT, decoding=decoding)
    expected = [slow_greedy(MODEL, row, decoding) for row in ROWS]
    np.testing.assert_array_equal(actual, expected)
    plain = rc.generate(MODEL, LEFT, mask=MASK, max_new_tokens=COUNT, eos=decoding.eos, pad=8)
    assert (np.asarray(actual) != np.asarray(plain)).any()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "how", [{"beams": 2}, {"stream": lambda tokens: None}], ids=["beams", "stream"]
)
def test_the_least_length_with_beams_and_streams_does_not_depend_on_other_rows(how):
    options: Any = {"max_new_tokens": 6, "min_length": 6, "eos": range(9), "pad": 8, **how}
    actual = rc.generate(MODEL, LEFT, mask=MASK, **options)
    alone = [rc.generate(MODEL, np.array([row]), **options)[0] for row in ROWS[:2]]
    np.testing.assert_array_equal(actual[:2], np.stack(alone))


@pytest.mark.thorough
def test_a_stream_sees_the_history_too_and_stop_ends_a_row():
    options: Any = {"mask": MASK, "max_new_tokens": COUNT, "decoding": DECODINGS[2]}
    shown, expected = [], np.asarray(rc.generate(MODEL, LEFT, **options))
    np.testing.assert_array_equal(
        rc.generate(MODEL, LEFT, stream=shown.append, **options), expected
    )
    np.testing.assert_array_equal(np.stack(shown, axis=1), expected)
    last = expected[0, 2]
    stopped = rc.generate(MODEL, LEFT, stop=lambda row: row[-1] == last, **options)
    ended = np.cumsum(expected == last, axis=1) - (expected == last) > 0
    np.testing.assert_array_equal(stopped, np.where(ended, 0, expected))
    assert ended.any()
    assert not ended.all()


@pytest.mark.thorough
def test_several_results_of_a_row_are_the_best_hypotheses_or_different_samples():
    options: Any = {"mask": MASK, "max_new_tokens": COUNT, "eos": ()}
    best = rc.generate(MODEL, LEFT, beams=4, **options)
    several = rc.generate(MODEL, LEFT, beams=4, num_return_sequences=3, **options)
    np.testing.assert_array_equal(several[::3], best)
    assert len(np.unique(several[:3], axis=0)) == 3
    sampling: Any = {"temperature": 2.0, "key": jax.random.key(0), "num_return_sequences": 3}
    samples = np.asarray(rc.generate(MODEL, LEFT, **options, **sampling)).reshape(4, 3, COUNT)
    assert all(len(np.unique(row, axis=0)) == 3 for row in samples)
    # The samples of a row continue its own prompt.
    first = [slow_logits(MODEL, row).argsort()[-1] for row in ROWS]
    cold: Any = sampling | {"temperature": 1e-3}
    chosen = np.asarray(rc.generate(MODEL, LEFT, **options, **cold))[:, 0]
    np.testing.assert_array_equal(chosen, np.repeat(first, 3))


@pytest.mark.thorough
def test_a_models_own_options_apply_unless_others_are_given():
    own = rc.Decoding(temperature=0.7, top_k=4, repetition_penalty=1.7, eos=())
    config = _With(**vars(MODEL.config), decoding=own)
    model = dataclasses.replace(MODEL, config=config)
    options: Any = {"mask": MASK, "max_new_tokens": COUNT}
    greedy = rc.generate(MODEL, LEFT, repetition_penalty=1.7, eos=(), **options)
    np.testing.assert_array_equal(rc.generate(model, LEFT, **options), greedy)
    key = jax.random.key(0)
    sampled = rc.generate(MODEL, LEFT, key=key, decoding=own, **options)
    np.testing.assert_array_equal(rc.generate(model, LEFT, key=key, **options), sampled)
    assert (np.asarray(greedy) != np.asarray(sampled)).any()


@pytest.mark.thorough
def test_options_that_replace_a_models_own_are_checked_together():
    options: Any = {"mask": MASK, "max_new_tokens": COUNT}
    of = lambda **own: dataclasses.replace(
        MODEL, config=_With(**vars(MODEL.config), decoding=rc.Decoding(**own))
    )
    beams = of(beams=4, length_penalty=0.5, num_return_sequences=2)
    sampling = of(temperature=1.0, top_k=4, num_return_sequences=2)
    one = rc.generate(MODEL, LEFT, **options)
    for model in (beams, sampling):
        actual = rc.generate(model, LEFT, beams=1, num_return_sequences=1, **options)
        np.testing.assert_array_equal(actual, one)
    key = jax.random.key(0)
    actual = rc.generate(beams, LEFT, temperature=0.7, key=key, **options)
    expected = rc.generate(MODEL, LEFT, temperature=0.7, num_return_sequences=2, key=key, **options)
    np.testing.assert_array_equal(actual, expected)
    assert rc.generate(sampling, LEFT, beams=2, **options).shape[0] == 2 * len(LEFT)


class _With(type(MODEL.config)):
    """A configuration with defaults of decoding."""

    def __init__(self, *, decoding, **fields):
        super().__init__(**fields)
        object.__setattr__(self, "decoding", decoding)


@pytest.mark.thorough
def test_an_encoder_decoder_begins_with_the_forced_token():
    model = tiny(0, TinySeq2Seq, decoder_start=1)
    options: Any = {"max_new_tokens": 3, "forced_bos": 6, "min_length": 3, "eos": range(11)}
    actual = rc.generate(model, LEFT, mask=MASK, **options)
    # All tokens end a row, but not before there are two new ones.
    assert (np.asarray(actual)[:, 0] == 6).all()
    assert (np.asarray(actual)[:, 1] == 0).all()


def test_a_function_of_the_users_changes_logits():
    odd_only = lambda logits: jnp.where(jnp.arange(11)[None] % 2 == 1, logits, -jnp.inf)
    actual = rc.generate(MODEL, LEFT, mask=MASK, max_new_tokens=COUNT, logits_fn=odd_only, eos=())
    assert (np.asarray(actual) % 2 == 1).all()
    with pytest.raises(ValueError, match="`logits_fn` returned .*4.* It must return logits"):
        rc.generate(MODEL, LEFT, max_new_tokens=2, logits_fn=lambda x: x[:, 0])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "how",
    [{}, {"beams": 2}, {"stream": lambda tokens: None}, {"exact": True}],
    ids=["once", "beams", "stream", "exact"],
)
def test_a_row_for_which_no_token_is_left_is_an_error(how):
    """A token that the options forbid must not be the answer, not even token 0."""
    with pytest.raises(ValueError, match="excluded for row 0 at new token 0"):
        rc.generate(MODEL, np.array([[5]]), 2, suppress=range(11), **how)
    prompt = np.array([list(range(10))])  # no token may repeat, and there is one more
    with pytest.raises(ValueError, match=r"excluded for row 0 at new token [01]"):
        rc.generate(MODEL, prompt, 2, no_repeat_ngram_size=1, **how)
