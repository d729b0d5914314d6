"""What the experiment with preferences minimises, and runs with each loss and reference."""

import json
import math
import re
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import redcoast as rc
from redcoast import losses
from redcoast.models import Llama, LlamaConfig

NAME = "preferences"
SMALL = {"imitation_steps": 2, "pairs": 160, "batch_size": 16, "steps": 2}
CASES = [
    ("dpo", "stored", 0),
    ("dpo", "copy", 0),
    ("dpo", "adapters", 2),
    ("ipo", "stored", 0),
    ("kto", "copy", 0),
    ("orpo", "stored", 0),
    ("simpo", "stored", 0),
    ("reward", "stored", 0),
]


@pytest.mark.integration
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(("loss", "reference", "rank"), CASES)
def test_a_run_prefers_and_reports(experiment, config, tmp_path, loss, reference, rank):
    experiment.main(config("2x4", loss=loss, reference=reference, rank=rank))
    (directory,) = tmp_path.iterdir()
    results = json.loads((directory / "results.json").read_text())
    assert "preferred" in results
    assert ("accuracy" in results) == (loss != "reward")
    assert all(math.isfinite(x) for x in results.values())
    history = rc.read_metrics(directory / "metrics.jsonl")
    if loss == "dpo":  # the model is the reference at first
        assert history[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)


def policy_of(script):
    model = Llama(LlamaConfig(97, 16, 1, 2, 2, 32, eos=(1,), pad=0), key=jax.random.key(0))
    encode = lambda text: [ord(sign) - 30 for sign in text]
    return script("_policies").Policy(model, encode, lambda x: [*encode(x), 1], str, (1,))


def pairs():
    return [{"prompt": f"{i}+{i}=", "chosen": str(2 * i), "rejected": str(3 * i)} for i in range(4)]


def stacked(examples):
    return jax.tree.map(lambda *arrays: np.stack(arrays), *examples)


def own_log_prob(model, policy, prompt, answer, mean):
    """Of one answer alone, token by token."""
    start, end = policy.encode_prompt(prompt), policy.encode_answer(answer)
    logits = np.asarray(eqx.filter_jit(model)(jnp.array([start + end])), np.float64)[0]
    logs = logits - np.log(np.sum(np.exp(logits), axis=1, keepdims=True))
    each = [logs[len(start) - 1 + i, token] for i, token in enumerate(end)]
    return np.mean(each) if mean else np.sum(each)


@pytest.mark.thorough
@pytest.mark.parametrize("loss", ["dpo", "kto", "simpo"])
def test_answers_have_their_own_log_probabilities(script, experiment, config, loss):
    """Padding and the prompt are not counted; KTO compares with an answer to another prompt."""
    c, policy = config(loss=loss), policy_of(script)
    examples = experiment.as_examples(c, policy, pairs())
    actual = eqx.filter_jit(experiment.log_probs)(c, policy.model, stacked(examples))
    mean = loss == "simpo"
    for i, pair in enumerate(pairs()):
        answers = [pair["chosen"], pair["rejected"]]
        answers += [pairs()[(i + 1) % 4]["chosen"]] if loss == "kto" else []
        own = [own_log_prob(policy.model, policy, pair["prompt"], x, mean) for x in answers]
        np.testing.assert_allclose(actual[i], own, rtol=1e-4)


@pytest.mark.thorough
def test_a_stored_reference_and_a_copy_give_the_same_loss(script, experiment, config):
    c, policy = config(), policy_of(script)
    batch = stacked(experiment.as_examples(c, policy, pairs()))
    batch = jax.tree.map(jnp.asarray, batch)
    changed = jax.tree.map(lambda x: x * 1.1, policy.model)
    stored = batch | {"reference": experiment.log_probs(c, policy.model, batch)}
    copy = {"policy": changed, "reference": policy.model}
    one, _ = experiment.preference_loss(c, copy, batch, None)
    two, _ = experiment.preference_loss(c, {"policy": changed}, stored, None)
    np.testing.assert_allclose(one, two, rtol=1e-6)
    logs = experiment.log_probs(c, changed, batch)
    expected = losses.dpo(logs[:, 0], logs[:, 1], *stored["reference"].T, beta=c.beta)
    np.testing.assert_allclose(one, expected, rtol=1e-6)


def test_pairs_of_a_file_are_read_and_checked(experiment, tmp_path, refused):
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, pairs())))
    assert experiment.read_pairs(file) == pairs()
    file.write_text(json.dumps({"prompt": "a", "chosen": "b"}))
    with refused(r"Line 1 of .*rejected"):
        experiment.read_pairs(file)


def test_adapters_as_the_reference_need_a_rank(experiment, config, capsys, tmp_path):
    with pytest.raises(SystemExit):
        experiment.main(config(reference="adapters"))
    assert "--reference adapters needs --rank" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_own_mistakes_are_pairs_of_the_right_and_a_wrong_answer(script, experiment, config):
    texts = iter(["1", "2", "3"])
    problem = script("_verifiable").Problem
    task = types.SimpleNamespace(
        train=[problem("a", "1"), problem("b", "7"), problem("c", "8")],
        reward=lambda problem, text: float(text == problem.answer),
    )
    experiment.write_answers = lambda *args, **options: [*texts]
    run = types.SimpleNamespace(mesh=None, key=None)
    actual = experiment.own_mistakes(config(), run, types.SimpleNamespace(model=None), task)
    assert [(x["prompt"], x["chosen"], x["rejected"]) for x in actual] == [
        ("b", "7", "2"),
        ("c", "8", "3"),
    ]


def test_pairs_that_do_not_fit_are_refused_and_not_cut(experiment, config, script, capsys):
    policy = policy_of(script)
    for given, says in (
        ((config(seq=5), policy, pairs()), r"--seq is 5, but .* has 6 tokens"),
        ((config(), policy, pairs()[:1]), "There are 1 pairs"),
    ):
        with pytest.raises(SystemExit):
            experiment.as_examples(*given)
        assert re.search(says, capsys.readouterr().err)
    with pytest.raises(ValueError, match="7 tokens, but there is room for 6"):
        script("_policies").pad_rows([range(7)], 6, left=True)


def test_pairs_of_a_file_need_a_model_that_can_read_them(experiment, config, capsys, tmp_path):
    with pytest.raises(SystemExit):
        experiment.main(config(data=tmp_path / "pairs.jsonl"))
    assert "--data needs --weights" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
