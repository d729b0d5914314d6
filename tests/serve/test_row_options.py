"""The programs of the server: each row is decoded in its own way, whatever its neighbours ask."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import few_of
from serve_helpers import load, write_weights

import redcoast as rc
from redcoast.serve import _decode_rows
from redcoast.serve._batching import Extras, Piece, ServedJob, answer_batch, pad_prompts

GREEDY = rc.Decoding()
PROMPT = [72, 105, 33, 72, 105]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load(write_weights(tmp_path_factory.mktemp("rows") / "tiny"))


class Answers(list):
    """What a job sends, and its tokens, of which each has its log-probability."""

    @property
    def errors(self):
        return [x for x in self if isinstance(x, Exception)]

    def tokens(self, row=0):
        pieces = [x for x in self if isinstance(x, Piece) and x.row == row]
        return [scored.token for piece in pieces for scored in piece.scored]


def job(decoding=GREEDY, prompts=(PROMPT,), new=6, seed: int | None = 5, **extras):
    answers = Answers()
    options: dict[str, Any] = {"logprobs": 2} | extras
    wanted = Extras(**options)
    settings = ([*prompts], new, decoding, seed, (), answers.append)
    return ServedJob(*settings, extras=wanted), answers


def answer(loaded, *jobs):
    answer_batch(loaded[0], [one for one, _ in jobs], np.random.default_rng(0))
    return [answers for _, answers in jobs]


SETTINGS = [
    rc.Decoding(),
    rc.Decoding(temperature=0.7),
    rc.Decoding(temperature=1.3, top_k=7),
    rc.Decoding(temperature=1.0, top_p=0.5),
    rc.Decoding(temperature=1.0, top_k=40, top_p=0.9, min_p=0.02, repetition_penalty=1.4),
    rc.Decoding(repetition_penalty=1.7),
    rc.Decoding(min_new_tokens=4, eos=tuple(range(100, 164))),
]
# One sampled row with all options beside a greedy one; all of them are thorough.
TOGETHER = few_of([SETTINGS[:4], SETTINGS[4:], SETTINGS[3:5]], SETTINGS[3:5])


@pytest.mark.parametrize("settings", TOGETHER)
@pytest.mark.seconds(10)  # three programs of `generate`
@pytest.mark.thorough
def test_rows_of_a_batch_have_the_tokens_of_generate_with_their_own_options(loaded, settings):
    """Greedy rows and samples with every option, together in batches of four."""
    actual = answer(loaded, *[job(decoding, new=6) for decoding in settings])
    model = loaded[0].model
    tokens, mask = pad_prompts([PROMPT], dataclasses.replace(loaded[0], multiple=1))
    for decoding, answers in zip(settings, actual, strict=True):
        key = jax.random.key(5) if decoding.temperature else None
        options = {"decoding": decoding, "key": key, "max_new_tokens": 6}
        new = rc.generate(model, tokens, mask=mask, **options)[0].tolist()
        ends = [i for i, token in enumerate(new) if token in (decoding.eos or ())]
        assert answers.tokens() == new[: ends[0] + 1 if ends else 6], decoding


@pytest.mark.thorough
def test_no_value_of_an_option_compiles_a_program(loaded, monkeypatch):
    """Each would be kept as long as the server runs, and everybody would wait for it."""
    answer(loaded, job(), job(logprobs=None))
    programs: Any = (_decode_rows._begin, _decode_rows._choose, _decode_rows._advance)
    before = [program._cache_size() for program in programs]
    for k in (1, 3, 10**30):
        sampled = rc.Decoding(temperature=1.0 + k % 7, top_k=k, top_p=1 / (k + 1), min_p=0.1)
        sampled = dataclasses.replace(sampled, repetition_penalty=1.1, min_new_tokens=k % 5)
        extras: Any = {"presence": 0.1 * (k % 7), "frequency": 0.5, "bias": {k % 256: 1.0}}
        answers = answer(loaded, job(sampled, new=2 + k % 7, **extras), job(logprobs=k % 20))
        assert not any(x.errors for x in answers)
    assert [program._cache_size() for program in programs] == before


@pytest.mark.thorough
def test_penalties_and_biases_change_the_row_that_asks_for_them(loaded):
    plain, banned, wanted, penalised = answer(
        loaded,
        job(),
        job(bias=dict.fromkeys(range(250), -100.0)),
        job(bias={65: 100.0}),
        job(bias={65: 30.0}, presence=2.0, frequency=2.0, new=30),
    )
    assert plain.tokens() == answer(loaded, job())[0].tokens()
    assert min(banned.tokens()) >= 250
    assert wanted.tokens() == [65] * 6
    # 30 is less than what 15 times are penalised by.
    assert 8 <= penalised.tokens().count(65) < 30
    assert penalised.tokens()[:8] == [65] * 8


@pytest.mark.thorough
def test_log_probabilities_are_those_of_the_model_by_teacher_forcing(loaded):
    (answers,) = answer(loaded, job(rc.Decoding(temperature=1.0), echo=("Hi!Hi",), logprobs=3))
    tokens = answers.tokens()
    assert tokens[: len(PROMPT)] == PROMPT
    logits = loaded[0].model(jnp.array([tokens]))[0]
    logprobs = np.asarray(jax.nn.log_softmax(logits))
    scored = [scored for piece in answers for scored in piece.scored]
    assert scored[0].logprob is None
    for place, one in enumerate(scored[1:]):
        np.testing.assert_allclose(one.logprob, logprobs[place, one.token], atol=1e-4)
        best = np.argsort(-logprobs[place])[:3]
        assert [token for token, _ in one.top] == best.tolist()
        assert one.token != best[0] or one.logprob == one.top[0][1]


class BadFor(eqx.Module):
    """A model whose logits are NaN for rows whose first token is 7."""

    model: Any

    @property
    def config(self):
        return self.model.config

    def init_cache(self, batch, length):
        bad = jnp.zeros(batch, bool)
        return self.model.init_cache(batch, length), bad

    def decode(self, tokens, cache, mask=None):
        cache, bad = cache
        bad = bad | jnp.any(tokens == 7, axis=1)
        hidden, cache = self.model.decode(tokens, cache, mask=mask)
        return jnp.where(bad[:, None, None], -jnp.nan, hidden), (cache, bad)

    def unembed(self, hidden):
        return self.model.unembed(hidden)


@pytest.mark.thorough
def test_an_error_of_one_request_leaves_the_others_of_its_batch_alone(loaded):
    served = dataclasses.replace(loaded[0], model=BadFor(loaded[0].model))
    sampled = rc.Decoding(temperature=1.0, top_k=5, top_p=0.9)
    jobs = [job(), job(sampled, prompts=[[7, 8]]), job(sampled, prompts=[[8, 9]])]
    good, bad, other = answer((served, None), *jobs)
    assert good.tokens() == answer(loaded, job())[0].tokens()
    assert len(other.tokens()) == 6
    assert [str(error) for error in bad.errors] == [
        "The logits of choice 0 hold NaN at new token 0. The parameters may hold NaN, or "
        "activations may overflow in their dtype."
    ]
    assert not good.errors + other.errors


@pytest.mark.thorough
def test_what_fails_in_a_batch_is_tried_alone(loaded):
    """Such as too little memory for all rows, or a grammar that cannot be made."""

    def broken():
        raise ValueError("No such grammar.")

    good, bad, outside = answer(loaded, job(), job(grammar=broken), job(prompts=[[999]]))
    assert len(good.tokens()) == 6
    assert [str(error) for error in bad.errors] == ["No such grammar."]
    assert not good.errors
    assert outside.errors or len(outside.tokens()) == 6


@pytest.mark.thorough
def test_a_request_that_excludes_all_tokens_gets_an_error(loaded):
    (bad,) = answer(loaded, job(rc.Decoding(suppress=range(256))))
    assert [str(error) for error in bad.errors] == [
        "All tokens are excluded for choice 0 at new token 0. Pass options of decoding that leave "
        "some."
    ]
