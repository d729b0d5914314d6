"""Beam search against one with lists of hypotheses, which computes every sequence anew."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generate_helpers import (
    TinyCache,
    TinySeq2Seq,
    log_softmax,
    prompts,
    slow_beams,
    slow_greedy,
    slow_logits,
    slow_memory,
    tiny,
)
from grids import few_of

from redcoast.generate import generate
from redcoast.generate._cache_rows import cache_batch_dims, reorder_rows, repeat_rows

ROWS, (LEFT, LEFT_MASK), (RIGHT, RIGHT_MASK) = prompts([3, 7, 1, 5])
PROMPT: Any = {"mask": LEFT_MASK, "max_new_tokens": 8}


@pytest.mark.parametrize(
    "eos", few_of([(), (2,), (1, 4, 6), tuple(range(10))], (), (1, 4, 6)), ids=str
)
@pytest.mark.parametrize("beams", few_of([2, 3, 5], 2, 5))
@pytest.mark.few("5-(1, 4, 6)")
def test_beam_search_gives_the_best_hypothesis(beams, eos):
    lengths = set()
    for seed in range(4):
        model = tiny(seed, spread=1.0)
        for penalty in (-1.0, 0.0, 0.5, 1.0, 2.0):
            options = {"beams": beams, "eos": eos, "length_penalty": penalty}
            actual = generate(model, LEFT, **PROMPT, **options)
            options = {"penalty": penalty, "eos": eos, "pad": eos[0] if eos else 0}
            want = [slow_beams(model, row, 8, beams, **options) for row in ROWS]
            np.testing.assert_array_equal(actual, want, err_msg=f"{seed=} {penalty=}")
            lengths |= {next((i for i, t in enumerate(row) if t in eos), 8) for row in want}
    assert len(lengths) > 2 or not eos


@pytest.mark.thorough
def test_beams_find_what_greedy_decoding_misses():
    def score(model, prompt, new):
        log_probs = [
            log_softmax(slow_logits(model, [*prompt, *new[:i]]))[t] for i, t in enumerate(new)
        ]
        return sum(log_probs)

    gains = []
    for seed in range(6):
        model = tiny(seed, spread=1.0)
        actual = np.asarray(generate(model, LEFT, **PROMPT, beams=5))
        for row, new in zip(ROWS, actual, strict=True):
            greedy = slow_greedy(model, row, 8)
            gains.append(score(model, row, new.tolist()) - score(model, row, greedy))
    assert np.mean(gains) > 0.1


@pytest.mark.thorough
def test_beams_do_not_depend_on_padding_or_on_other_rows():
    model = tiny(2, spread=1.0)
    options: dict[str, Any] = {"beams": 3, "eos": (2,), "max_new_tokens": 8}
    actual = np.asarray(generate(model, LEFT, mask=LEFT_MASK, **options))
    np.testing.assert_array_equal(generate(model, RIGHT, mask=RIGHT_MASK, **options), actual)
    for i, row in enumerate(ROWS):
        alone = generate(model, np.array([row]), **options)
        np.testing.assert_array_equal(alone[0], actual[i])


@pytest.mark.thorough
def test_beams_of_an_encoder_decoder_each_keep_their_memory():
    model = tiny(5, TinySeq2Seq, decoder_start=4, spread=1.0)
    options: dict[str, Any] = {"beams": 4, "eos": (2,), "length_penalty": 0.5}
    actual = generate(model, RIGHT, mask=RIGHT_MASK, max_new_tokens=8, **options)
    memories = [slow_memory(model, row) for row in ROWS]
    slow: dict[str, Any] = {"penalty": 0.5, "eos": (2,), "pad": 2}
    want = [slow_beams(model, [4], 8, 4, memory=memory, **slow) for memory in memories]
    np.testing.assert_array_equal(actual, want)


@pytest.mark.thorough
def test_beam_search_is_traced_like_any_function():
    model = tiny(2, spread=1.0)
    decode = lambda tokens: generate(model, tokens, **PROMPT, beams=3, eos=2)
    np.testing.assert_array_equal(jax.jit(decode)(LEFT), decode(LEFT))


@pytest.mark.thorough
def test_more_beams_than_tokens_still_search():
    model = tiny(1, vocab=3, spread=1.0)
    rows, (tokens, mask), _ = prompts([2, 4], vocab=3)
    actual = generate(model, tokens, mask=mask, max_new_tokens=4, beams=4)
    want = [slow_beams(model, row, 4, 4) for row in rows]
    np.testing.assert_array_equal(actual, want)


def cache_of(rows):
    rng = np.random.default_rng(0)
    k, v, memory = (
        jnp.asarray(rng.normal(size=shape)) for shape in [(rows, 5, 2), (rows, 5, 2), (rows, 2)]
    )
    mask = jnp.asarray(rng.integers(0, 2, (rows, 5)), bool)
    return TinyCache(k, v, mask, jnp.asarray(3), memory)


@pytest.mark.thorough
def test_rows_of_a_cache_are_repeated_and_reordered_as_take_would():
    cache = cache_of(3)
    dims = cache_batch_dims(cache, 3)
    assert dims == (0, 0, 0, None, 0)
    several = repeat_rows(cache, dims, 2)
    parent = jnp.asarray([[1, 1], [0, 1], [1, 0]])
    # Distinct beams of one memory each: what a search has.
    grown = TinyCache(several.k + jnp.arange(6.0)[:, None, None], *list_of(several)[1:])
    actual = reorder_rows(grown, several, dims, parent)
    wanted = grown.take((2 * jnp.arange(3)[:, None] + parent).reshape(-1))
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(x, y)
    assert actual.memory is several.memory
    assert actual.k is not grown.k


def list_of(cache):
    return [cache.k, cache.v, cache.mask, cache.filled, cache.memory]
