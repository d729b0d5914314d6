"""Environments of reinforcement learning: gymnasium's, on the host, and two of them written in JAX.

An experiment steps several environments in parallel. Their states, and the transitions that they
make, are dicts of arrays whose first dimension counts the environments, so that they are sharded
over a mesh as a batch is. Where an episode is done, because it was terminated or truncated, the
next one starts in the same step. Continuous actions are scaled: each of their numbers is from -1
to 1.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _extras import from_extra
from _options import refuse
from jaxtyping import Array, Bool, Float, PRNGKeyArray

with from_extra("rl"):
    import gymnasium
    from gymnasium.vector import AutoresetMode, SyncVectorEnv

Arrays = dict[str, Any]
Policy = Callable[[Any, PRNGKeyArray], Any]  # (observations, key) -> actions


@dataclass(frozen=True)
class Environment:
    """An environment as pure functions of its state."""

    reset: Callable[[PRNGKeyArray], Float[Array, " state"]]
    # (env_state, action) -> (env_state, reward, terminated)
    step: Callable[[Any, Any], tuple[Float[Array, " state"], Float[Array, ""], Bool[Array, ""]]]
    observe: Callable[[Float[Array, " state"]], Float[Array, " observation"]]
    limit: int  # number of steps after which an episode is truncated


def sizes(name: str, *, discrete: bool, on_device: bool) -> tuple[int, int]:
    """The size of an observation, and the number of discrete actions or the size of an action.

    Refuses environments that do not exist, or whose spaces are of another kind.
    """
    if on_device and name not in ENVIRONMENTS:
        refuse(f"--environment {name} is not written in JAX; {', '.join(ENVIRONMENTS)} are.")
    try:
        env = gymnasium.make(name)
    except gymnasium.error.Error as error:
        refuse(f"--environment {name} cannot be created: {error}")
    observed: Any = env.observation_space
    action: Any = env.action_space
    is_discrete = isinstance(action, gymnasium.spaces.Discrete)
    if is_discrete != discrete or len(observed.shape or ()) != 1:
        kind = "continuous"
        if discrete:
            kind = "discrete"
        refuse(
            f"--environment {name} has the observations {observed} and the actions {action}, but "
            f"this experiment needs vectors as observations, and {kind} actions."
        )
    if discrete:
        return observed.shape[0], int(action.n)
    return observed.shape[0], action.shape[0]


def reset_envs(environment: Environment, key: PRNGKeyArray, num_envs: int) -> Arrays:
    """Starts an episode in each environment."""
    env_state = jax.vmap(environment.reset)(jax.random.split(key, num_envs))
    zeros = jnp.zeros(num_envs)
    # The return of the last episode that was done is NaN until there is one.
    return {"env_state": env_state, "steps": zeros, "return": zeros, "last_return": zeros + jnp.nan}


def step_envs(
    environment: Environment, envs: Arrays, action: Array, key: PRNGKeyArray
) -> tuple[Arrays, Arrays]:
    """Steps each environment; returns their states and the transitions."""
    observe = jax.vmap(environment.observe)
    before, count = envs["env_state"], envs["steps"].size
    env_state, reward, terminated = jax.vmap(environment.step)(before, action)
    steps, returns = envs["steps"] + 1, envs["return"] + reward
    done = terminated | (steps >= environment.limit)
    fresh = jax.vmap(environment.reset)(jax.random.split(key, count))
    transitions = {
        "observation": observe(before),
        "action": action,
        "reward": reward,
        "next_observation": observe(env_state),  # of the same episode, even if it is done
        "terminated": terminated,
        "done": done,
    }
    after = {
        "env_state": jnp.where(done[:, None], fresh, env_state),
        "steps": jnp.where(done, 0, steps),
        "return": jnp.where(done, 0, returns),
        "last_return": jnp.where(done, returns, envs["last_return"]),
    }
    return after, transitions


def rollout(
    environment: Environment, policy: Policy, envs: Arrays, key: PRNGKeyArray, steps: int
) -> tuple[Arrays, Arrays]:
    """Takes steps in each environment, as a part of a program; returns their states and the
    transitions, whose arrays have the shape `num_envs steps ...`."""

    def step(envs: Arrays, key: PRNGKeyArray) -> tuple[Arrays, Arrays]:
        act_key, reset_key = jax.random.split(key)
        action = policy(jax.vmap(environment.observe)(envs["env_state"]), act_key)
        return step_envs(environment, envs, action, reset_key)

    envs, transitions = jax.lax.scan(step, envs, jax.random.split(key, steps))
    return envs, jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), transitions)


class HostEnvs:
    """Parallel environments of gymnasium, which are stepped on the host."""

    def __init__(self, name: str, num_envs: int):
        make = lambda: scaled(gymnasium.make(name))
        self.envs = SyncVectorEnv([make] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
        self.observation: Any = None  # before `reset`

    def reset(self, key: PRNGKeyArray) -> None:
        """Starts an episode in each environment."""
        count = self.envs.num_envs
        seed = int(jax.random.randint(key, (), 0, 2**31 - count))
        self.observation, _ = self.envs.reset(seed=seed)
        self.returns = np.zeros(count, np.float32)
        self.last_return = np.full(count, np.nan, np.float32)

    def step(self, action: np.ndarray) -> Arrays:
        """Steps each environment; returns the transitions."""
        before = self.observation
        self.observation, reward, terminated, truncated, info = self.envs.step(action)
        done = terminated | truncated
        last = self.observation
        if done.any():
            last = last.copy()
            last[done] = np.stack(info["final_obs"][done])
        self.returns += reward
        self.last_return = np.where(done, self.returns, self.last_return)
        self.returns[done] = 0
        return {
            "observation": before.astype(np.float32),
            "action": action,
            "reward": reward.astype(np.float32),
            "next_observation": last.astype(np.float32),
            "terminated": terminated,
            "done": done,
        }

    def rollout(self, policy: Policy, key: PRNGKeyArray, steps: int) -> Arrays:
        """Takes steps in each environment; returns the transitions, of shape `num_envs steps ...`.

        The first call starts the episodes, seeded by its key. A run that is resumed has the key of
        a later iteration, so its first initial states are new.
        """
        reset_key, *keys = jax.random.split(key, steps + 1)
        if self.observation is None:
            self.reset(reset_key)
        transitions = []
        for key in keys:
            action = np.asarray(policy(self.observation, key))
            transitions.append(self.step(action))
        return jax.tree.map(lambda *x: np.stack(x, axis=1), *transitions)


def scaled(env: gymnasium.Env) -> gymnasium.Env:
    """Scales continuous actions to numbers from -1 to 1."""
    if not isinstance(env.action_space, gymnasium.spaces.Box):
        return env
    high = np.ones(env.action_space.shape, np.float32)
    return gymnasium.wrappers.RescaleAction(env, -high, high)


def mean_return(name: str, policy: Policy, *, episodes: int, key: PRNGKeyArray) -> float:
    """The mean return of a policy in episodes of a gymnasium environment."""
    reset_key, key = jax.random.split(key)
    envs = HostEnvs(name, episodes)
    envs.reset(reset_key)
    first_returns = np.full(
        episodes, np.nan
    )  # later episodes are not counted: short ones come first
    while np.isnan(first_returns).any():
        act_key, key = jax.random.split(key)
        envs.step(np.asarray(policy(envs.observation, act_key)))
        first_returns = np.where(np.isnan(first_returns), envs.last_return, first_returns)
    return float(first_returns.mean())


def _cart_pole_step(env_state: Array, action: Array) -> tuple[Array, Array, Array]:
    """CartPole-v1 (Barto, Sutton and Anderson, 1983), as gymnasium integrates it."""
    _, speed, angle, turn = env_state
    force = jnp.where(action == 1, 10.0, -10.0)
    sine, cosine = jnp.sin(angle), jnp.cos(angle)
    push = (force + 0.05 * turn**2 * sine) / 1.1
    turning = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
    acceleration = push - 0.05 * turning * cosine / 1.1
    change = jnp.stack([speed, acceleration, turn, turning])
    after = env_state + 0.02 * change
    terminated = (jnp.abs(after[0]) > 2.4) | (jnp.abs(after[2]) > 12 * jnp.pi / 180)
    return after, jnp.ones(()), terminated


def _pendulum_step(env_state: Array, action: Array) -> tuple[Array, Array, Array]:
    """Pendulum-v1, as gymnasium integrates it: a torque swings a pendulum up."""
    angle, speed = env_state
    torque = 2 * jnp.clip(action[0], -1, 1)
    wrapped = (angle + jnp.pi) % (2 * jnp.pi) - jnp.pi
    cost = wrapped**2 + 0.1 * speed**2 + 0.001 * torque**2
    speed = jnp.clip(speed + (15 * jnp.sin(angle) + 3 * torque) * 0.05, -8, 8)
    return jnp.stack([angle + 0.05 * speed, speed]), -cost, jnp.bool_(False)


def _pendulum_reset(key: PRNGKeyArray) -> Array:
    return jax.random.uniform(key, (2,), minval=-1, maxval=1) * jnp.array([jnp.pi, 1])


# The environments in JAX, by gymnasium's names.
ENVIRONMENTS = {
    "CartPole-v1": Environment(
        reset=lambda key: jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05),
        step=_cart_pole_step,
        observe=lambda env_state: env_state,
        limit=500,
    ),
    "Pendulum-v1": Environment(
        reset=_pendulum_reset,
        step=_pendulum_step,
        observe=lambda env_state: jnp.stack(
            [jnp.cos(env_state[0]), jnp.sin(env_state[0]), env_state[1]]
        ),
        limit=200,
    ),
}
