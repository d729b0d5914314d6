"""The time of a rollout with slow rewards: computed while other answers are sampled, and after it.

A reward waits, as for a program that runs elsewhere or for a judge, so it takes time and no
processor. Answers end at random. Both orders take turns, and have the same tokens and rewards. The
figures are medians of seconds by the clock.

    python experiments/benchmarks/slow_rewards.py
"""

import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import numpy as np
import tyro

from redcoast.models import Llama, LlamaConfig

sys.path.append(str(Path(__file__).parents[1]))
import _rollouts
from _cells import markdown
from _policies import pad_rows
from jaxtyping import PyTree

HEAD = ["seconds of a reward", "after sampling, s", "while sampling, s", "ratio", "least and most"]


@dataclass(frozen=True)
class Config:
    seconds: tuple[float, ...] = (0.02, 0.1)  # seconds of a reward
    rows: int = 32  # number of answers
    prompt: int = 8  # number of tokens in a prompt
    new: int = 64  # maximum number of tokens in an answer
    width: int = 128  # width of the model
    layers: int = 2  # number of layers
    ends: int = 6  # number of tokens, of 97, that end an answer
    rounds: int = 5  # number of measurements of each


def main(c: Config) -> None:
    """Prints a table with a line for each duration of a reward."""
    sizes = LlamaConfig(97, c.width, c.layers, 4, 4, 3 * c.width, eos=(1,), pad=0)
    model = Llama(sizes, key=jax.random.key(0))
    print(markdown(HEAD, [line(c, model, seconds) for seconds in c.seconds]))


def line(c: Config, model: PyTree, seconds: float) -> list[str]:
    after, during = [], []
    for number in range(c.rounds + 1):
        nothing = lambda self, tokens: None
        with mock.patch.object(_rollouts.Grades, "add_tokens", nothing):
            expected, spent = roll_out(c, model, seconds, number)
        after.append(spent)
        rollout, spent = roll_out(c, model, seconds, number)
        during.append(spent)
        jax.tree.map(np.testing.assert_array_equal, rollout, expected)
    after, during = after[1:], during[1:]  # the first ones compile
    ratios = [x / y for x, y in zip(after, during, strict=True)]
    medians = [statistics.median(x) for x in (after, during, ratios)]
    return [f"{seconds}", *(f"{x:.2f}" for x in medians), f"{min(ratios):.2f} {max(ratios):.2f}"]


def roll_out(c: Config, model: PyTree, seconds: float, number: int) -> tuple[dict[str, Any], float]:
    """A rollout, and its seconds by the clock."""

    def reward(problem: int, text: str) -> float:
        time.sleep(seconds)
        return float(len(text) % 2)

    rng = np.random.default_rng(number)
    prompts = rng.integers(c.ends, 97, (c.rows, c.prompt)).tolist()
    policy: Any = SimpleNamespace(
        ends=tuple(range(c.ends)),
        decode=lambda tokens: "x" * len(tokens),
        prompts=lambda problems, length: pad_rows([prompts[i] for i in problems], length),
    )
    task: Any = SimpleNamespace(train=range(c.rows), reward=reward)
    blank = _rollouts.blank_rollout(c.rows, c.prompt, c.new)
    choose = lambda count, busy: np.arange(count)
    begin = time.perf_counter()
    rollout = _rollouts.roll_out(
        policy, model, task, blank, choose, samples=1, new_tokens=c.new, key=jax.random.key(number)
    )
    return rollout, time.perf_counter() - begin


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main(tyro.cli(Config))
