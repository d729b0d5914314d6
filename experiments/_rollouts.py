"""Answers that a model samples, an iteration at a time: long ones go on in the next iteration.

Rewards are computed in threads: of an answer that has ended, while the others are sampled. A
rollout is a dict of arrays with a row for each answer. The prompt is on the left of the column
`start`, padded on the left, and the answer on the right of it. The state of a run has the rollout,
so a run that is stopped or killed while answers are unfinished goes on with the same tokens.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _options import refuse
from _policies import Policy, answer_lengths
from _verifiable import Problem, Task
from jax.experimental.multihost_utils import broadcast_one_to_all, process_allgather

import redcoast as rc
from redcoast import losses

Rollout = dict[str, Any]


def blank_rollout(rows: int, prompt_tokens: int, max_tokens: int) -> Rollout:
    """A rollout whose answers have all ended, so that each row gets a new prompt."""
    whole = (rows, prompt_tokens + max_tokens)
    return {
        "tokens": np.zeros(whole, np.int32),
        "real": np.zeros(whole, bool),  # of the prompt or the answer, and not padding
        "fresh": np.zeros((rows, max_tokens), bool),  # of the answer, written in this iteration
        "log_probs": np.zeros((rows, max_tokens), np.float32),  # of the model that sampled them
        "length": np.zeros(rows, np.int32),  # of the answer so far
        "problem": np.full(rows, -1, np.int32),  # the index of the problem
        "done": np.ones(rows, bool),  # all answers to this prompt have ended
        "reward": np.zeros(rows, np.float32),
    }


def roll_out(
    policy: Policy,
    model: Any,
    task: Task,
    before: Rollout,
    choose: Callable[[int, np.ndarray], np.ndarray],
    *,
    samples: int,
    new_tokens: int,
    key: jax.Array,
    exact: bool = False,
) -> Rollout:
    """Gives new prompts to the rows that are done, samples more tokens of all answers, and computes
    the rewards of those that have ended.

    - `choose`: `choose(count, busy)` returns the indices of new problems, none of them in `busy`.
    - `samples`: the number of answers to each prompt, which are adjacent rows.
    - `exact`: whether log-probabilities are those of the loss to the last bit. Rewards are then
        computed after all answers have been sampled.
    """
    rollout: Rollout = jax.tree.map(np.copy, process_allgather(before, tiled=True))
    max_tokens = rollout["fresh"].shape[1]
    start = rollout["tokens"].shape[1] - max_tokens
    is_done = rollout["done"]
    problems = choose(int(is_done.sum()) // samples, rollout["problem"][~is_done])
    problems = np.repeat(problems, samples)
    tokens, real = policy.prompts([task.train[i] for i in problems], start)
    rollout["tokens"][is_done] = np.pad(tokens, ((0, 0), (0, max_tokens)))
    rollout["real"][is_done] = np.pad(real, ((0, 0), (0, max_tokens)))
    rollout["problem"][is_done] = problems
    rollout["length"][is_done] = 0
    rollout["reward"][is_done] = 0
    with ThreadPoolExecutor() as pool:
        grades = Grades(pool, policy, task, rollout, start)
        stream = grades.add_tokens
        if exact:  # has no stream
            stream = None
        new = rc.generate(
            model,
            rollout["tokens"],
            new_tokens,
            mask=rollout["real"],
            key=key,
            temperature=1.0,
            top_k=None,
            top_p=None,
            eos=policy.ends,
            log_probabilities=True,
            exact=exact,
            stream=stream,
        )
        log_probs = np.asarray(new.log_probabilities)
        ended = append(rollout, np.asarray(new.tokens), log_probs, start, policy.ends)
        rollout["reward"] = grades.finish(ended)
    rollout["done"] = np.repeat(ended.reshape(-1, samples).all(axis=1), samples)
    return rollout


class Grades:
    """The rewards of the answers that end in an iteration, computed in threads."""

    def __init__(
        self, pool: ThreadPoolExecutor, policy: Policy, task: Task, rollout: Rollout, start: int
    ):
        self.pool, self.policy, self.task, self.rollout = pool, policy, task, rollout
        self.start = start
        # The tokens so far of the answers that can go on, by row.
        self.answers: dict[int, list[int]] = {}
        for row in np.flatnonzero(~has_ended(rollout, start, policy.ends)):
            self.answers[int(row)] = self.tokens_of(int(row))
        self.begun: dict[int, Future[float]] = {}

    def tokens_of(self, row: int) -> list[int]:
        """The tokens of an answer in the rollout."""
        end = self.start + self.rollout["length"][row]
        return self.rollout["tokens"][row, self.start : end].tolist()

    def add_tokens(self, tokens: np.ndarray) -> None:
        """Adds a token of each row, and starts to grade the answers that it ends."""
        most = self.rollout["fresh"].shape[1]
        for row, answer in self.answers.items():
            if row in self.begun:
                continue
            answer.append(int(tokens[row]))
            if answer[-1] in self.policy.ends or len(answer) == most:
                self.begin(row, answer)

    def begin(self, row: int, answer: list[int]) -> None:
        problem: Problem = self.task.train[self.rollout["problem"][row]]
        text = self.policy.decode(answer)
        self.begun[row] = self.pool.submit(self.task.reward, problem, text)

    def finish(self, ended: np.ndarray) -> np.ndarray:
        """The rewards of all answers that have ended; 0 for the others."""
        for row in self.answers.keys() - self.begun.keys():
            if ended[row]:
                self.begin(row, self.tokens_of(row))
        rewards = self.rollout["reward"].copy()
        for row, grade in self.begun.items():
            rewards[row] = grade.result()
        # What a program takes may differ between processes, and so may its reward.
        return np.asarray(broadcast_one_to_all(rewards))


def has_ended(rollout: Rollout, start: int, ends: Sequence[int]) -> np.ndarray:
    """Which answers have ended: with a token that ends them, or with the most tokens."""
    length = rollout["length"]
    last = rollout["tokens"][np.arange(len(length)), start + length - 1]
    return (length > 0) & (np.isin(last, ends) | (length == rollout["fresh"].shape[1]))


def append(
    rollout: Rollout, new: np.ndarray, log_probs: np.ndarray, start: int, ends: Sequence[int]
) -> np.ndarray:
    """Appends new tokens to the answers that have not ended; returns which have ended now."""
    length, most = rollout["length"], rollout["fresh"].shape[1]
    is_open = ~has_ended(rollout, start, ends)
    count = np.minimum(answer_lengths(new, ends), most - length) * is_open
    row, column = np.nonzero(np.arange(new.shape[1]) < count[:, None])
    place = length[row] + column
    rollout["tokens"][row, start + place] = new[row, column]
    rollout["real"][row, start + place] = True
    rollout["fresh"] = np.zeros_like(rollout["fresh"])
    rollout["fresh"][row, place] = True
    rollout["log_probs"][row, place] = log_probs[row, column]
    rollout["length"] = (length + count).astype(np.int32)
    return has_ended(rollout, start, ends)


def choose_problems(
    rng: np.random.Generator, solved: np.ndarray, difficulty: float, count: int, busy: np.ndarray
) -> np.ndarray:
    """Draws problems, preferably those that are solved in about half of the answers."""
    weights = (solved * (1 - solved) + 0.01) ** difficulty
    weights[busy] = 0
    free = np.count_nonzero(weights)
    if free < count:
        refuse(f"A rollout needs {count} new problems, but {free} are left to train on.")
    return rng.choice(len(solved), count, replace=False, p=weights / weights.sum())


def learned_tokens(rollout):
    """The tokens of answers to prompts whose answers have all ended."""
    columns = jnp.arange(rollout["fresh"].shape[1])[None]
    return (columns < rollout["length"][:, None]) & rollout["done"][:, None]


def of_answers(data):
    """The mean reward and length of answers, and the divergence from the model at the start."""

    def mean(x, where):
        count = jnp.maximum(jnp.sum(where), 1).astype(jnp.float32)
        return jnp.sum(jnp.where(where, x, 0)) / count

    kl = losses.kl_estimate(data["log_probs"], data["reference"])
    length = data["length"].astype(jnp.float32)
    return {
        "reward": mean(data["reward"], data["done"]),
        "length": mean(length, data["done"]),
        "kl": mean(kl, learned_tokens(data)),
    }
