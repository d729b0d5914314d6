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
from _plots import plot_metric, plt
from _usage import refuse

import redcoast as rc

LETTERS = {"train": ("latin", "greek"), "test": ("cyrillic", "armenian", "georgian")}
# By default: shots, queries, inner_rate and width.
DEFAULTS = {"sinusoids": (10, 10, 0.02, 64), "glyphs": (1, 5, 0.2, 256)}


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
    names = ("shots", "queries", "inner_rate", "width")
    defaults = dict(zip(names, DEFAULTS[c.task], strict=True))
    c = replace(c, **{k: x for k, x in defaults.items() if getattr(c, k) is None})
    sample, init_fn, losses, score, baseline, draw = {"sinusoids": sinusoids, "glyphs": glyphs}[
        c.task
    ](c)
    run = start(c, "maml")
    test, train = range(c.test_tasks), range(c.test_tasks, 10**9)

    def collate_fn(numbers):
        # A task is drawn from its number, so it is the same on every mesh and after a resume.
        tasks = [sample(i in test, np.random.default_rng([c.run.seed, i])) for i in numbers]
        return jax.tree.map(lambda *arrays: np.stack(arrays), *tasks)

    def adapt(model, examples):
        """Takes one gradient step on the examples of a task."""
        x, y = examples
        gradient = eqx.filter_grad(lambda m: jnp.mean(losses(jax.vmap(m)(x), y)))(model)
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
        scores = score(outputs, batch[1][1][:, None])
        return outputs, jnp.mean(scores.reshape(*scores.shape[:2], -1), axis=2)

    def metric_fn(numbers, predicted):
        means = np.mean([scores for _, scores in predicted], axis=0)
        return {f"after_{i}_steps": float(x) for i, x in enumerate(means)}

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
    predicted = rc.predict_examples(state.model, test, **functions, predict_fn=predict_fn)
    scores = np.array([x for _, x in predicted])
    interval = 1.96 * scores.std(axis=0) / np.sqrt(len(scores))  # 95 % confidence
    tasks = [jax.tree.map(lambda x: x[0], collate_fn([i])) for i in test]
    simple = float(np.mean([baseline(*task) for task in tasks]))
    if jax.process_index() == 0:  # as figures 2 and 3 of the paper
        _, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
        draw(left, *tasks[0], predicted[0][0])
        right.errorbar(range(6), scores.mean(axis=0), interval, capsize=3, label="MAML")
        right.axhline(simple, linestyle="--", label=baseline.__name__.replace("_", " "))
        right.set(xlabel="gradient steps on the task", ylabel=score.__name__.replace("_", " "))
        right.legend()
        plt.savefig(run.directory / "adaptation.png", dpi=150)
    figures = {"interval_after_5_steps": float(interval[5]), baseline.__name__: simple}
    report(run.directory, **metric_fn(test, predicted), **figures)


def sinusoids(c):
    """Tasks are sinusoids of any amplitude from 0.1 to 5 and any phase (section 5.1)."""

    def sample(is_test, rng):
        x = rng.uniform(-5, 5, (c.shots + (100 if is_test else c.queries), 1)).astype(np.float32)
        y = (rng.uniform(0.1, 5) * np.sin(x - rng.uniform(0, np.pi))).astype(np.float32)
        return (x[: c.shots], y[: c.shots]), (x[c.shots :], y[c.shots :])

    def squared_error(outputs, y):
        return (outputs - y) ** 2

    def mean_of_the_examples(examples, queries):
        return np.mean((queries[1] - examples[1].mean()) ** 2)

    def draw(axes, examples, queries, outputs):
        order = np.argsort(queries[0][:, 0])
        for steps, y in {"truth": queries[1], **{f"{i} steps": outputs[i] for i in (0, 1, 5)}}.items():
            axes.plot(queries[0][order], y[order], label=steps)
        axes.plot(*examples, "ko")
        axes.legend()

    init_fn = lambda key: eqx.nn.MLP(1, 1, c.width, depth=2, key=key)
    return sample, init_fn, squared_error, squared_error, mean_of_the_examples, draw


def glyphs(c):
    """Tasks are some characters, each in several fonts; tests have letters of other scripts."""
    import os
    AUG = os.environ.get("AUG", "rs")
    NET = os.environ.get("NET", "mlp3")
    drawn, count = {}, c.shots + c.queries
    for glyph in read_glyphs(20, first_words=[*LETTERS["train"], *LETTERS["test"]]):
        drawn.setdefault(glyph.name, []).append(glyph.image)
    characters = {
        split: [np.stack(x) for name, x in drawn.items() if name.split()[0] in words and len(x) >= count]
        for split, words in LETTERS.items()
    }
    print({k: len(v) for k, v in characters.items()})

    def sample(is_test, rng):
        chosen = characters["test" if is_test else "train"]
        chosen = [chosen[i] for i in rng.choice(len(chosen), c.ways, False)]
        images = np.stack([rng.permutation(x)[:count] for x in chosen])
        if not is_test and "r" in AUG:
            images = np.stack([np.rot90(x, rng.integers(4), (1, 2)) for x in images])
        if not is_test and "s" in AUG:
            images = np.stack([[np.roll(y, rng.integers(-1, 2, 2), (0, 1)) for y in x] for x in images])
        labels = np.repeat(np.arange(c.ways), count).reshape(c.ways, count)
        parts = np.s_[:, : c.shots], np.s_[:, c.shots :]
        return tuple((images[i].reshape(-1, 400), labels[i].ravel()) for i in parts)

    def accuracy(logits, y):
        return jnp.argmax(logits, axis=-1) == y

    def nearest_neighbour(examples, queries):
        distances = np.sum((queries[0][:, None] - examples[0][None]) ** 2, axis=2)
        return np.mean(examples[1][np.argmin(distances, axis=1)] == queries[1])

    def draw(axes, examples, queries, outputs):
        axes.axis("off")

    def init_fn(key):
        if NET.startswith("mlp"):
            m = eqx.nn.MLP(400, c.ways, c.width, depth=int(NET[3]), key=key)
            z = lambda m: (m.layers[-1].weight, m.layers[-1].bias)
        else:
            m = Patches(c, NET, key)
            z = lambda m: (m.layers[-1].weight, m.layers[-1].bias)
        return eqx.tree_at(z, m, jax.tree.map(jnp.zeros_like, z(m))) if "z" in NET else m
    losses = optax.softmax_cross_entropy_with_integer_labels
    return sample, init_fn, losses, accuracy, nearest_neighbour, draw


class Patches(eqx.Module):
    """Two strided convolutions, written as linear layers of patches, and a linear head."""

    layers: list
    norm: bool = eqx.field(static=True)

    def __init__(self, c, net, key):
        w = int(net.split("-")[1])
        self.norm = "N" in net
        ks = jax.random.split(key, 3)
        L = eqx.nn.Linear
        self.layers = [L(64, w, key=ks[0]), L(4 * w, 2 * w, key=ks[1]), L(4 * 2 * w, c.ways, key=ks[2])]

    def __call__(self, x):
        x = x.reshape(20, 20)
        # overlapping 8x8 patches with stride 4
        p = jnp.stack([x[i:i + 8, j:j + 8].reshape(64) for i in range(0, 13, 4) for j in range(0, 13, 4)])
        def act(h):
            if self.norm:
                h = h - h.mean(-1, keepdims=True)
                h = h * jax.lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-3)
            return jax.nn.relu(h)
        h = act(jax.vmap(self.layers[0])(p))
        w = h.shape[1]
        h = h.reshape(2, 2, 2, 2, w).transpose(0, 2, 1, 3, 4).reshape(4, 4 * w)
        h = act(jax.vmap(self.layers[1])(h))
        return self.layers[2](h.reshape(-1))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
