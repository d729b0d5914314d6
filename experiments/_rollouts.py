"""Answers that a model samples, an iteration at a time: long ones go on in the next iteration.

A rollout is a dict of arrays with a row for each answer. The prompt is on the left of the column
`start`, padded on the left, and the answer on the right of it. The state of a run has the rollout,
so a run that is stopped or killed while answers are unfinished goes on with the same tokens.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
        "log_probs": np.zeros((rows, max_tokens), np.float32),  # under the model that sampled it
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
) -> Rollout:
    """Gives new prompts to the rows that are done, samples more tokens of all answers, and computes
    the rewards of those that have ended.

    - `choose`: `choose(count, busy)` returns the indices of new problems, none of them in `busy`.
    - `samples`: the number of answers to each prompt, which are adjacent rows.
    """
    rollout: Rollout = {name: x.copy() for name, x in process_allgather(before, tiled=True).items()}
    start = rollout["tokens"].shape[1] - rollout["fresh"].shape[1]
    done = rollout["done"]
    chosen = choose(int(done.sum()) // samples, rollout["problem"][~done])
    problem = np.repeat(chosen, samples)
    tokens, real = policy.prompts([task.train[i] for i in problem], start)
    for name, new in {"tokens": tokens, "real": real}.items():
        rollout[name][done] = np.pad(new, ((0, 0), (0, rollout["fresh"].shape[1])))
    rollout["problem"][done], rollout["length"][done] = problem, 0
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
    )
    ended = append(rollout, np.asarray(new), start, policy.ends)
    rollout["done"] = np.repeat(ended.reshape(-1, samples).all(axis=1), samples)
    rollout["reward"] = rewards(policy, task, rollout, start)
    return rollout


def append(rollout: Rollout, new: np.ndarray, start: int, ends: Sequence[int]) -> np.ndarray:
    """Appends new tokens to the answers that have not ended; returns which have ended now."""
    length, most = rollout["length"], rollout["fresh"].shape[1]
    last = rollout["tokens"][np.arange(len(length)), start + length - 1]
    open_rows = (length == 0) | ~(np.isin(last, ends) | (length == most))
    count = np.minimum(answer_lengths(new, ends), most - length) * open_rows
    row, column = np.nonzero(np.arange(new.shape[1]) < count[:, None])
    place = length[row] + column
    rollout["tokens"][row, start + place] = new[row, column]
    rollout["real"][row, start + place] = True
    rollout["fresh"] = np.zeros_like(rollout["fresh"])
    rollout["fresh"][row, place] = True
    rollout["length"] = length = (length + count).astype(np.int32)
    last = rollout["tokens"][np.arange(len(length)), start + length - 1]
    return np.isin(last, ends) | (length == most)


def rewards(policy: Policy, task: Task, rollout: Rollout, start: int) -> np.ndarray:
    """The rewards of the rows that are done, computed in threads; 0 for the others."""

    def reward(row: int) -> float:
        if not rollout["done"][row]:
            return 0.0
        answer = rollout["tokens"][row, start : start + rollout["length"][row]]
        problem: Problem = task.train[rollout["problem"][row]]
        return task.reward(problem, policy.decode(answer.tolist()))

    with ThreadPoolExecutor() as pool:
        graded = np.array([*pool.map(reward, range(len(rollout["done"])))], np.float32)
    # What a program takes may differ between processes, and so may its reward.
    return np.asarray(broadcast_one_to_all(graded))


def choose_problems(
    rng: np.random.Generator, solved: np.ndarray, difficulty: float, count: int, busy: np.ndarray
) -> np.ndarray:
    """Draws problems, preferably those that are solved in about half of the answers."""
    weights = (solved * (1 - solved) + 0.01) ** difficulty
    weights[busy] = 0
    return rng.choice(len(solved), count, replace=False, p=weights / weights.sum())


def learned_tokens(rollout):
    """The tokens of answers to prompts whose answers have all ended."""
    columns = jnp.arange(rollout["fresh"].shape[1])[None]
    return (columns < rollout["length"][:, None]) & rollout["done"][:, None]


def of_answers(data):
    """The mean reward and length of answers, and the divergence from the model at the start."""
    mask, done = learned_tokens(data), data["done"]

    def mean(x, where):
        count = jnp.maximum(jnp.sum(where), 1).astype(jnp.float32)
        return jnp.sum(jnp.where(where, x, 0)) / count

    kl = losses.kl_estimate(data["log_probs"], data["reference"])
    length = data["length"].astype(jnp.float32)
    return {
        "reward": mean(data["reward"], done),
        "length": mean(length, done),
        "kl": mean(kl, mask),
    }
