"""Post-training of a model in Hugging Face's layout, with a tokenizer and a chat template: what
`--weights smollm2` does, with a small model that is not downloaded."""

import json
import math

import pytest
from serve_helpers import write_weights

import redcoast as rc

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("short")]
RUN = {"test_problems": 4, "steps": 2}
ANSWERS = {"max_tokens": 6, "new_tokens": 3}
SAMPLES = {"prompts": 2, "samples": 4}
PAIRS = [
    {"prompt": f"Häufig: {i}?", "chosen": "ja, öfter " * (i + 1), "rejected": "nein"}
    for i in range(12)
]


@pytest.fixture
def weights(tmp_path):
    return write_weights(tmp_path / "tiny", eos=(0,))


@pytest.fixture
def run(script, tmp_path):
    """Runs a script on a mesh; returns its results and its metrics."""

    def start(name, **options):
        directory = tmp_path / name
        run = script("_options").Run(mesh="2x4", directory=directory)
        experiment = script(name)
        experiment.main(experiment.Config(**RUN | options, run=run))
        (path,) = directory.iterdir()
        history = rc.read_metrics(path / "metrics.jsonl")
        assert all(math.isfinite(x["loss"]) for x in history)
        return json.loads((path / "results.json").read_text()), history

    return start


@pytest.mark.parametrize("task", ["word_problems", "programs"])
def test_rewards(run, weights, task):
    """All weights, and adapters."""
    options = {"weights": str(weights), "task": task, **ANSWERS, **SAMPLES}
    results, history = run("grpo", rank=2 * (task == "programs"), **options)
    assert results.keys() == {"accuracy", "accuracy_before"}
    assert [x["step"] for x in history] == [1, 2]
    assert history[-1]["length"] > 0


@pytest.mark.parametrize(("reference", "rank"), [("stored", 0), ("adapters", 2)])
def test_pairs_of_a_file(run, weights, tmp_path, reference, rank):
    """The longest pair is not cut."""
    data = tmp_path / "pairs.jsonl"
    data.write_text("\n".join(map(json.dumps, PAIRS)), "utf-8")
    options = {"reference": reference, "rank": rank, "batch_size": 8}
    results, _ = run("preferences", data=data, weights=str(weights), **options)
    assert results.keys() == {"preferred"}


def test_own_mistakes_in_word_problems(run, weights):
    options = {"task": "word_problems", "pairs": 16, "batch_size": 8, "max_tokens": 6}
    results, _ = run("preferences", weights=str(weights), loss="simpo", **options)
    assert results.keys() == {"preferred", "accuracy", "accuracy_before"}


def test_a_student_and_a_teacher(run, weights):
    """The same weights have no divergence."""
    options = {"task": "word_problems", "batch_size": 8, **ANSWERS}
    both = {"weights": str(weights), "teacher_weights": str(weights)}
    results, history = run("distill_on_policy", **both, **options)
    assert results["accuracy_before"] == results["teacher_accuracy"]
    assert history[0]["loss"] == pytest.approx(0, abs=1e-5)
