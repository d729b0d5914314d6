"""Estimates of shares, of solved problems and of won games, with confidence intervals."""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Shaped

from ..core._errors import check_integer, check_number
from ..core._frames import hide_frames

Right = Shaped[Array | np.ndarray, "problems samples"] | Sequence[Sequence[Any]]


class Estimate(NamedTuple):
    """An estimate of a share, between 0 and 1.

    - `mean`: the estimate.
    - `low`, `high`: the ends of its confidence interval.
    """

    mean: float
    low: float
    high: float


@hide_frames
def pass_at_k(right: Right, k: int, *, level: float = 0.95) -> Estimate:
    """Estimates pass@k, the probability that at least one of k answers to a problem is right, from
    at least k answers to each problem.

    The estimate of a problem, of whose n answers c are right, is 1 - C(n - c, k) / C(n, k), which
    has no bias (Chen et al., 2021, equation 1, <https://arxiv.org/abs/2107.03374>).

    **Arguments:**

    - `right`: which answers are right, as booleans or as 0 and 1, of shape (problems, samples). Of
        rewards that may be fractions, pass `rewards >= 1`.
    - `k`: the number of answers, at most samples.
    - `level`: the probability that the confidence interval covers pass@k.

    **Returns:**

    A [`redcoast.Estimate`][]: the mean over problems, with Wilson's interval for so many problems.
    It covers pass@k of problems of the same kind, and is wider than needed where the estimates of
    problems are between 0 and 1.

    **Raises:**

    `ValueError` if `right` has another shape, no problem, or other numbers than 0 and 1, or if `k`
    or `level` is out of range.

    !!! Example

        ```python
        right = np.array([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]])  # three problems
        estimate = rc.pass_at_k(right, 2)
        print(f"{estimate.mean:.2f}, from {estimate.low:.2f} to {estimate.high:.2f}")
        ```
    """
    check_integer("k", k)
    try:
        answers = np.asarray(right)
    except ValueError as error:
        raise ValueError(
            "`right` must have the same number of answers to each problem, of shape (problems, "
            "samples)."
        ) from error
    if answers.ndim != 2 or not answers.size:
        raise ValueError(
            "`right` must have the shape (problems, samples), with at least one of each, but has "
            f"{answers.shape}."
        )
    if not np.isin(answers, (0, 1)).all():
        raise ValueError(
            "`right` must have booleans, or 0 and 1, but has other values. Of rewards, pass "
            "`rewards >= 1`."
        )
    problems, samples = answers.shape
    if k > samples:
        raise ValueError(
            f"`k` is {k}, but `right` has {samples} answers to each problem. pass@k needs at least "
            "k answers."
        )
    # The probability of a right one among k different answers. Python's integers are exact, however
    # many choices of k answers there are.
    choices = math.comb(samples, k)
    each = []  # for each problem
    for wrong in np.sum(answers == 0, axis=1).tolist():
        each.append((choices - math.comb(wrong, k)) / choices)
    return _interval(float(np.mean(each)), problems, level)


@hide_frames
def win_rate(wins: int, losses: int, ties: int = 0, *, level: float = 0.95) -> Estimate:
    """Computes the share of games that a model won against another, with a confidence interval. A
    tie counts as half a win.

    **Arguments:**

    - `wins`, `losses`, `ties`: the numbers of games, such as prompts whose two answers were judged.
    - `level`: the probability that the confidence interval covers the rate.

    **Returns:**

    A [`redcoast.Estimate`][] with Wilson's interval (1927), which is also meaningful for few games,
    and if all were won. With ties, it is wider than needed.

    **Raises:**

    `ValueError` if a number is negative, if there is no game, or if `level` is out of range.

    !!! Example

        ```python
        rate = rc.win_rate(61, 34, ties=5)
        print(f"{rate.mean:.3f}, from {rate.low:.3f} to {rate.high:.3f}")
        assert rate.low > 0.5  # better than the other
        ```
    """
    for name, count in {"wins": wins, "losses": losses, "ties": ties}.items():
        check_integer(name, count, least=0)
    games = wins + losses + ties
    if not games:
        raise ValueError("`wins`, `losses` and `ties` are 0. A rate needs at least one game.")
    return _interval((wins + ties / 2) / games, games, level)


def _interval(mean: float, count: int, level: float) -> Estimate:
    """Wilson's interval for the mean of `count` numbers between 0 and 1. Their variance is largest
    if all are 0 or 1, and it assumes this one."""
    check_number("level", level)
    if not 0 < level < 1:
        raise ValueError(f"`level` is {level}. It must be between 0 and 1, such as 0.95.")
    # The interval is centred on the mean, shrunk towards one half.
    z = NormalDist().inv_cdf((1 + level) / 2)
    shrink = 1 + z**2 / count
    centre = (mean + z**2 / (2 * count)) / shrink
    half = z / shrink * (mean * (1 - mean) / count + z**2 / (4 * count**2)) ** 0.5
    low, high = max(centre - half, 0.0), min(centre + half, 1.0)
    # Rounding would end the interval of 0 a little above it, and that of 1 below.
    if mean == 0:
        low = 0.0
    if mean == 1:
        high = 1.0
    return Estimate(mean, low, high)
