"""The loss and the labels of the experiment with distillation."""

import json
import math
import types

import equinox as eqx
import jax
import numpy as np
import pytest
from PIL import Image
from scipy.special import log_softmax, softmax
from scipy.stats import entropy

import redcoast as rc


@pytest.fixture
def config(script, tmp_path):
    # The batch divides the 360 images of the evaluation, which saves compilations.
    small = {"teacher_width": 16, "width": 8, "batch_size": 40, "steps": 2}

    def make(mesh="2x4", **options):
        run = script("_options").Run(mesh=mesh, directory=tmp_path)
        return script("distillation").Config(**small | options, run=run)

    return make


@pytest.mark.seconds(10)  # a whole run
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("mesh", ["1", pytest.param("2x4", marks=pytest.mark.integration)])
@pytest.mark.thorough
def test_a_run_compares_three_networks(mesh, script, config, tmp_path):
    script("distillation").main(config(mesh))
    (directory,) = tmp_path.iterdir()
    results = json.loads((directory / "results.json").read_text())
    names = {"student_accuracy", "plain_accuracy", "teacher_accuracy", "gain"}
    assert results.keys() == names
    assert all(math.isfinite(x) for x in results.values())
    for path in ("loss.png", "teacher.png"):
        with Image.open(directory / path) as picture:
            picture.verify()
    history = rc.read_metrics(directory / "metrics.jsonl")
    assert history[-1]["eval/accuracy"] == results["student_accuracy"]


@pytest.fixture
def fits(script, config, monkeypatch):
    """The arguments of the calls of `fit`: of the teacher, the plain student and the distilled."""
    seen = []

    def fit(model, optimizer, examples, **options):
        seen.append({"model": model, "examples": examples} | options)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return types.SimpleNamespace(model=model, step=options["steps"])

    monkeypatch.setattr(rc, "fit", fit)
    with pytest.raises(KeyboardInterrupt):
        script("distillation").main(config(labels=50, temperature=3.0, weight=0.7))
    return seen


@pytest.mark.thorough
def test_students_see_the_same_few_labels(fits):
    teacher, plain, distilled = (fit["examples"] for fit in fits)
    assert len(teacher) == len(plain) == len(distilled) == 1437
    known = {id(x): y for x, y in distilled if y >= 0}
    assert len(known) == 50
    assert {id(x): y for x, y in plain} == known
    assert known.items() <= {id(x): y for x, y in teacher}.items()
    assert fits[2]["trainable"] == {"student": True, "teacher": False}
    assert eqx.tree_equal(fits[2]["model"]["student"], fits[1]["model"])


@pytest.mark.thorough
def test_the_loss_is_that_of_hinton(fits):
    model, examples = fits[2]["model"], fits[2]["examples"][46:54]
    batch = fits[2]["collate_fn"](examples)
    student, teacher = (
        np.asarray(jax.vmap(model[name])(batch["images"])) for name in ("student", "teacher")
    )
    divergences = entropy(softmax(teacher / 3, axis=1), softmax(student / 3, axis=1), axis=1)
    surprises = [
        -log_softmax(x)[y] * (y >= 0) for x, y in zip(student, batch["labels"], strict=True)
    ]
    expected = 0.7 * 9 * np.mean(divergences) + 0.3 * np.mean(surprises)
    actual = fits[2]["loss_fn"](model, batch, None)
    assert float(actual) == pytest.approx(expected, rel=1e-4)
