"""Learns to learn from few examples by MAML (Finn et al., 2017, arXiv:1703.03400).

A task is a sinusoid, or some characters of scripts that training has not seen. The tasks of a batch
are split over the mesh, and each takes gradient steps of its own from the weights that all share.
"""

import itertools as it
from dataclasses import dataclass, field, replace
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from _common import Run, exit_if_stopped, make_optimizer, report, start
from _glyphs import read_glyphs
from _plots import plot_metric, plt, save_pictures
from _usage import refuse

import redcoast as rc

SCRIPTS = {"train": ("latin", "greek"), "test": ("cyrillic", "armenian", "georgian")}


@dataclass(frozen=True)
class Config:
    task: Literal["sinusoids", "glyphs"] = "sinusoids"  # regression, or few-shot classification
    ways: int = 5  # number of classes of a task, for glyphs
    shots: int | None = None  # examples to learn from: by default 10, or 1 of each class of glyphs
    queries: int | None = None  # examples to be judged by: by default 10, or 5 of each class
    first_order: bool = False  # leave out second derivatives, which is cheaper
    inner_steps: int = 1  # number of gradient steps on a task in training; tests take 0 to 5
    inner_rate: float | None = None  # learning rate of these: by default 0.02, or 0.2 for glyphs
    width: int | None = None  # width of the hidden layers: by default 64, or 256 for glyphs
    test_tasks: int = 600  # number of held-out tasks
    batch_size: int = 32  # global batch size in tasks
    steps: int = 3000  # number of training steps
    learning_rate: float = 3e-3  # peak learning rate after the warmup
    run: tyro.conf.OmitArgPrefixes[Run] = field(default_factory=Run)


def main(c: Config) -> None:
    task, defaults = {
        "sinusoids": (sinusoids, {"shots": 10, "queries": 10, "inner_rate": 0.02, "width": 64}),
        "glyphs": (glyphs, {"shots": 1, "queries": 5, "inner_rate": 0.2, "width": 256}),
    }[c.task]
    c = replace(c, **{name: x for name, x in defaults.items() if getattr(c, name) is None})
    if min(c.ways, c.shots, c.queries, c.inner_steps, c.test_tasks) < 1:
        refuse("Use at least 1 for --ways, --shots, --queries, --inner-steps and --test-tasks.")
    sample, init_fn, losses, score, baseline, draw = task(c)
    run, test, train = start(c, "maml"), range(c.test_tasks), range(c.test_tasks, 10**9)

    def collate_fn(numbers):
        # A task is drawn from its number, so it is the same on every mesh and after a resume.
        tasks = [sample(i in test, np.random.default_rng([c.run.seed, i])) for i in numbers]
        return jax.tree.map(lambda *arrays: np.stack(arrays), *tasks)

    def adapt(model, examples):
        """Takes one gradient step on the examples of a task."""
        gradient = eqx.filter_grad(lambda m: jnp.mean(losses(jax.vmap(m)(examples[0]), examples[1])))(model)
        gradient = rc.stop_gradient(gradient) if c.first_order else gradient
        return eqx.apply_updates(model, jax.tree.map(lambda g: -c.inner_rate * g, gradient))

    def outputs_after(steps, model, batch):
        """The outputs for each task's queries after 0, 1, ... gradient steps on the task."""

        def of_task(examples, queries):
            models = it.accumulate(range(steps), lambda m, _: adapt(m, examples), initial=model)
            return [jax.vmap(m)(queries[0]) for m in models]

        return jax.vmap(of_task)(*batch)

    def loss_fn(model, batch, key):
        return jnp.mean(losses(outputs_after(c.inner_steps, model, batch)[-1], batch[1][1]))

    def predict_fn(model, batch, key):
        outputs = jnp.stack(outputs_after(5, model, batch), axis=1)
        return outputs, score(outputs, batch[1][1][:, None])
