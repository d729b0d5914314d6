"""Distils a teacher into a student on the student's own answers: the teacher grades each of their
tokens by the reverse divergence (Agarwal et al., 2023, arXiv:2306.13649).

By default, the student is a small model that imitates someone who adds and forgets to carry, and
the teacher is a larger model that was trained on right sums.
"""

import dataclasses
import functools as ft
from dataclasses import dataclass, field
from typing import Literal

import _options
import jax
import jax.numpy as jnp
import numpy as np
from _common import exit_if_stopped, make_optimizer, report, start
from _learner import mesh_of, prepare, run_learner, split_keys
from _options import FromZero, Maybe, MultipleOf32, Positive, Weights, refuse
from _plots import plot_metric
from _policies import accuracy, imitating_policy, published_policy, token_logits
from _rollouts import blank_rollout, choose_problems, learned_tokens, roll_out
from _verifiable import make_task

import redcoast as rc
from redcoast import losses

TRAINABLE = {"student": True, "teacher": False}


@dataclass(frozen=True)
class Config:
    task: Literal["sums", "word_problems", "programs"] = "sums"  # problems to answer
    test_problems: int = 512  # number of held-out problems
    weights: Maybe[Weights] = None  # student: smollm2, a directory or a .gguf file; else imitation
    teacher_weights: Maybe[Weights] = None  # teacher with the same tokens, given like --weights
    width: MultipleOf32 = 64  # width of the small student, a multiple of 32 (without weights)
    teacher_width: MultipleOf32 = 128  # the same of the small teacher (without weights)
    imitation_steps: FromZero = 1000  # number of steps in which the small student imitates answers
    teacher_steps: FromZero = 1500  # number of steps in which the small teacher imitates answers
    estimate: Literal["full", "sampled"] = "full"  # over all tokens, or the sampled one
    batch_size: int = 128  # number of answers in a step, each to another prompt
    max_tokens: int = 4  # maximum number of tokens in an answer
    new_tokens: Maybe[int] = None  # tokens of an answer per step; by default all
    steps: int = 300  # number of steps: answers, then a gradient step on them
    learning_rate: Positive = 1e-3  # peak learning rate after the warmup
    run: _options.RunOptions = field(default_factory=_options.Run)


def main(c: Config) -> None:
    if (c.weights is None) != (c.teacher_weights is None):
        refuse("--weights and --teacher-weights must be given together: the tokens are the same.")
    run = start(c, "distill_on_policy", split={"--batch-size": c.batch_size})
    task, keys = make_task(c.task, c.run.seed, c.test_problems), split_keys(run)
    if c.weights is not None and c.teacher_weights is not None:
        policy = published_policy(run, c.weights)
        teacher = published_policy(run, c.teacher_weights)
    else:
        right = dataclasses.replace(task, show=lambda problem, rng: problem.answer)
        steps, width = c.teacher_steps, c.teacher_width
        teacher = imitating_policy(run, right, "teacher", steps, width=width)
        policy = imitating_policy(run, task, "student", c.imitation_steps, width=c.width)
    # As a part of the model, the frozen teacher is sharded like the student.
    model = {"student": policy.model, "teacher": teacher.model}

    width = policy.prompts(task.train)[0].shape[1]  # columns of the prompts
    rollout = blank_rollout(c.batch_size, width, c.max_tokens)
    optimizer = make_optimizer(c, c.batch_size * c.steps, weight_decay=0.0)
    loss_fn = ft.partial(distillation_loss, c, width)
    train, plan, loss = prepare(run, model, optimizer, loss_fn, rollout, trainable=TRAINABLE)
    mesh = mesh_of(plan)
    solved = np.full(len(task.train), 0.5)  # all problems are as likely

    def collect(state, number):
        rng = np.random.default_rng((c.run.seed, number))
        rollout = roll_out(
            policy,
            state["train"].model["student"],
            task,
            state["rollout"],
            ft.partial(choose_problems, rng, solved, 0.0),
            samples=1,
            new_tokens=c.new_tokens or c.max_tokens,
            key=jax.random.fold_in(keys.acting, number),
        )
        return (rollout,)

    def step(state, rollout):
        train, metrics = rc.train_step(
            state["train"], rollout, loss_fn=loss, optimizer=optimizer, trainable=TRAINABLE
        )
        answers = jnp.maximum(jnp.sum(rollout["done"]), 1).astype(jnp.float32)
        metrics["reward"] = jnp.sum(rollout["reward"]) / answers
        return {"train": train, "rollout": rollout}, metrics

    state = {"train": train, "rollout": jax.tree.map(jnp.asarray, rollout)}
    shardings = {"train": plan.shardings, "rollout": rc.batch_shardings(rollout, mesh)}
    test = ft.partial(accuracy, policy, task=task, new_tokens=c.max_tokens, mesh=mesh)
    before, best = test(policy.model), test(teacher.model)
    state, steps = run_learner(c, run, step, state, shardings, plan=plan, collect=collect)
    exit_if_stopped(steps, c.steps)
    plot_metric(run.directory, "loss")
    after = test(state["train"].model["student"])
    report(run.directory, accuracy=after, accuracy_before=before, teacher_accuracy=best)


def distillation_loss(c, width, model, batch, key):
    mask = learned_tokens(batch)
    weight = {"weight": jnp.sum(mask)}
    student_logits = token_logits(model["student"], batch, width)  # (rows, max_tokens, vocab)
    teacher_logits = token_logits(model["teacher"], batch, width)
    if c.estimate == "full":
        return losses.reverse_kl(student_logits, teacher_logits, mask=mask), weight
    # The policy gradient, in which the reward of a token is how much likelier the teacher finds it.
    tokens = batch["tokens"][:, width:, None]
    of_tokens = lambda x: jnp.take_along_axis(jax.nn.log_softmax(x), tokens, axis=-1)[..., 0]
    student, teacher = of_tokens(student_logits), of_tokens(teacher_logits)
    gains = jax.lax.stop_gradient(teacher - student)
    return losses.dapo(student, jax.lax.stop_gradient(student), gains, mask=mask), weight


if __name__ == "__main__":
    _options.run(main, Config, __doc__)
