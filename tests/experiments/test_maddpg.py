"""What the agents of MADDPG and their critics know, and a run."""

import itertools as it
import json

import equinox as eqx
import jax
import numpy as np
import pytest
from mpe2 import simple_spread_v3
from random_models import to_device

import redcoast as rc

NAME = "maddpg"
SMALL = {"num_envs": 8, "gradient_steps": 2, "batch_size": 16, "buffer": 400, "width": 8}
SMALL |= {"episodes": 2, "steps": 2}


@pytest.mark.integration  # a whole run
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("mesh", ["1", "2x4"])
def test_a_run_compares_critics_with_random_actions(mesh, experiment, config, tmp_path):
    experiment.main(config(mesh))
    (directory,) = tmp_path.iterdir()
    results = json.loads((directory / "results.json").read_text())
    returns = [results[f"{name}_return"] for name in ("centralised", "independent", "random")]
    assert all(-100 < x < 0 for x in returns)
    assert results["gain"] == pytest.approx(returns[0] - returns[1], rel=1e-4)
    assert results["confidence_95"] > 0
    for of_run in (directory, directory / "independent"):
        assert len(rc.read_metrics(of_run / "metrics.jsonl")) == 2
    assert (directory / "returns.png").is_file()


def test_environments_that_the_mesh_cannot_split_are_refused(experiment, config, capsys):
    with pytest.raises(SystemExit):
        experiment.main(config(num_envs=3, batch_size=15, buffer=300))
    assert "--num-envs is 3, but --mesh splits it over data x fsdp = 2" in capsys.readouterr().err


def test_a_batch_that_environments_do_not_divide_is_refused(experiment, config, capsys):
    with pytest.raises(SystemExit):
        experiment.main(config(batch_size=12))
    assert "divisible by --num-envs 8" in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.parametrize(("critics", "known"), [("centralised", 3), ("independent", 1)])
def test_a_critic_knows_all_agents_or_its_own(experiment, config, critics, known):
    model = experiment.init_fn(config(), 20 * known, jax.random.key(0))
    rng = np.random.default_rng(0)
    seen, taken = (to_device(rng.normal(size=(3, n)), np.float32) for n in (18, 2))
    by_seen, by_taken = jax.jacobian(experiment.values, (1, 2))(model, seen, taken)
    for gradient in (by_seen, by_taken):
        depends = np.abs(np.asarray(gradient)).sum(axis=-1) > 0  # (value of, agent)
        expected = np.ones((3, 3)) if critics == "centralised" else np.eye(3)
        np.testing.assert_array_equal(depends, expected)


@pytest.mark.thorough
def test_an_agent_acts_on_its_own_observation(experiment, config):
    model = experiment.init_fn(config(), 60, jax.random.key(0))
    seen = to_device(np.random.default_rng(0).normal(size=(3, 18)), np.float32)
    gradient = jax.jacobian(experiment.actions, 1)(model, seen)
    depends = np.abs(np.asarray(gradient)).sum(axis=(1, 3)) > 0
    np.testing.assert_array_equal(depends, np.eye(3))


@pytest.mark.thorough
def test_each_actor_follows_its_critic_given_the_actions_of_the_others(experiment, config):
    """The actors' part of the loss, against a loop over agents and rows."""
    model = experiment.init_fn(config(), 60, jax.random.key(0))
    rng = np.random.default_rng(0)
    shapes = {"observation": (2, 4, 3, 18), "action": (2, 4, 3, 2), "target": (2, 4, 3)}
    batch = {k: to_device(rng.normal(size=s), np.float32) for k, s in shapes.items()}
    actual = jax.jit(lambda batch: experiment.loss_fn(model, batch, None))(batch)
    errors, gains, sizes = [], [], []
    for row in np.ndindex(2, 4):
        seen, taken, target = (np.asarray(batch[name][row]) for name in shapes)
        errors.append((np.asarray(experiment.values(model, seen, taken)) - target) ** 2)
        chosen = np.asarray(experiment.actions(model, seen))
        sizes.append(chosen**2)
        for agent in range(3):
            mixed = taken.copy()
            mixed[agent] = chosen[agent]
            gains.append(float(experiment.values(model, seen, mixed)[agent]))
    expected = 3 * (np.mean(errors) - np.mean(gains) + 1e-3 * np.mean(sizes))  # of three agents
    assert float(actual) == pytest.approx(expected, rel=1e-4)


@pytest.mark.thorough
def test_the_networks_of_each_agent_are_clipped_by_their_own_norm(experiment, config):
    """So agents with independent critics learn as if each were trained alone."""
    model = eqx.filter(experiment.init_fn(config(), 20, jax.random.key(0)), eqx.is_inexact_array)
    rng = np.random.default_rng(0)
    scales = np.array([0.01, 1.0, 30.0], np.float32)  # of the three agents
    draw = lambda x: scales.reshape(3, *[1] * (x.ndim - 1)) * rng.normal(size=x.shape)
    gradient = jax.tree.map(lambda x: to_device(draw(x), np.float32), model)
    clip = experiment.clip_networks(0.5)
    actual, _ = clip.update(gradient, clip.init(model), model)
    for name, agent in it.product(("actors", "critics"), range(3)):
        before, after = (
            [np.asarray(x[agent]) for x in jax.tree.leaves(tree[name])]
            for tree in (gradient, actual)
        )
        norm = np.sqrt(sum(np.sum(x**2) for x in before))
        assert (norm > 0.5) == (agent > 0)
        for a, b in zip(after, before, strict=True):
            np.testing.assert_allclose(a, b * min(1, 0.5 / norm), rtol=1e-4)


def test_initial_states_depend_on_the_seed_of_the_run_and_on_the_iteration(experiment, script):
    config = lambda seed: experiment.Config(run=script("_options").Run(seed=seed))
    seeds = lambda seed, stream, number: experiment.episode_seeds(config(seed), stream, number, 8)
    places = [(seed, stream, i) for seed in (0, 1) for stream in (0, 1) for i in (0, 1, 2)]
    actual = [seeds(*place) for place in places]
    assert actual == [seeds(*place) for place in places]  # also after a resume
    assert len({*sum(actual, [])}) == 8 * len(places)


@pytest.mark.thorough
def test_episodes_are_those_of_the_environment_and_repeat_with_the_seed(experiment):
    envs = [simple_spread_v3.parallel_env(continuous_actions=True) for _ in range(2)]
    push = np.array([[0.5, -1.0], [-0.25, 0.0], [1.0, 0.75]], np.float32)
    policy = lambda seen, key: np.broadcast_to(push, (2, 3, 2))
    actual = experiment.play(envs, policy, jax.random.key(0), [7, 8])
    again = experiment.play(envs, policy, jax.random.key(0), [7, 8])
    jax.tree.map(np.testing.assert_array_equal, actual, again)
    assert actual["observation"].shape == (2, 25, 3, 18)
    np.testing.assert_array_equal(actual["observation"][:, 1:], actual["next_observation"][:, :-1])

    single = simple_spread_v3.parallel_env(continuous_actions=True)
    seen, _ = single.reset(seed=8)
    options = {
        "agent_0": np.array([0, 0, 0.5, 1, 0], np.float32),
        "agent_1": np.array([0, 0.25, 0, 0, 0], np.float32),
        "agent_2": np.array([0, 0, 1, 0, 0.75], np.float32),
    }
    for i in range(25):
        np.testing.assert_allclose(actual["observation"][1, i], [*seen.values()], rtol=1e-5)
        seen, reward, *_ = single.step(options)
        np.testing.assert_allclose(actual["reward"][1, i], [*reward.values()], rtol=1e-5)
    # To the right is positive in the first coordinate of the velocity.
    assert (actual["next_observation"][:, -1, :, 0] * push[:, 0] > 0).all()
