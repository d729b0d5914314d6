"""The scores that `lm-eval` gets, without `lm-eval`; `nox -s lm_eval` has it, and transformers."""

import sys

import jax
import numpy as np
import pytest

import redcoast as rc
from redcoast.models import Llama, LlamaConfig
from redcoast.scores._score_pairs import cut_at, score_pairs

SIZES = LlamaConfig(32, 16, 1, 2, 2, 32, eos=(1,), context=40)
MODEL = Llama(SIZES, key=jax.random.key(0))
RNG = np.random.default_rng(0)


def own_score(context, continuation):
    """Of one text alone, without padding."""
    row = (context + continuation)[-41:]
    logits = np.asarray(jax.jit(MODEL.__call__)(np.array([row[:-1]])), np.float64)[0]
    logits = logits[-len(continuation) :]
    logs = logits - np.log(np.sum(np.exp(logits), axis=1, keepdims=True))
    places = np.arange(len(continuation)), np.array(continuation)
    return logs[places].sum(), bool((logits.argmax(axis=1) == continuation).all())


@pytest.mark.thorough
def test_texts_of_all_lengths_have_their_own_scores():
    """In batches, sharded, and in chunks; the last is too long and loses its beginning."""
    tokens = lambda n: RNG.integers(2, 32, n).tolist()
    pairs = [(tokens(n), tokens(m)) for n, m in [(5, 2), (5, 2), (45, 3)]]
    mesh = rc.make_mesh(data=2, model=2, devices=jax.devices()[:4])
    shardings = rc.infer_shardings(MODEL, mesh)
    actual = score_pairs(jax.device_put(MODEL, shardings), pairs, 40, 2)
    for (score, greedy), pair in zip(actual, pairs, strict=True):
        expected, likeliest = own_score(*pair)
        assert score == pytest.approx(expected, rel=1e-4)
        assert greedy == likeliest


def test_a_text_ends_before_the_first_of_its_ends():
    assert cut_at("a\nb ab", ["\n", "ab"]) == "a"
    assert cut_at("cab", ["\n", "ab", ""]) == "c"


def test_without_lm_eval_the_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(ModuleNotFoundError, match='pip install "lm-eval'):
        rc.lm_eval_model(MODEL, None)
