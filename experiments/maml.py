"""Learns to learn from few examples by MAML (Finn et al., 2017, arXiv:1703.03400): sinusoids, or
characters of scripts that training has not seen. The tasks of a batch are split over the mesh."""

import itertools as it
from dataclasses import dataclass, field, replace
from typing import Any

import _options
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _common import confidence_95, end_training, make_optimizer, report, start
from _glyphs import read_glyphs
from _options import Maybe, Positive, refuse
from _plots import plot_lines, save_predictions
from sklearn.neighbors import KNeighborsClassifier as KNN

import redcoast as rc

TESTS, TRAIN = range(600), range(600, 10**9)  # the numbers of tasks
SCRIPTS = {"latin": TRAIN, "greek": TRAIN, "cyrillic": TESTS, "armenian": TESTS, "georgian": TESTS}


@dataclass(frozen=True)
class Config:
    glyphs: bool = False  # few-shot classification of characters instead of sinusoids
    ways: int = 5  # number of classes of a task of glyphs
    shots: Maybe[int] = None  # examples to learn from: by default 10, or 1 of each class of glyphs
    queries: int = 5  # test examples of a task, or of each class of glyphs
    first_order: bool = False  # leave out second derivatives, which is cheaper
    inner_steps: int = 1  # gradient steps on a task in training; tests report 0 to 5 of them
    inner_rate: Maybe[float] = None  # learning rate on a task: by default 0.02, or 1 for glyphs
    batch_size: int = 32  # global batch size in tasks
    steps: Maybe[int] = None  # number of training steps: by default 3000, or 300 for glyphs
    learning_rate: Positive = 3e-3  # peak learning rate after the warmup
    run: _options.RunOptions = field(default_factory=_options.Run)


def main(config: Config) -> None:
    c = with_defaults(config)
    count = c.shots  # of a task's examples to learn from
    if c.glyphs:
        count *= c.ways
        sample, init_fn, losses, score, baseline = glyphs(c)
    else:
        sample, init_fn, losses, score, baseline = sinusoids(c)
    run = start(c, "maml")

    def collate_fn(numbers):
        # A task is drawn from its number, so it is the same on every mesh and after a resume.
        tasks = [sample(i in TESTS, np.random.default_rng([c.run.seed, i])) for i in numbers]
        x, y = map(np.stack, zip(*tasks, strict=True))  # (tasks, examples and queries, ...)
        examples = {"x": x[:, :count], "y": y[:, :count]}
        return examples | {"queries": x[:, count:], "answers": y[:, count:]}

    @eqx.filter_vmap(in_axes=(None, None, 0, 0, 0))  # of tasks, after 0, 1, ... gradient steps
    def outputs_after(steps, model, x, y, queries):
        outputs = [jax.vmap(model)(queries)]
        for _ in range(steps):
            gradient = eqx.filter_grad(lambda m: jnp.mean(losses(jax.vmap(m)(x), y)))(model)
            if c.first_order:
                gradient = rc.stop_gradient(gradient)
            model = eqx.apply_updates(model, jax.tree.map(lambda g: -c.inner_rate * g, gradient))
            outputs.append(jax.vmap(model)(queries))
        return jnp.stack(outputs)

    def loss_fn(model, batch, key):
        x, y, queries = batch["x"], batch["y"], batch["queries"]
        outputs = outputs_after(c.inner_steps, model, x, y, queries)  # (tasks, 1 + steps, ...)
        return jnp.mean(losses(outputs[:, -1], batch["answers"]))

    def predict_fn(model, batch, key):
        return outputs_after(5, model, batch["x"], batch["y"], batch["queries"])

    def metric_fn(numbers, outputs):
        answers = collate_fn(numbers)["answers"][:, None]
        scores = np.mean(score(np.stack(outputs), answers), axis=2)  # (tasks, 1 + steps)
        figures = {}
        for i in range(6):
            figures[f"after_{i}_steps"] = float(np.mean(scores[:, i]))
        figures["confidence_95"] = confidence_95(scores[:, min(c.inner_steps, 5)])
        return figures

    state = rc.fit(
        init_fn,
        make_optimizer(c, len(TRAIN)),
        TRAIN,
        collate_fn=collate_fn,
        loss_fn=loss_fn,
        batch_size=c.batch_size,
        steps=c.steps,
        evaluation=rc.Evaluation(
            TESTS, every=max(1, c.steps // 8), predict_fn=predict_fn, metric_fn=metric_fn
        ),
        **run.fit_arguments,
    )
    end_training(run, state, c.steps)
    outputs = rc.predict_examples(
        state.model, TESTS, collate_fn=collate_fn, predict_fn=predict_fn, batch_size=c.batch_size
    )
    tests = collate_fn(TESTS)
    figures = metric_fn(TESTS, outputs)
    simple = float(baseline(**tests))
    lines = {"MAML": (range(6), [*figures.values()][:6]), "baseline": ([0, 5], [simple, simple])}
    plot_lines(run.directory / "scores.png", "gradient steps on the task", "test score", lines)
    # The first task: its examples, which have no predictions, and its queries.
    file, task = run.directory / "samples.png", {name: x[0] for name, x in tests.items()}
    if c.glyphs:
        images = np.vstack([task["x"], task["queries"]]).reshape(-1, 20, 20)
        predicted = outputs[0][min(c.inner_steps, 5)].argmax(axis=-1)
        classes = [*task["y"], *task["answers"]]
        save_predictions(file, images, classes, [*[None] * count, *predicted])
    else:
        queries = task["queries"]
        lines = {"truth": (queries, task["answers"])}
        for i in (0, 1, 5):
            lines[f"after {i} steps"] = (queries, outputs[0][i])
        plot_lines(file, "x", "y", lines)
    report(run.directory, **figures, baseline=simple)


def with_defaults(c: Config) -> Any:
    """The options, with those of sinusoids or of glyphs where none were chosen."""
    defaults = {"shots": 10, "inner_rate": 0.02, "steps": 3000}
    if c.glyphs:
        defaults = {"shots": 1, "inner_rate": 1.0, "steps": 300}
    for name, value in defaults.items():
        if getattr(c, name) is None:
            c = replace(c, **{name: value})
    return c


def sinusoids(c):
    """Tasks are sinusoids of any amplitude from 0.1 to 5 and any phase (section 5.1)."""

    def sample(is_test, rng):
        queries = c.queries
        if is_test:
            queries = 100
        x = rng.uniform(-5, 5, c.shots + queries).astype(np.float32)
        x[c.shots :].sort()  # so that predictions can be drawn as a line
        return x, np.float32(rng.uniform(0.1, 5) * np.sin(x - rng.uniform(0, np.pi)))

    def baseline(x, y, queries, answers):
        """Predicts the mean of a task's examples."""
        return np.mean((answers - y.mean(axis=1, keepdims=True)) ** 2)

    losses = lambda outputs, y: (outputs - y) ** 2
    init_fn = lambda key: eqx.nn.MLP("scalar", "scalar", 64, depth=2, key=key)
    return sample, init_fn, losses, losses, baseline


def glyphs(c):
    """Tasks are characters in several fonts. In training, a turned character is another one."""
    characters, count = {TESTS: [], TRAIN: []}, c.shots + c.queries
    all_glyphs = read_glyphs(20, first_words=[*SCRIPTS])
    for name, fonts in it.groupby(all_glyphs, lambda glyph: glyph.name):
        images = np.stack([glyph.image for glyph in fonts])  # (fonts, 20, 20)
        if len(images) >= count:
            characters[SCRIPTS[name.split()[0]]].append(images)
    if min(map(len, characters.values())) < c.ways:
        refuse(f"There are not {c.ways} characters in {count} fonts. Use fewer --shots.")

    def sample(is_test, rng):
        split = characters[TRAIN]
        if is_test:
            split = characters[TESTS]
        images = [rng.permutation(split[i])[:count] for i in rng.permutation(len(split))[: c.ways]]
        if not is_test:
            images = [np.rot90(x, rng.integers(4), (1, 2)) for x in images]
        images = np.stack(images, axis=1)  # (fonts, ways, 20, 20)
        return images.reshape(-1, 400), np.tile(np.arange(c.ways), count)

    def init_fn(key):
        normed = eqx.nn.Lambda(lambda x: jax.nn.relu(jax.nn.standardize(x)))
        head = jax.tree.map(jnp.zeros_like, eqx.nn.Linear(128, c.ways, key=key))
        return eqx.nn.Sequential([eqx.nn.MLP(400, 128, 256, 1, key=key), normed, head])

    def baseline(x, y, queries, answers):
        """Predicts the class of the nearest example, by pixels."""
        accuracies = []
        for task in range(len(x)):
            nearest = KNN(1).fit(x[task], y[task])
            accuracies.append(nearest.score(queries[task], answers[task]))
        return np.mean(accuracies)

    losses = optax.softmax_cross_entropy_with_integer_labels
    accuracies = lambda outputs, y: outputs.argmax(axis=-1) == y
    return sample, init_fn, losses, accuracies, baseline


if __name__ == "__main__":
    _options.run(main, Config, __doc__)
