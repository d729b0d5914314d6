"""The pieces of GRPO against their definitions, and runs that go on in the middle of answers."""

import json
import math
import types
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

import redcoast as rc

NAME = "grpo"
SMALL = {"imitation_steps": 2, "prompts": 4, "samples": 4, "steps": 3}
START, MOST, END = 3, 6, 1


@pytest.fixture
def quick(script, monkeypatch, short):
    """Held-out problems are not answered: that compiles further programs."""
    monkeypatch.setattr(script("grpo"), "accuracy", lambda *args, **options: 0.5)


def metrics_of(directory):
    (run,) = directory.iterdir()
    history = rc.read_metrics(run / "metrics.jsonl")
    names = ("loss", "grad_norm", "reward", "length", "kl", "clipped")
    return {x["step"]: [x[name] for name in names] for x in history}


@pytest.mark.integration
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("1", {"loss": "dapo", "advantages": "rloo"}),
        ("2x4", {"loss": "dr_grpo", "advantages": "centred", "kl_weight": 0.1, "rank": 2}),
        ("2x4", {"exact": True, "minibatches": 1}),
    ],
)
def test_a_run_reports_the_accuracy(experiment, config, tmp_path, mesh, options):
    experiment.main(config(mesh, **options))
    (directory,) = tmp_path.iterdir()
    assert sorted(metrics_of(tmp_path)) == [1, 2, 3]
    assert all(math.isfinite(x) for row in metrics_of(tmp_path).values() for x in row)
    if "exact" in options:
        history = rc.read_metrics(directory / "metrics.jsonl")
        assert [x["ratio_not_1"] for x in history] == [0, 0, 0]
    results = json.loads((directory / "results.json").read_text())
    assert results.keys() == {"accuracy", "accuracy_before"}
    assert (directory / "reward.png").is_file()
    assert ("data=2" in (directory / "plan.txt").read_text()) == (mesh == "2x4")


@pytest.mark.integration
@pytest.mark.usefixtures("quick")
def test_a_run_that_is_killed_in_a_rollout_goes_on_with_the_same_bits(
    experiment, script, config, tmp_path, monkeypatch
):
    """While answers are unfinished: they get one token in each iteration."""
    options = {"new_tokens": 1, "steps": 7}
    whole = config("2x4", **options)
    experiment.main(whole)
    expected = metrics_of(tmp_path)
    (finished,) = tmp_path.iterdir()
    finished.rename(tmp_path.with_name("whole"))

    rollouts, calls = script("_rollouts"), []
    append = rollouts.append

    def killed(*args):
        calls.append(args)
        if len(calls) == 6:
            raise RuntimeError("killed")
        return append(*args)

    monkeypatch.setattr(rollouts, "append", killed)
    with pytest.raises(RuntimeError, match="killed"):
        experiment.main(config("2x4", **options))
    run = script("_options").Run(mesh="2x4", directory=tmp_path, resume=True)
    experiment.main(experiment.Config(**SMALL | options, run=run))
    assert metrics_of(tmp_path) == expected
    assert sorted(expected) == [1, 2, 3, 4, 5, 6, 7]


def test_answers_go_on_until_they_end(script):
    """One to three tokens at a time give the same rows as all at once."""
    rollouts = script("_rollouts")
    rng = np.random.default_rng(0)
    answers = rng.integers(2, 9, (16, MOST))
    ends = rng.integers(0, 2 * MOST, 16)
    for row, end in zip(answers, ends, strict=True):
        row[end : end + 1] = END
    expected = np.where(np.arange(MOST) <= ends[:, None], answers, 0)
    rollout = rollouts.blank_rollout(16, START, MOST)
    seen = np.zeros((16, MOST), int)
    for count in (1, 3, 2):
        place = np.minimum(rollout["length"][:, None] + np.arange(count), MOST - 1)
        new = np.take_along_axis(answers, place, axis=1)
        ended = rollouts.append(rollout, new, -new.astype(float), START, (END,))
        seen += rollout["fresh"]
    assert ended.all()
    np.testing.assert_array_equal(rollout["tokens"][:, START:], expected)
    np.testing.assert_array_equal(rollout["log_probs"], -expected)
    np.testing.assert_array_equal(rollout["real"][:, START:], seen)
    assert seen.max() == 1  # each token is fresh once, with the probability it was sampled with
    np.testing.assert_array_equal(rollout["length"], np.minimum(ends + 1, MOST))
    before = {name: x.copy() for name, x in rollout.items()}
    rollouts.append(rollout, np.full((16, 2), 5), np.ones((16, 2)), START, (END,))
    np.testing.assert_array_equal(rollout["tokens"], before["tokens"])
    assert not rollout["fresh"].any()


def test_answers_are_graded_once_and_while_others_go_on(script):
    """An answer that has ended, with a token or with its length, is graded before the next step."""
    rollouts, graded, now = script("_rollouts"), [], []
    task = types.SimpleNamespace(
        train=["a", "b", "c", "d"], reward=lambda problem, text: graded.append(problem) or len(text)
    )
    policy = types.SimpleNamespace(decode=lambda tokens: "x" * len(tokens), ends=(END,))
    rollout = rollouts.blank_rollout(4, START, MOST)
    rollout["problem"] = np.arange(4)
    rollouts.append(rollout, np.array([[5], [END], [5], [5]]), np.zeros((4, 1)), START, (END,))
    rollout["reward"] = np.array([0, 7, 0, 0], np.float32)  # of the answer that has ended
    with ThreadPoolExecutor(1) as pool:
        grades = rollouts.Grades(pool, policy, task, rollout, START)
        for tokens in ([END, 5, 5, 5], [5, 5, END, 5], [5, 5, 5, 5]):
            grades.add_tokens(np.array(tokens))
            pool.submit(int).result()  # all that is before it in the queue is done
            now.append([*graded])
        new = np.array([[END, 0, 0], [0, 0, 0], [5, END, 0], [5, 5, 5]])
        ended = rollouts.append(rollout, new, np.zeros((4, 3)), START, (END,))
        rewards = grades.finish(ended)
    assert now == [["a"], ["a", "c"], ["a", "c"]]
    np.testing.assert_array_equal(rewards, [2, 7, 3, 0])


def test_problems_that_are_half_solved_are_preferred_and_none_is_answered_twice(script, capsys):
    choose, rng = script("_rollouts").choose_problems, np.random.default_rng(0)
    solved = np.array([0.0, 0.5, 1.0, 0.5] * 25)
    draws = [choose(rng, solved, 1.0, 8, np.array([1, 3])) for _ in range(200)]
    assert all(len(set(draw)) == 8 for draw in draws)
    counts = np.bincount(np.concatenate(draws), minlength=100)
    assert not counts[[1, 3]].any()
    assert counts[1::2].sum() > 5 * counts[::2].sum()
    even = np.bincount(np.concatenate([choose(rng, solved, 0.0, 8, []) for _ in range(200)]))
    assert 0.7 < even[1::2].sum() / even[::2].sum() < 1.4
    with pytest.raises(SystemExit):
        choose(rng, solved, 1.0, 99, np.array([1, 3]))
    assert "needs 99 new problems, but 98 are left" in capsys.readouterr().err


def test_each_pass_has_every_answer_once(experiment, config):
    c = config(epochs=2, minibatches=2)
    data = {"x": np.arange(16), "y": np.arange(48).reshape(16, 3)}
    actual = jax.tree.map(np.asarray, experiment.minibatches(c, data))
    assert actual["x"].shape == (4, 8)
    assert actual["y"].shape == (4, 8, 3)
    for part in (actual["x"][:2], actual["x"][2:]):
        np.testing.assert_array_equal(np.sort(part.reshape(-1)), data["x"])
    np.testing.assert_array_equal(actual["y"][..., 0], 3 * actual["x"])


def test_only_answers_of_whole_groups_are_learned(script):
    rollout = {"fresh": np.zeros((3, 4), bool), "length": np.array([2, 4, 0])}
    rollout |= {"done": np.array([True, False, True])}
    actual = np.asarray(script("_rollouts").learned_tokens(rollout))
    assert actual.tolist() == [[True, True, False, False], [False] * 4, [False] * 4]


def test_options_without_a_meaning_are_refused(experiment, config, capsys, tmp_path):
    for options in ({"samples": 1}, {"minibatches": 3}):
        with pytest.raises(SystemExit):
            experiment.main(config(**options))
        assert "--samples must be at least 2" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
