"""Learns to learn from few examples (MAML, Finn et al. 2017): sinusoids, or classes of glyphs."""

import itertools as it
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from _common import Run, exit_if_stopped, make_optimizer, report, start
from _glyphs import FONTS, read_glyphs
from _plots import plot_metric, plt

import redcoast as rc

WRITING = {"train": ("latin", "greek"), "test": ("cyrillic", "armenian", "georgian")}
MOST = 5  # the number of gradient steps on a task of the test


@dataclass(frozen=True)
class Config:
    task: Literal["sinusoids", "glyphs"] = "sinusoids"  # regression, or few-shot classification
    ways: int = 5  # number of classes of a task, for glyphs
    shots: int = 10  # number of examples to learn from (of each class: 1 or 5 are usual for glyphs)
    queries: int = 10  # number of other examples of the task (of each class)
    first_order: bool = False  # leave out second derivatives, which is cheaper
    inner_steps: int = 1  # number of gradient steps on a task in training
    inner_rate: float = 0.02  # learning rate of these steps (0.4 for glyphs)
    width: int = 64  # hidden size of the regression; number of channels for glyphs
    test_tasks: int = 600  # number of held-out tasks
    batch_size: int = 32  # global batch size in tasks
    steps: int = 4000  # number of training steps
    learning_rate: float = 3e-3  # peak learning rate after the warmup
    run: tyro.conf.OmitArgPrefixes[Run] = field(default_factory=Run)


class Tasks(NamedTuple):
    """What differs between the two kinds of tasks. Examples are pairs of arrays `x` and `y`."""

    make_model: Callable[[jax.Array], Any]
    sample: Callable[[str, np.random.Generator], Any]  # examples to learn from, and others
    loss: Callable[[jax.Array, jax.Array], jax.Array]  # of predictions and y
    score: Callable[[jax.Array, jax.Array], jax.Array]  # squared error, or accuracy
    baseline: Callable[[Any, Any], float]  # the score of a simple method


def main(c: Config) -> None:
    run = start(c, "maml")
    tasks = sinusoids(c) if c.task == "sinusoids" else glyphs(c)
    train = [("train", i) for i in range(c.steps * c.batch_size)]
    test = [("test", len(train) + i) for i in range(c.test_tasks)]

    def sample(name):
        # A task is drawn from its name, so it is the same on every mesh and after a resume.
        split, number = name
        return tasks.sample(split, np.random.default_rng([c.run.seed, number]))

    def collate_fn(names):
        return jax.tree.map(lambda *arrays: np.stack(arrays), *map(sample, names))

    def adapt(model, examples):
        """Takes one gradient step on the examples of a task."""
        x, y = examples
        gradient = eqx.filter_grad(lambda m: tasks.loss(jax.vmap(m)(x), y))(model)
        gradient = rc.stop_gradient(gradient) if c.first_order else gradient
        return eqx.apply_updates(model, jax.tree.map(lambda g: -c.inner_rate * g, gradient))

    def after(steps, measure, model, batch):
        """The measure of each task's other examples, after 0, 1, ... gradient steps on the task."""

        def of_task(examples, others):
            x, y = others
            models = it.accumulate(range(steps), lambda m, _: adapt(m, examples), initial=model)
            return jnp.stack([measure(jax.vmap(m)(x), y) for m in models])

        return jax.vmap(of_task)(*batch)

    def loss_fn(model, batch, key):
        return jnp.mean(after(c.inner_steps, tasks.loss, model, batch)[:, -1])

    def predict_fn(model, batch, key):
        return after(MOST, tasks.score, model, batch)

    def metric_fn(names, scores):
        return {f"after_{i}_steps": x for i, x in enumerate(np.mean(scores, axis=0))}

    functions = {"collate_fn": collate_fn, "batch_size": c.batch_size}
    every, metrics = max(1, c.steps // 8), {"predict_fn": predict_fn, "metric_fn": metric_fn}
    state = rc.fit(
        tasks.make_model,
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
    baseline = np.mean([tasks.baseline(*sample(name)) for name in test])
    half = 1.96 * scores.std(axis=0) / np.sqrt(len(scores))  # of the 95 % confidence interval
    plot_scores(run.directory / "scores.png", scores.mean(axis=0), half, baseline, c)
    figures = metric_fn(test, scores) | {"ci95": half[-1], "baseline": baseline}
    report(run.directory, **{name: float(x) for name, x in figures.items()})


def sinusoids(c: Config) -> Tasks:
    """Regression of a sinusoid of any amplitude from 0.1 to 5 and any phase (section 5.1)."""

    def sample(split, rng):
        amplitude, phase = rng.uniform(0.1, 5), rng.uniform(0, np.pi)
        x = rng.uniform(-5, 5, (c.shots + c.queries, 1)).astype(np.float32)
        y = (amplitude * np.sin(x - phase)).astype(np.float32)
        return (x[: c.shots], y[: c.shots]), (x[c.shots :], y[c.shots :])

    make_model = lambda key: eqx.nn.MLP(1, 1, c.width, depth=2, key=key)
    squared = lambda predicted, y: jnp.mean((predicted - y) ** 2)
    mean_of = lambda examples, others: np.mean((others[1] - examples[1].mean()) ** 2)
    return Tasks(make_model, sample, squared, squared, mean_of)


def glyphs(c: Config) -> Tasks:
    """Classification of characters, each drawn by several fonts; tests are of other scripts."""
    fonts = [font for font in FONTS if font.startswith("DejaVu")]
    words = [*WRITING["train"], *WRITING["test"]]  # read at once, so that look-alikes are left out
    drawn: dict[str, list[np.ndarray]] = {}
    for glyph in read_glyphs(20, first_words=words, fonts=fonts):
        drawn.setdefault(glyph.name, []).append(glyph.image[None])
    enough = {name: np.stack(x) for name, x in drawn.items() if len(x) >= c.shots + c.queries}
    of_split = {
        split: np.array([name for name in enough if name.split()[0] in first])
        for split, first in WRITING.items()
    }
    if min(map(len, of_split.values())) < c.ways:
        raise SystemExit(f"No character has {c.shots + c.queries} fonts. Use fewer --queries.")

    def sample(split, rng):
        classes = rng.choice(of_split[split], c.ways, replace=False)
        images = np.stack([rng.permutation(enough[x])[: c.shots + c.queries] for x in classes])
        labels = np.broadcast_to(np.arange(c.ways)[:, None], images.shape[:2])
        flat = lambda x: x.reshape(-1, *x.shape[2:])
        cut = lambda part: (flat(images[:, part]), flat(labels[:, part]))
        return cut(slice(c.shots)), cut(slice(c.shots, None))

    def make_model(key):
        # Layers without convolutions, as in section 5.2: with the weights of each task its own,
        # convolutions are slow on CPUs.
        sizes = [400, 4 * c.width, 2 * c.width, c.width, c.ways]
        keys = jax.random.split(key, len(sizes) - 1)
        layers = [eqx.nn.Lambda(jnp.ravel)]
        for m, n, k in zip(sizes[:-1], sizes[1:], keys, strict=True):
            layers += [eqx.nn.Linear(m, n, key=k), eqx.nn.LayerNorm(n), eqx.nn.Lambda(jax.nn.relu)]
        return eqx.nn.Sequential(layers[:-2])

    def nearest(examples, others):
        (x, y), (new, expected) = examples, others
        distances = np.sum((new[:, None] - x[None]) ** 2, axis=(2, 3, 4))
        return np.mean(y[np.argmin(distances, axis=1)] == expected)

    entropy = optax.softmax_cross_entropy_with_integer_labels
    loss = lambda logits, y: jnp.mean(entropy(logits, y))
    accuracy = lambda logits, y: jnp.mean(jnp.argmax(logits, axis=1) == y)
    return Tasks(make_model, sample, loss, accuracy, nearest)


def plot_scores(file, mean: np.ndarray, half: np.ndarray, baseline: float, c: Config) -> None:
    """Plots the score after each gradient step, as figures 2 and 3 of the paper do."""
    figure, axes = plt.subplots()
    axes.errorbar(range(len(mean)), mean, half, capsize=3, label="MAML, 95 % confidence")
    name = "mean of the examples" if c.task == "sinusoids" else "nearest neighbour"
    axes.axhline(baseline, linestyle="--", color="gray", label=name)
    score = "mean squared error" if c.task == "sinusoids" else "accuracy"
    axes.set(xlabel="gradient steps on the task", ylabel=score)
    axes.legend()
    figure.savefig(file, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
