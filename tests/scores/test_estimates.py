"""pass@k against its definition and the code of its paper, win rates against SciPy and coverage."""

import itertools as it
from math import comb

import numpy as np
import pytest
from scipy import stats

import redcoast as rc

RNG = np.random.default_rng(0)


def of_paper(n, c, k):
    """`estimator` of Chen et al. (2021), figure 3."""
    if n - c < k:
        return 1.0
    return 1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1))


def of_subsets(row, k):
    """The share of all choices of k answers that have a right one."""
    return np.mean([any(chosen) for chosen in it.combinations(row, k)])


@pytest.mark.parametrize("k", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_choices_with_a_right_answer(k):
    right = RNG.random((6, 8)) < np.linspace(0, 1, 6)[:, None]
    expected = np.mean([of_subsets(row, k) for row in right])
    assert rc.pass_at_k(right, k).mean == pytest.approx(expected, abs=1e-12)
    of_counts = np.mean([of_paper(8, row.sum(), k) for row in right])
    assert rc.pass_at_k(right.astype(np.float32), k).mean == pytest.approx(of_counts, abs=1e-12)


def test_pass_at_k_of_many_answers_is_finite_and_has_no_bias():
    """The factorials of the definition overflow."""
    right = np.zeros((1, 2000), bool)
    right[0, :3] = True
    exact = 1 - comb(1997, 700) / comb(2000, 700)
    assert rc.pass_at_k(right, 700).mean == pytest.approx(exact, rel=1e-10)
    drawn = RNG.random((4000, 6)) < 0.3
    assert rc.pass_at_k(drawn, 4).mean == pytest.approx(1 - 0.7**4, abs=0.02)


def test_all_right_and_all_wrong_are_certain_to_no_one():
    right, wrong = rc.pass_at_k(np.ones((9, 4)), 2), rc.pass_at_k([[0, 0]] * 9, 2)
    assert (right.mean, right.high) == (1, 1)
    assert (wrong.mean, wrong.low) == (0, 0)
    assert right.low == pytest.approx(1 - wrong.high) == pytest.approx(9 / (9 + 1.959964**2))


@pytest.mark.parametrize("level", [0.8, 0.95, 0.99])
@pytest.mark.parametrize(("wins", "losses"), [(61, 39), (0, 1), (1, 0), (3, 97), (500, 500)])
def test_an_interval_is_that_of_wilson(wins, losses, level):
    actual = rc.win_rate(wins, losses, level=level)
    test = stats.binomtest(wins, wins + losses)
    expected = test.proportion_ci(confidence_level=level, method="wilson")
    assert actual.mean == test.statistic
    assert (actual.low, actual.high) == pytest.approx((expected.low, expected.high), abs=1e-12)
    of_answers = rc.pass_at_k([[1]] * wins + [[0]] * losses, 1, level=level)
    assert of_answers == pytest.approx(actual, abs=1e-12)


@pytest.mark.parametrize("ties", [0.0, 0.4])
def test_an_interval_covers_the_rate_as_often_as_it_says(ties):
    """A tie is half a win, which varies less than wins and losses: the interval is then wide."""
    chances = np.array([0.55, 0.45]) * (1 - ties)
    games = RNG.multinomial(60, [*chances, ties], size=2000)
    rate = chances[0] + ties / 2
    intervals = [rc.win_rate(*map(int, row)) for row in games]
    covered = np.mean([x.low <= rate <= x.high for x in intervals])
    assert covered > 0.97 if ties else 0.935 < covered < 0.97
    assert rc.win_rate(2, 1, ties=3).mean == pytest.approx(3.5 / 6)
