"""Meta-gradients, tasks and the baseline of the experiment with MAML."""

import collections
import itertools as it
import json
import math
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from PIL import Image

import redcoast as rc

NAME = "maml"
SMALL = {"batch_size": 8, "steps": 2, "queries": 1}


@pytest.fixture
def experiment(script, monkeypatch):
    """The script, with the letters of two scripts in two fonts."""
    maml = script("maml")
    few = lambda size, first_words: script("_glyphs").read_glyphs(
        size, first_words=["greek", "armenian"], fonts=["DejaVuSans", "DejaVuSans-Bold"]
    )
    monkeypatch.setattr(maml, "read_glyphs", few)
    return maml


@pytest.mark.integration  # a whole run
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("mesh", "glyphs"),
    [("1", False), ("2x4", False), ("2x4", True)],
)
def test_a_run_reports_scores_after_each_step(
    experiment, config, tmp_path, monkeypatch, mesh, glyphs
):
    monkeypatch.setattr(experiment, "TESTS", few := range(40))
    scripts = experiment.SCRIPTS.items()
    changed = {name: few if actual == range(600) else actual for name, actual in scripts}
    monkeypatch.setattr(experiment, "SCRIPTS", changed)
    experiment.main(config(mesh, glyphs=glyphs))
    (directory,) = tmp_path.iterdir()
    results = json.loads((directory / "results.json").read_text())
    after = {f"after_{i}_steps" for i in range(6)}
    assert results.keys() == after | {"confidence_95", "baseline"}
    assert all(math.isfinite(x) for x in results.values())
    last = rc.read_metrics(directory / "metrics.jsonl")[-1]
    for name in after:
        assert last[f"eval/{name}"] == pytest.approx(results[name], rel=1e-4)
    for path in ["loss.png", "scores.png", "samples.png"]:
        with Image.open(directory / path) as picture:
            picture.verify()


@pytest.fixture
def fit(experiment, config, monkeypatch):
    """The arguments with which the script calls `rc.fit`."""

    def arguments(**options):
        seen = []

        def fit(model, optimizer, examples, **options):
            seen.append({"model": model, "examples": examples} | options)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(rc, "fit", fit)
            with pytest.raises(KeyboardInterrupt):
                experiment.main(config(**options))
        return seen[0]

    return arguments


@pytest.mark.thorough
@pytest.mark.parametrize("first_order", [False, True])
@pytest.mark.parametrize("inner_steps", [1, 3])
def test_the_gradient_is_that_through_the_gradient_steps(fit, first_order, inner_steps):
    # Of a line, whose loss is quadratic, so its Hessian is a constant of the examples.
    options = {"first_order": first_order, "inner_steps": inner_steps, "inner_rate": 0.01}
    actual = fit(queries=5, **options)
    model: Any = eqx.nn.Linear("scalar", "scalar", key=jax.random.key(0))
    start = np.array([float(model.weight[0, 0]), float(model.bias[0])])
    batch = actual["collate_fn"](range(600, 604))
    losses, gradients = [], []
    for x, y, queries, truth in zip(*batch.values(), strict=True):
        inputs, others = (np.stack([v, np.ones_like(v)], axis=1) for v in (x, queries))
        hessian = 2 * inputs.T @ inputs / len(x)
        weights = start
        for _ in range(inner_steps):
            weights = weights - 0.01 * 2 * inputs.T @ (inputs @ weights - y) / len(x)
        error = others @ weights - truth
        gradient = 2 * others.T @ error / len(truth)
        through = np.linalg.matrix_power(np.eye(2) - 0.01 * hessian, inner_steps)
        losses.append(np.mean(error**2))
        gradients.append(gradient if first_order else through @ gradient)
    loss, gradient = eqx.filter_value_and_grad(actual["loss_fn"])(model, batch, None)
    assert float(loss) == pytest.approx(np.mean(losses), rel=1e-4)
    weight, bias = float(gradient.weight[0, 0]), float(gradient.bias[0])
    np.testing.assert_allclose([weight, bias], np.mean(gradients, axis=0), rtol=1e-4)


def test_a_sinusoid_is_the_same_for_examples_and_queries(fit):
    actual = fit(queries=20)
    for numbers, count in ((range(600, 620), 20), (range(20), 100)):
        x, y, queries, truth = actual["collate_fn"](numbers).values()
        assert x.shape == y.shape == (20, 10)
        assert queries.shape == truth.shape == (20, count)
        all_x, all_y = np.concatenate([x, queries], axis=1), np.concatenate([y, truth], axis=1)
        assert np.abs(all_x).max() <= 5
        for x, y in zip(all_x, all_y, strict=True):
            waves = np.stack([np.sin(x), np.cos(x)], axis=1)
            (a, b), *_ = np.linalg.lstsq(waves, y)
            np.testing.assert_allclose(waves @ [a, b], y, atol=1e-4)
            assert 0.1 <= math.hypot(a, b) <= 5
            assert b <= 1e-4  # a phase of 0 to pi


@pytest.mark.thorough
def test_characters_of_tests_are_of_other_scripts_and_upright(experiment, fit):
    actual = fit(glyphs=True, ways=4)
    turns = {"greek": range(4), "armenian": range(1)}
    known = collections.defaultdict(set)  # some fonts draw the same, and some turns look the same
    for glyph in experiment.read_glyphs(20, first_words=[]):
        for turn in turns[glyph.name.split()[0]]:
            image = np.rot90(glyph.image, turn).tobytes()
            known[image].add((glyph.name, turn, glyph.font))
    for numbers, script in ((range(100), "armenian"), (range(600, 700), "greek")):
        x, y, queries, truth = actual["collate_fn"](numbers).values()
        assert {*map(tuple, y), *map(tuple, truth)} == {(0, 1, 2, 3)}
        seen = set()
        for example, query in zip(x.reshape(-1, 400), queries.reshape(-1, 400), strict=True):
            pairs = it.product(*(known[image.tobytes()] for image in (example, query)))
            # The same character, turned alike, in another font.
            alike = {a for a, b in pairs if a[:2] == b[:2] and a[2] != b[2]}
            assert alike
            assert all(name.startswith(script) for name, _, _ in alike)
            seen |= alike
        assert {turn for _, turn, _ in seen} == {*turns[script]}


@pytest.mark.thorough
def test_the_baseline_takes_the_nearest_example(experiment, config):
    *_, baseline = experiment.glyphs(config(glyphs=True, shots=1))
    rng = np.random.default_rng(0)
    x, queries = rng.normal(size=(7, 6, 400)), rng.normal(size=(7, 9, 400))
    y, truth = rng.integers(3, size=(7, 6)), rng.integers(3, size=(7, 9))
    right = [
        y[t, min(range(6), key=lambda i: math.dist(x[t, i], queries[t, j]))] == truth[t, j]
        for t in range(7)
        for j in range(9)
    ]
    assert baseline(x, y, queries, truth) == pytest.approx(np.mean(right))


@pytest.mark.parametrize("options", [{"shots": 2}, {"ways": 500}])
def test_tasks_of_more_images_than_there_are_are_refused(experiment, config, options, refused):
    with refused("Use fewer --shots."):
        experiment.main(config(glyphs=True, **options))
