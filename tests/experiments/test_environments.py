"""The environments of the experiments: those in JAX against gymnasium's."""

import re
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest


@pytest.fixture
def environments(script):
    return script("_environments")


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_states_rewards_and_ends_are_gymnasiums(environments, name):
    environment: Any = environments.ENVIRONMENTS[name]
    reference: Any = gymnasium.make(name).unwrapped
    step, observe = jax.jit(environment.step), jax.jit(environment.observe)
    rng, ends = np.random.default_rng(0), 0
    reference.reset(seed=0)
    env_state = jnp.asarray(reference.state, jnp.float32)
    for _ in range(100):
        action = rng.integers(2) if name == "CartPole-v1" else rng.uniform(-1, 1, 1)
        given = action if name == "CartPole-v1" else 2 * action  # its torque is from -2 to 2
        seen, reward, terminated, _, _ = reference.step(given)
        env_state, actual, done = step(env_state, jnp.asarray(action))
        np.testing.assert_allclose(observe(env_state), seen, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(actual, reward, rtol=1e-3, atol=1e-4)
        assert done == terminated
        if terminated:
            ends += 1
            reference.reset()
        # The pendulum is chaotic near the top: both start each step from the same state.
        env_state = jnp.asarray(reference.state, jnp.float32)
    assert ends > 1 or name == "Pendulum-v1"


@pytest.mark.thorough
def test_episodes_start_from_gymnasiums_distribution(environments):
    for name, environment in environments.ENVIRONMENTS.items():
        spec = gymnasium.spec(name)
        reference: Any = gymnasium.make(name)
        actual = jax.vmap(environment.reset)(jax.random.split(jax.random.key(0), 2000))
        states = []
        for seed in range(500):
            reference.reset(seed=seed)
            states.append(reference.unwrapped.state)
        for statistic in (np.min, np.mean, np.max):
            expected = statistic(states, axis=0)
            scale = np.ptp(states, axis=0)
            assert (np.abs(statistic(actual, axis=0) - expected) < 0.06 * scale).all()
        assert environment.limit == spec.max_episode_steps


@pytest.mark.thorough
def test_an_episode_that_ends_is_followed_by_the_next(environments):
    environment = environments.ENVIRONMENTS["CartPole-v1"]
    step = jax.jit(lambda *args: environments.step_envs(environment, *args))
    envs = environments.reset_envs(environment, jax.random.key(0), 3)
    assert np.isnan(envs["last_return"]).all()
    returns = np.zeros(3)
    for i in range(60):
        before = envs
        envs, actual = step(envs, jnp.array([1, 1, i % 2]), jax.random.key(i))
        np.testing.assert_array_equal(actual["observation"], before["env_state"])
        returns += 1
        done = np.asarray(actual["done"])
        # What the last transition led to is not the first observation of the next episode.
        outside = np.abs(actual["next_observation"][:, 2]) > 12 * np.pi / 180
        np.testing.assert_array_equal(done, outside)
        assert (np.abs(envs["env_state"][done]) < 0.05).all()
        np.testing.assert_array_equal(np.asarray(envs["last_return"])[done], returns[done])
        returns[done] = 0
    assert np.isfinite(envs["last_return"][:2]).all()


@pytest.mark.thorough
def test_a_time_limit_truncates(environments):
    environment = environments.ENVIRONMENTS["Pendulum-v1"]
    envs = environments.reset_envs(environment, jax.random.key(0), 2)
    policy = lambda observations, key: jnp.zeros((2, 1))
    run = jax.jit(lambda envs, key: environments.rollout(environment, policy, envs, key, 201))
    envs, actual = run(envs, jax.random.key(0))
    assert actual["reward"].shape == (2, 201)
    assert not actual["terminated"].any()
    assert np.flatnonzero(actual["done"][0]).tolist() == [199]
    np.testing.assert_allclose(
        envs["last_return"], actual["reward"][:, :200].sum(axis=1), rtol=1e-5
    )


def seed_of(key, count):
    """The seed of the first of some environments on the host; the others have the next ones."""
    return int(jax.random.randint(key, (), 0, 2**31 - count))


def test_environments_on_the_host_make_the_same_transitions(environments):
    envs, key = environments.HostEnvs("CartPole-v1", 3), jax.random.key(0)
    envs.reset(key)
    single: Any = gymnasium.make("CartPole-v1")
    seen, _ = single.reset(seed=seed_of(key, 3))
    total, ends = 0.0, 0
    for _ in range(60):
        actual = envs.step(np.ones(3, int))
        after, reward, terminated, truncated, _ = single.step(1)
        np.testing.assert_array_equal(actual["observation"][0], seen)
        np.testing.assert_array_equal(actual["next_observation"][0], after)
        assert actual["done"][0] == (terminated or truncated)
        total, seen = total + reward, after
        if terminated or truncated:
            assert envs.last_return[0] == total
            total, ends, seen = 0.0, ends + 1, single.reset()[0]
    assert ends > 2


def test_a_resumed_run_has_new_initial_states_on_the_host(environments):
    """The first rollout seeds the episodes by its key, which is that of an iteration."""
    policy = lambda observations, key: np.ones(len(observations), int)

    def observations(keys):
        envs = environments.HostEnvs("CartPole-v1", 2)
        actual = [envs.rollout(policy, jax.random.key(i), 4)["observation"] for i in keys]
        return np.concatenate(actual, axis=1)

    whole = observations([1, 2])
    assert whole.shape == (2, 8, 4)
    np.testing.assert_array_equal(observations([1, 2]), whole)
    assert (np.abs(np.diff(whole[:, 3:5, 1], axis=1)) > 0.1).all()  # the push of one step
    resumed = observations([2])[:, 0]
    for known in (whole[:, 0], whole[:, 4]):
        assert (resumed != known).any(axis=1).all()


def test_continuous_actions_are_scaled_to_those_of_the_environment(environments):
    envs, key = environments.HostEnvs("Pendulum-v1", 1), jax.random.key(0)
    envs.reset(key)
    single: Any = gymnasium.make("Pendulum-v1")
    single.reset(seed=seed_of(key, 1))
    actual = envs.step(np.full((1, 1), 0.5, np.float32))
    np.testing.assert_allclose(
        actual["reward"], single.step(np.array([1.0], np.float32))[1], rtol=1e-5
    )


def test_the_mean_return_is_that_of_first_episodes(environments):
    """Episodes that follow a short one, while others go on, do not count."""
    policy = lambda observations, key: np.ones(len(observations), int)
    actual = environments.mean_return("CartPole-v1", policy, episodes=5, key=jax.random.key(3))
    seed = seed_of(jax.random.split(jax.random.key(3))[0], 5)
    returns = []
    for i in range(5):
        env = gymnasium.make("CartPole-v1")
        env.reset(seed=seed + i)
        returns.append(next(n for n in range(1, 500) if env.step(1)[2]))
    assert len(set(returns)) > 1
    assert actual == pytest.approx(np.mean(returns))


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("CartPole-v9", {"discrete": True}, "CartPole-v9 cannot be created"),
        (
            "Acrobot-v1",
            {"discrete": True, "on_device": True},
            "Acrobot-v1 is not written in JAX",
        ),
        ("Pendulum-v1", {"discrete": True}, "Box.*discrete actions"),
        ("CartPole-v1", {"discrete": False}, "Discrete.*continuous actions"),
        ("FrozenLake-v1", {"discrete": True}, "vectors as observations"),
    ],
)
def test_environments_that_do_not_suit_are_refused(environments, capsys, name, options, words):
    with pytest.raises(SystemExit):
        environments.sizes(name, **{"on_device": False} | options)
    assert re.search(words, capsys.readouterr().err)


def test_the_sizes_are_those_of_the_spaces(environments):
    assert environments.sizes("CartPole-v1", discrete=True, on_device=True) == (4, 2)
    assert environments.sizes("Acrobot-v1", discrete=True, on_device=False) == (6, 3)
    assert environments.sizes("Pendulum-v1", discrete=False, on_device=True) == (3, 1)
