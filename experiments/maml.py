"""Learns to learn from few examples (MAML, Finn et al., 2017): sinusoids, or classes of glyphs."""

import itertools as it
from dataclasses import dataclass, field
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from _common import Run, exit_if_stopped, make_optimizer, report, start
from _glyphs import read_glyphs
from _plots import plot_metric, plt

import redcoast as rc

LETTERS = {"train": ("latin", "greek"), "test": ("cyrillic", "armenian", "georgian")}


@dataclass(frozen=True)
class Config:
    task: Literal["sinusoids", "glyphs"] = "sinusoids"  # regression, or few-shot classification
    ways: int = 5  # number of classes of a task, for glyphs
    shots: int = 10  # number of examples to learn from (of each class: 1 or 5 are usual for glyphs)
    queries: int = 10  # number of other examples of the task (of each class)
    first_order: bool = False  # leave out second derivatives, which is cheaper
    inner_steps: int = 1  # number of gradient steps on a task in training; tests take 0 to 5
    inner_rate: float = 0.02  # learning rate of these steps (0.1 for glyphs)
    width: int = 64  # width of the hidden layers (256 for glyphs)
    test_tasks: int = 600  # number of held-out tasks
    batch_size: int = 32  # global batch size in tasks
    steps: int = 3000  # number of training steps
    learning_rate: float = 3e-3  # peak learning rate after the warmup
    run: tyro.conf.OmitArgPrefixes[Run] = field(default_factory=Run)


def main(c: Config) -> None:
    run = start(c, "maml")
    sample, init_fn, losses, score, baseline = (sinusoids if c.task == "sinusoids" else glyphs)(c)
    train = [("train", i) for i in range(c.steps * c.batch_size)]
    test = [("test", len(train) + i) for i in range(c.test_tasks)]

    def collate_fn(names):
        # A task is drawn from its name, so it is the same on every mesh and after a resume.
        tasks = [sample(split, np.random.default_rng([c.run.seed, i])) for split, i in names]
        return jax.tree.map(lambda *arrays: np.stack(arrays), *tasks)

    def adapt(model, examples):
        """Takes one gradient step on the examples of a task."""
        x, y = examples
        gradient = eqx.filter_grad(lambda m: jnp.mean(losses(jax.vmap(m)(x), y)))(model)
        gradient = rc.stop_gradient(gradient) if c.first_order else gradient
        return eqx.apply_updates(model, jax.tree.map(lambda g: -c.inner_rate * g, gradient))

    def after(steps, measure, model, batch):
        """Measures each task's other examples after 0, 1, ... gradient steps on the task."""

        def of_task(examples, others):
            models = it.accumulate(range(steps), lambda m, _: adapt(m, examples), initial=model)
            return jnp.stack([jnp.mean(measure(jax.vmap(m)(others[0]), others[1])) for m in models])

        return jax.vmap(of_task)(*batch)

    def loss_fn(model, batch, key):
        return jnp.mean(after(c.inner_steps, losses, model, batch)[:, -1])

    def predict_fn(model, batch, key):
        return after(5, score, model, batch)

    def metric_fn(names, scores):
        return {f"after_{i}_steps": float(x) for i, x in enumerate(np.mean(scores, axis=0))}

    functions = {"collate_fn": collate_fn, "batch_size": c.batch_size}
    every, metrics = max(1, c.steps // 8), {"predict_fn": predict_fn, "metric_fn": metric_fn}
    state = rc.fit(
        init_fn,
        make_optimizer(c, len(train)),
        train,
        **functions,
        loss_fn=loss_fn,
        steps=c.steps,
        evaluation=rc.Evaluation(test, every=every, **metrics),
        **run.fit_arguments,
    )

    exit_if_stopped(int(state.step), c.steps)
    plot_metric(run.directory, "loss")
    scores = np.array(rc.predict_examples(state.model, test, **functions, predict_fn=predict_fn))
    interval = 1.96 * scores.std(axis=0) / np.sqrt(len(scores))  # 95 % confidence
    simple = float(
        np.mean([baseline(*jax.tree.map(lambda x: x[0], collate_fn([x]))) for x in test])
    )
    if jax.process_index() == 0:  # as figures 2 and 3 of the paper
        axes = plt.figure().add_subplot(xlabel="gradient steps on the task", ylabel=score.__name__)
        axes.errorbar(range(6), scores.mean(axis=0), interval, capsize=3, label="MAML")
        axes.axhline(simple, linestyle="--", label=baseline.__name__.replace("_", " "))
        axes.legend()
        plt.savefig(run.directory / "scores.png", dpi=150)
    figures = {"interval_after_5_steps": float(interval[5]), baseline.__name__: simple}
    report(run.directory, **metric_fn(test, scores), **figures)


def sinusoids(c):
    """Tasks are sinusoids of any amplitude from 0.1 to 5 and any phase (section 5.1)."""

    def sample(split, rng):
        x = rng.uniform(-5, 5, (c.shots + c.queries, 1)).astype(np.float32)
        y = (rng.uniform(0.1, 5) * np.sin(x - rng.uniform(0, np.pi))).astype(np.float32)
        return (x[: c.shots], y[: c.shots]), (x[c.shots :], y[c.shots :])

    def squared_error(predicted, y):
        return (predicted - y) ** 2

    def mean_of_the_examples(examples, others):
        return np.mean((others[1] - examples[1].mean()) ** 2)

    init_fn = lambda key: eqx.nn.MLP(1, 1, c.width, depth=2, key=key)
    return sample, init_fn, squared_error, squared_error, mean_of_the_examples


def glyphs(c):
    """Tasks are some characters, each in several fonts; tests have letters of other scripts."""
    drawn, count = {}, c.shots + c.queries
    for glyph in read_glyphs(20, first_words=[*LETTERS["train"], *LETTERS["test"]]):
        drawn.setdefault(glyph.name, []).append(glyph.image.ravel())
    enough = {name: np.stack(images) for name, images in drawn.items() if len(images) >= count}

    def sample(split, rng):
        names = [name for name in enough if name.split()[0] in LETTERS[split]]
        images = [rng.permutation(enough[x])[:count] for x in rng.choice(names, c.ways, False)]
        labels = np.repeat(np.arange(c.ways), count).reshape(c.ways, count)
        parts = np.s_[:, : c.shots], np.s_[:, c.shots :]
        return tuple((np.stack(images)[i].reshape(-1, 400), labels[i].ravel()) for i in parts)

    def accuracy(logits, y):
        return jnp.argmax(logits, axis=1) == y

    def nearest_neighbour(examples, others):
        distances = np.sum((others[0][:, None] - examples[0][None]) ** 2, axis=2)
        return np.mean(examples[1][np.argmin(distances, axis=1)] == others[1])

    init_fn = lambda key: eqx.nn.MLP(400, c.ways, c.width, depth=3, key=key)
    losses = optax.softmax_cross_entropy_with_integer_labels
    return sample, init_fn, losses, accuracy, nearest_neighbour


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
