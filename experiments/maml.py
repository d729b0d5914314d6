"""Learns to learn from few examples by MAML (Finn et al., 2017, arXiv:1703.03400): sinusoids, or
characters of scripts that training has not seen. The tasks of a batch are split over the mesh."""

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
from _plots import plot_lines, plot_metric
from _usage import refuse

import redcoast as rc

TESTS, TRAIN = range(600), range(600, 10**9)  # the numbers of tasks
SCRIPTS = {"latin": TRAIN, "greek": TRAIN, "cyrillic": TESTS, "armenian": TESTS, "georgian": TESTS}
DEFAULTS = {"sinusoids": (10, 0.02, 3000), "glyphs": (1, 1.0, 600)}  # shots, inner_rate, steps


@dataclass(frozen=True)
class Config:
    task: Literal["sinusoids", "glyphs"] = "sinusoids"  # regression, or few-shot classification
    ways: int = 5  # number of classes of a task of glyphs
    shots: int | None = None  # examples to learn from: by default 10, or 1 of each class of glyphs
    queries: int = 5  # number of other examples of a task to be judged by (of each class)
    first_order: bool = False  # leave out second derivatives, which is cheaper
    inner_steps: int = 1  # number of gradient steps on a task in training; tests take 0 to 5
    inner_rate: float | None = None  # learning rate of these: by default 0.02, or 1 for glyphs
    width: int = 64  # width of the layers
    batch_size: int = 32  # global batch size in tasks
    steps: int | None = None  # number of training steps: by default 3000, or 600 for glyphs
    learning_rate: float = 3e-3  # peak learning rate after the warmup
    run: tyro.conf.OmitArgPrefixes[Run] = field(default_factory=Run)


def main(c: Config) -> None:
    defaults = zip(("shots", "inner_rate", "steps"), DEFAULTS[c.task], strict=True)
    c = replace(c, **{name: x for name, x in defaults if getattr(c, name) is None})
    sample, init_fn, losses, score, baseline = globals()[c.task](c)
    run, count = start(c, "maml"), c.shots * (c.ways if c.task == "glyphs" else 1)

    def collate_fn(numbers):
        # A task is drawn from its number, so it is the same on every mesh and after a resume.
        tasks = [sample(i in TESTS, np.random.default_rng([c.run.seed, i])) for i in numbers]
        x, y = (np.stack(arrays) for arrays in zip(*tasks, strict=True))
        return x[:, :count], y[:, :count], x[:, count:], y[:, count:]

    def outputs_after(steps, model, batch):
        """The outputs for each task's queries after 0, 1, ... gradient steps on its examples."""

        def of_task(x, y, queries, adapted=model):
            outputs = [jax.vmap(adapted)(queries)]
            for _ in range(steps):
                gradient = eqx.filter_grad(lambda m: jnp.mean(losses(jax.vmap(m)(x), y)))(adapted)
                gradient = rc.stop_gradient(gradient) if c.first_order else gradient
                update = jax.tree.map(lambda g: -c.inner_rate * g, gradient)
                adapted = eqx.apply_updates(adapted, update)
                outputs.append(jax.vmap(adapted)(queries))
            return jnp.stack(outputs)

        return jax.vmap(of_task)(*batch[:3])

    def loss_fn(model, batch, key):
        return jnp.mean(losses(outputs_after(c.inner_steps, model, batch)[:, -1], batch[3]))

    def predict_fn(model, batch, key):
        outputs = outputs_after(5, model, batch)
        return jnp.mean(score(outputs, batch[3][:, None]), axis=2), outputs

    def metric_fn(numbers, predicted):
        means = np.mean([scores for scores, _ in predicted], axis=0)
        return {f"after_{i}_steps": x for i, x in enumerate(means.tolist())}

    functions = {"collate_fn": collate_fn, "predict_fn": predict_fn, "batch_size": c.batch_size}
    evaluation = rc.Evaluation(TESTS, every=max(1, c.steps // 8), metric_fn=metric_fn, **functions)
    options = run.fit_arguments | {"evaluation": evaluation, "collate_fn": collate_fn}
    options |= {"loss_fn": loss_fn, "batch_size": c.batch_size, "steps": c.steps}
    state = rc.fit(init_fn, make_optimizer(c, len(TRAIN)), TRAIN, **options)

    exit_if_stopped(int(state.step), c.steps)
    plot_metric(run.directory, "loss")
    predicted = rc.predict_examples(state.model, TESTS, **functions)
    scores, tests = np.array([scores for scores, _ in predicted]), collate_fn(TESTS)
    interval, simple = 1.96 * scores.std(axis=0) / np.sqrt(len(scores)), baseline(*tests)  # 95 %
    lines = {"MAML": (range(6), scores.mean(axis=0), interval), "baseline": ([0, 5], [simple] * 2)}
    plot_lines(run.directory / "scores.png", "gradient steps on the task", "test score", lines)
    if c.task == "sinusoids":
        names = {0: "before adaptation", 1: "after 1 step", 5: "after 5 steps"}
        lines = {name: (tests[2][0], predicted[0][1][i]) for i, name in names.items()}
        plot_lines(run.directory / "samples.png", "x", "y", lines)
    figures = {"interval": float(interval[c.inner_steps]), "baseline": float(simple)}
    report(run.directory, **metric_fn(TESTS, predicted), **figures)


def sinusoids(c):
    """Tasks are sinusoids of any amplitude from 0.1 to 5 and any phase (section 5.1)."""

    def sample(is_test, rng):
        x = rng.uniform(-5, 5, c.shots + (100 if is_test else c.queries)).astype(np.float32)
        x[c.shots :].sort()  # so that predictions can be drawn as a line
        y = rng.uniform(0.1, 5) * np.sin(x - rng.uniform(0, np.pi))
        return x, np.float32(y)

    losses = lambda outputs, y: (outputs - y) ** 2
    mean_of_the_examples = lambda _, y, __, truth: np.mean((truth - y.mean(1, keepdims=True)) ** 2)
    init_fn = lambda key: eqx.nn.MLP("scalar", "scalar", c.width, depth=2, key=key)
    return sample, init_fn, losses, losses, mean_of_the_examples


def glyphs(c):
    """Tasks are some characters in several fonts. Images are the pixels of 16 patches in turn."""
    characters, count = {TESTS: [], TRAIN: []}, c.shots + c.queries
    for name, found in it.groupby(read_glyphs(20, first_words=[*SCRIPTS]), lambda x: x.name):
        images = np.stack([x.image for x in found])
        characters[SCRIPTS[name.split()[0]]] += [images] if len(images) >= count else []
    if min(map(len, characters.values())) < c.ways:
        refuse(f"There are not {c.ways} characters in {count} fonts. Use fewer --shots or --ways.")

    def sample(is_test, rng):
        split = characters[TESTS if is_test else TRAIN]
        chosen = rng.permuted(np.arange(len(split)))[: c.ways]
        images = [rng.permutation(split[i])[:count] for i in chosen]
        if not is_test:  # a rotated character is a further class
            images = [np.rot90(x, rng.integers(4), (1, 2)) for x in images]
        patches = np.stack(images, axis=1).reshape(-1, 4, 5, 4, 5).swapaxes(2, 3)
        return patches.reshape(-1, 400), np.tile(np.arange(c.ways), count)

    def nearest_neighbour(x, y, queries, truth):
        nearest = np.argmax(queries @ x.mT - np.sum(x**2, axis=2)[:, None] / 2, axis=2)
        return np.mean(np.take_along_axis(y, nearest, axis=1) == truth)

    def init_fn(key):
        linear = lambda *sizes: eqx.nn.Linear(*sizes, key=jax.random.fold_in(key, sizes[0]))
        normed = eqx.nn.Lambda(lambda x: jax.nn.relu(jax.nn.standardize(x)))
        of_patches = eqx.filter_vmap(linear(25, c.width))
        first = eqx.nn.Lambda(lambda x: of_patches(x.reshape(16, 25)))
    accuracy = lambda logits, y: jnp.argmax(logits, axis=-1) == y
    losses = optax.softmax_cross_entropy_with_integer_labels
    return sample, init_fn, losses, accuracy, nearest_neighbour


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
