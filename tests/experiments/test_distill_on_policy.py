"""On-policy distillation: its loss, and runs."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import redcoast as rc
from redcoast.models import Llama, LlamaConfig

NAME = "distill_on_policy"
SMALL = {"imitation_steps": 2, "teacher_steps": 2, "width": 32, "teacher_width": 32}
SMALL |= {"batch_size": 16, "steps": 3}


@pytest.mark.integration
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(("mesh", "estimate"), [("1", "sampled"), ("2x4", "full")])
def test_a_run_reports_both_accuracies(experiment, config, tmp_path, mesh, estimate):
    experiment.main(config(mesh, estimate=estimate, new_tokens=2))
    (directory,) = tmp_path.iterdir()
    results = json.loads((directory / "results.json").read_text())
    assert results.keys() == {"accuracy", "accuracy_before", "teacher_accuracy"}
    history = rc.read_metrics(directory / "metrics.jsonl")
    assert [x["step"] for x in history] == [1, 2, 3]
    assert all(math.isfinite(x["loss"]) for x in history)


@pytest.mark.thorough
def test_both_estimates_pull_the_student_to_the_teacher(script, experiment, config):
    """Over all tokens as answers, weighted by their probability, the gradients are the same."""
    vocab, width = 5, 2
    sizes = LlamaConfig(vocab, 16, 1, 2, 2, 32, eos=(1,), pad=0)
    student, teacher = (Llama(sizes, key=jax.random.key(i)) for i in range(2))
    prompt = np.array([[2, 3]])
    tokens = np.concatenate([np.repeat(prompt, vocab, 0), np.arange(vocab)[:, None]], axis=1)
    batch = {"tokens": jnp.asarray(tokens, jnp.int32), "real": jnp.ones((vocab, 3), bool)}
    batch |= {"fresh": jnp.ones((vocab, 1), bool), "length": jnp.ones(vocab, jnp.int32)}
    batch |= {"done": jnp.ones(vocab, bool)}
    chances = jax.nn.softmax(student(jnp.asarray(prompt))[0, -1])

    def gradient(estimate, rows):
        part = {name: x[rows] for name, x in batch.items()}
        of = lambda x: experiment.distillation_loss(
            config(estimate=estimate), width, {"student": x, "teacher": teacher}, part, None
        )[0]
        return jax.grad(of)(student).embed

    full = gradient("full", slice(0, 1))
    sampled = sum(chances[i] * gradient("sampled", slice(i, i + 1)) for i in range(vocab))
    np.testing.assert_allclose(sampled, full, atol=1e-5)


def test_a_student_and_a_teacher_are_given_together(experiment, config, capsys):
    with pytest.raises(SystemExit):
        experiment.main(config(weights="smollm2"))
    assert "must be given together" in capsys.readouterr().err
