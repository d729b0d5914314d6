"""The pieces of PPO against their definitions, and runs with both kinds of environments."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import redcoast as rc

NAME = "ppo"
SMALL = {"num_envs": 8, "rollout": 16, "minibatches": 2, "epochs": 2, "width": 8, "episodes": 2}
SMALL |= {"steps": 2}


@pytest.mark.thorough
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("mesh", "on_device"),
    [("1", True), *(pytest.param("2x4", x, marks=pytest.mark.integration) for x in (True, False))],
)
def test_a_run_learns_and_reports_the_return(experiment, config, tmp_path, mesh, on_device):
    experiment.main(config(mesh, on_device=on_device))
    (directory,) = tmp_path.iterdir()
    history = rc.read_metrics(directory / "metrics.jsonl")
    assert len(history) == 2
    assert all(math.isfinite(x["loss"]) and not x["skipped"] for x in history)
    assert json.loads((directory / "results.json").read_text())["mean_return"] >= 8
    assert (directory / "return.png").is_file()
    assert ("data=2" in (directory / "plan.txt").read_text()) == (mesh == "2x4")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rollout": 15}, "not divisible by --minibatches 2"),
        ({"num_envs": 9}, "--num-envs is 9, but --mesh splits it over data x fsdp = 2 devices."),
        ({"environment": "Pendulum-v1"}, "discrete actions"),
    ],
)
def test_options_without_a_meaning_are_refused(
    experiment, config, options, words, capsys, tmp_path
):
    with pytest.raises(SystemExit):
        experiment.main(config(**options))
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())  # before a run has a directory


def test_advantages_are_those_of_the_definition(experiment, config):
    """Sums of discounted errors up to the end of an episode; a truncated one has a future."""
    rng = np.random.default_rng(0)
    reward, value, after = (rng.normal(size=(8, 16)).astype(np.float32) for _ in range(3))
    done = rng.random((8, 16)) < 0.3
    terminated = done & (rng.random((8, 16)) < 0.5)
    c = config()
    expected = np.zeros((8, 16))
    for env in range(8):
        for start in range(16):
            for i in range(start, 16):
                future = 0 if terminated[env, i] else after[env, i]
                error = reward[env, i] + c.discount * future - value[env, i]
                expected[env, start] += (c.discount * c.gae_lambda) ** (i - start) * error
                if done[env, i]:
                    break
    transitions = {"reward": reward, "terminated": terminated, "done": done}
    transitions = jax.tree.map(jnp.asarray, transitions)
    actual = experiment.advantages(c, transitions, jnp.asarray(value), jnp.asarray(after))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_the_loss_is_clipped_where_the_paper_clips_it(experiment, config):
    c = config(entropy=0.1)
    model = experiment.init_fn(c, 4, 3, jax.random.key(0))
    moments = {"mean": jnp.float32(2), "variance": jnp.float32(9), "count": jnp.float32(1)}
    model["normalization"]["target"] = moments
    rng = np.random.default_rng(0)
    floats = lambda *shape: rng.normal(size=shape).astype(np.float32)
    old = np.asarray(jax.nn.log_softmax(floats(5, 6, 3)))
    batch = {
        "observation": floats(5, 6, 4),
        "log_policy": old,
        "action": rng.integers(3, size=(5, 6)),
        **{name: floats(5, 6) for name in ("advantage", "value", "target")},
    }
    loss, actual = experiment.loss_fn(c, model, jax.tree.map(jnp.asarray, batch), None)

    new = np.asarray(experiment.log_policy(model, batch["observation"]))
    value = np.asarray(experiment.values(model, batch["observation"]))
    advantage = (batch["advantage"] - batch["advantage"].mean()) / batch["advantage"].std()
    gains, errors = [], []
    for i in np.ndindex(5, 6):
        ratio = math.exp(new[i][batch["action"][i]] - old[i][batch["action"][i]])
        limited = min(max(ratio, 1 - c.clip), 1 + c.clip)
        gains.append(min(ratio * advantage[i], limited * advantage[i]))
        change = min(max(value[i] - batch["value"][i], -3 * c.clip), 3 * c.clip)
        near, target = batch["value"][i] + change, batch["target"][i]
        errors.append(max((value[i] - target) ** 2, (near - target) ** 2) / 9)
    entropy = -np.mean(np.sum(np.exp(new) * new, axis=-1))
    assert float(actual["entropy"]) == pytest.approx(entropy, rel=1e-4)
    expected = -np.mean(gains) + np.mean(errors) / 2 - c.entropy * entropy
    assert float(loss) == pytest.approx(expected, rel=1e-4)


@pytest.mark.thorough
def test_each_epoch_has_every_transition_once_and_in_its_environment(experiment, config):
    c = config()
    data = {"x": jnp.arange(8 * 16).reshape(8, 16), "y": jnp.ones((8, 16, 3))}
    actual = experiment.shuffled(c, data, jax.random.key(0))
    assert actual["x"].shape == (4, 8, 8)
    assert actual["y"].shape == (4, 8, 8, 3)
    epochs = np.asarray(actual["x"]).reshape(2, 2, 8, 8).transpose(0, 2, 1, 3).reshape(2, 8, 16)
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch, axis=1), data["x"])
    assert (epochs[0] != epochs[1]).any()
    assert (epochs[0] % 16 != epochs[0][0] % 16).any()  # each environment has an order of its own


@pytest.mark.thorough
def test_the_running_moments_are_those_of_all_rows_so_far(experiment):
    rows = np.random.default_rng(0).normal(3, 5, (4, 6, 10, 2)).astype(np.float32)
    moments = {"mean": jnp.zeros(2), "variance": jnp.zeros(2), "count": jnp.zeros(())}
    for part in rows:
        moments = experiment.update_moments(moments, jnp.asarray(part))
    flat = rows.reshape(-1, 2).astype(np.float64)
    np.testing.assert_allclose(moments["mean"], flat.mean(axis=0), rtol=1e-4)
    np.testing.assert_allclose(moments["variance"], flat.var(axis=0), rtol=1e-4)


@pytest.mark.thorough
def test_transitions_stay_on_their_device(experiment, config, collectives):
    """Acting and learning are one program that only sums over devices."""
    assert collectives(experiment, config(on_device=True)) == ["all-reduce"]
