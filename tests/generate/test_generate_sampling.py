"""Draws against the filtered distribution, computed in NumPy in double precision."""

import functools as ft
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generate_helpers import TinyConfig, prompts, tiny
from grids import few_of
from random_models import to_device
from scipy import stats

from redcoast.generate import generate
from redcoast.generate._logits import filter_logits, first_greatest

KEY = jax.random.key(7)
MODEL = tiny(3)
ROWS, (LEFT, LEFT_MASK), (RIGHT, RIGHT_MASK) = prompts([3, 7, 1, 5])


class Constant(eqx.Module):
    """The same logits after every token."""

    logits: jax.Array
    config: TinyConfig = eqx.field(static=True, default_factory=TinyConfig)

    def init_cache(self, batch, length):
        return ()

    def decode(self, tokens, cache, *, mask=None):
        return jnp.ones((*tokens.shape, 1)), cache

    def unembed(self, hidden):
        return hidden * self.logits[None, None]


def slow_filter(logits, temperature=1.0, top_k=None, top_p=None):
    """The probabilities after all filters, of tokens sorted one by one."""
    scores = np.asarray(logits, np.float64) / temperature
    if top_k is not None:
        scores[scores < np.sort(scores)[-min(top_k, scores.size)]] = -np.inf
    probabilities = np.exp(scores - scores.max())
    probabilities /= probabilities.sum()
    if top_p is not None:
        left_out = 0.0
        for token in np.argsort(scores, kind="stable")[:-1]:
            left_out += probabilities[token]
            if left_out <= 1 - top_p:
                scores[token] = -np.inf
        probabilities = np.where(np.isinf(scores), 0, probabilities)
    return probabilities / probabilities.sum()


def p_value(tokens, probabilities):
    """How likely counts so far from the expected ones are, by the chi-squared test."""
    counts = np.bincount(np.ravel(tokens), minlength=probabilities.size)
    assert counts[probabilities == 0].sum() == 0
    kept = probabilities > 0
    if kept.sum() == 1:
        return 1.0
    return stats.chisquare(counts[kept], counts.sum() * probabilities[kept]).pvalue


LOGITS = np.random.default_rng(1).normal(0, 1.5, 11).astype(np.float32)
FILTERS: Any = [
    {},
    {"temperature": 0.6},
    {"temperature": 2.5},
    {"top_k": 4},
    {"top_k": 1},
    {"top_p": 0.8},
    {"top_p": 1e-6},
    {"temperature": 1.7, "top_k": 6, "top_p": 0.7},
    {"temperature": 0.8, "top_k": 100, "top_p": 0.95},
]


@pytest.mark.parametrize(
    ("rows", "steps", "filters"),
    few_of(
        [*((10_000, 1, one) for one in FILTERS), (250, 40, FILTERS[0]), (250, 40, FILTERS[-2])],
        (10_000, 1, FILTERS[0]),
        several=True,
    ),
)
def test_ten_thousand_draws_have_the_filtered_distribution(rows, steps, filters):
    options: dict[str, Any] = {"temperature": 1.0, **filters, "key": KEY, "max_new_tokens": steps}
    tokens = generate(Constant(to_device(LOGITS)), np.zeros((rows, 1), int), **options)
    assert tokens.size == 10_000
    assert p_value(tokens, slow_filter(LOGITS, **filters)) > 1e-3


def test_the_test_of_draws_can_fail():
    options: dict[str, Any] = {"temperature": 1.0, "key": KEY, "max_new_tokens": 1}
    tokens = generate(Constant(to_device(LOGITS)), np.zeros((10_000, 1), int), **options)
    assert p_value(tokens, slow_filter(LOGITS, temperature=1.3)) < 1e-6


@pytest.mark.parametrize("kind", ["normal", "rounded", "equal", "one_impossible"])
def test_the_filters_keep_what_the_definitions_say(kind):
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 2, (200, 30)).astype(np.float32)
    if kind == "rounded":  # many ties
        logits = np.round(logits)
    if kind == "equal":  # -0.0 and 0.0
        logits *= 0
    if kind == "one_impossible":
        logits[:, ::3] = -np.inf
    for temperature, top_k, top_p in [(1, 7, None), (0.5, None, 0.9), (2, 12, 0.5), (1, 3, 0.01)]:
        tail = None if top_p is None else jnp.float32(1 - top_p)
        scores = filter_logits(to_device(logits), jnp.float32(temperature), top_k, tail)
        want = np.stack([slow_filter(row, temperature, top_k, top_p) for row in logits])
        np.testing.assert_array_equal(np.isfinite(scores), want > 0)
        np.testing.assert_allclose(jax.nn.softmax(scores), want, atol=1e-6)


@pytest.mark.thorough
def test_a_top_k_above_the_vocabulary_and_a_top_p_of_one_keep_everything():
    draw = ft.partial(generate, MODEL, LEFT, max_new_tokens=6, temperature=1.0, key=KEY)
    np.testing.assert_array_equal(draw(top_k=500, top_p=1.0), draw())


def test_the_first_of_the_greatest_is_chosen_and_nan_and_no_choice_are_marked():
    scores = np.array([[0, 2, 2], [np.nan, 1, 5], [-np.inf, -np.inf, -np.inf], [9, -1, 0]])
    np.testing.assert_array_equal(first_greatest(to_device(scores)), [1, -1, -2, 0])


@pytest.mark.thorough
def test_draws_do_not_depend_on_how_they_are_made():
    options: Any = {"temperature": 1.2, "key": KEY, "top_k": 9, "top_p": 0.95}
    draw = ft.partial(generate, max_new_tokens=9, **options)
    drawn = np.asarray(draw(MODEL, LEFT, mask=LEFT_MASK))
    assert len(np.unique(drawn)) > 4
    streamed = []
    more, more_mask = (np.pad(x, ((0, 0), (12, 0))) for x in (LEFT, LEFT_MASK))
    actual = {
        "padded on the right": draw(MODEL, RIGHT, mask=RIGHT_MASK),
        "traced": eqx.filter_jit(draw)(MODEL, LEFT, mask=LEFT_MASK),
        "streamed": draw(MODEL, LEFT, mask=LEFT_MASK, stream=streamed.append),
        "of longer rows, and more": generate(
            MODEL, more, mask=more_mask, max_new_tokens=20, **options
        )[:, :9],
        "of fewer rows": draw(MODEL, LEFT[:2], mask=LEFT_MASK[:2]),
    }
    for how, tokens in actual.items():
        np.testing.assert_array_equal(tokens, drawn[: len(tokens)], err_msg=how)
    np.testing.assert_array_equal(np.stack(streamed, axis=1), drawn)


@pytest.mark.thorough
def test_rows_steps_and_keys_draw_differently():
    model = Constant(jnp.zeros(11))
    draw = ft.partial(generate, model, np.zeros((8, 2), int), max_new_tokens=16, temperature=1.0)
    one, other = np.asarray(draw(key=KEY)), np.asarray(draw(key=jax.random.key(8)))
    assert len(np.unique(one, axis=0)) == 8
    assert len(np.unique(one, axis=1).T) == 16
    assert (one != other).mean() > 0.7
    np.testing.assert_array_equal(one, draw(key=KEY))
    # Keys of the older kind draw the same.
    np.testing.assert_array_equal(one, draw(key=jax.random.key_data(KEY)))


def test_at_temperature_zero_a_key_changes_nothing_and_filters_are_refused():
    decode: Any = ft.partial(generate, MODEL, LEFT, mask=LEFT_MASK, max_new_tokens=5)
    np.testing.assert_array_equal(decode(key=KEY), decode())
    for options in ({"top_k": 3}, {"top_p": 0.1}, {"min_p": 0.1}):
        with pytest.raises(ValueError, match="only applies to sampling"):
            decode(**options)
