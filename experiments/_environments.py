"""Environments of reinforcement learning: gymnasium's, on the host, and two of them written in JAX.

An experiment steps several copies of an environment side by side. What these lanes hold, and the
transitions that they make, are dicts of arrays whose first dimension counts the lanes, so that they
are sharded over a mesh as a batch is. Where an episode ends, the next one starts in the same step.
Actions that are not discrete are scaled: each of their numbers is from -1 to 1.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from _usage import refuse
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from jaxtyping import Array, Bool, Float, PRNGKeyArray

Arrays = dict[str, Any]
Policy = Callable[[Any, PRNGKeyArray], Any]  # (observations, key) -> actions


@dataclass(frozen=True)
class Environment:
    """An environment as pure functions of one copy's physical state."""

    reset: Callable[[PRNGKeyArray], Float[Array, " physics"]]
    # (physics, action) -> (physics, reward, terminated)
    step: Callable[[Any, Any], tuple[Float[Array, " physics"], Float[Array, ""], Bool[Array, ""]]]
    observe: Callable[[Float[Array, " physics"]], Float[Array, " observation"]]
    limit: int  # number of steps after which an episode is truncated


def sizes(name: str, *, discrete: bool, on_device: bool) -> tuple[int, int]:
    """The number of numbers in an observation, and of discrete actions or of numbers in an action.

    Refuses environments that do not exist, or whose spaces are of another kind.
    """
    if on_device and name not in ENVIRONMENTS:
        refuse(
            f"Of the environments, {', '.join(ENVIRONMENTS)} are written in JAX, but not {name}."
        )
    try:
        env = gymnasium.make(name)
    except gymnasium.error.Error as error:
        refuse(f"--environment {name} cannot be created: {error}")
    observed: Any = env.observation_space
    action: Any = env.action_space
    is_discrete = isinstance(action, gymnasium.spaces.Discrete)
    if is_discrete != discrete or len(observed.shape or ()) != 1:
        kind = "discrete" if discrete else "continuous"
        refuse(
            f"--environment {name} has the observations {observed} and the actions {action}, but "
            f"this experiment needs vectors as observations, and {kind} actions."
        )
    return observed.shape[0], int(action.n) if is_discrete else action.shape[0]


def start_lanes(environment: Environment, key: PRNGKeyArray, lanes: int) -> Arrays:
    """Starts an episode in each lane."""
    physics = jax.vmap(environment.reset)(jax.random.split(key, lanes))
    zeros = jnp.zeros(lanes)
    # Until a lane's first episode ends, the return of the last one that ended is NaN.
    return {"physics": physics, "steps": zeros, "return": zeros, "finished": zeros + jnp.nan}


def step_lanes(
    environment: Environment, lanes: Arrays, action: Array, key: PRNGKeyArray
) -> tuple[Arrays, Arrays]:
    """Steps each lane; returns the lanes and the transitions."""
    observe = jax.vmap(environment.observe)
    before, count = lanes["physics"], lanes["steps"].size
    physics, reward, terminated = jax.vmap(environment.step)(before, action)
    steps, returns = lanes["steps"] + 1, lanes["return"] + reward
    ended = terminated | (steps >= environment.limit)
    fresh = jax.vmap(environment.reset)(jax.random.split(key, count))
    transitions = {
        "observation": observe(before),
        "action": action,
        "reward": reward,
        "next_observation": observe(physics),  # of the episode that ended, where one did
        "terminated": terminated,
        "ended": ended,
    }
    after = {
        "physics": jnp.where(ended[:, None], fresh, physics),
        "steps": jnp.where(ended, 0, steps),
        "return": jnp.where(ended, 0, returns),
        "finished": jnp.where(ended, returns, lanes["finished"]),
    }
    return after, transitions


def rollout(
    environment: Environment, policy: Policy, lanes: Arrays, key: PRNGKeyArray, steps: int
) -> tuple[Arrays, Arrays]:
    """Takes steps in each lane, as a part of a program; returns the lanes and the transitions,
    whose arrays have the shape `lanes steps ...`."""

    def step(lanes: Arrays, key: PRNGKeyArray) -> tuple[Arrays, Arrays]:
        act_key, reset_key = jax.random.split(key)
        action = policy(jax.vmap(environment.observe)(lanes["physics"]), act_key)
        return step_lanes(environment, lanes, action, reset_key)

    lanes, transitions = jax.lax.scan(step, lanes, jax.random.split(key, steps))
    return lanes, jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), transitions)


class HostLanes:
    """Gymnasium's environments, stepped side by side on the host."""

    def __init__(self, name: str, lanes: int, seed: int):
        make = lambda: scaled(gymnasium.make(name))
        self.envs = SyncVectorEnv([make] * lanes, autoreset_mode=AutoresetMode.SAME_STEP)
        self.observation, _ = self.envs.reset(seed=seed)
        self.returns, self.finished = (
            np.zeros(lanes, np.float32),
            np.full(lanes, np.nan, np.float32),
        )

    def step(self, action: np.ndarray) -> Arrays:
        """Steps each lane; returns the transitions."""
        before = self.observation
        self.observation, reward, terminated, truncated, info = self.envs.step(action)
        ended = terminated | truncated
        last = self.observation
        if ended.any():
            last = last.copy()
            last[ended] = np.stack(info["final_obs"][ended])
        self.returns += reward
        self.finished = np.where(ended, self.returns, self.finished)
        self.returns[ended] = 0
        return {
            "observation": before.astype(np.float32),
            "action": action,
            "reward": reward.astype(np.float32),
            "next_observation": last.astype(np.float32),
            "terminated": terminated,
            "ended": ended,
        }

    def rollout(self, policy: Policy, key: PRNGKeyArray, steps: int) -> Arrays:
        """Takes steps in each lane; returns the transitions, of shape `lanes steps ...`."""
        keys = jax.random.split(key, steps)
        taken = [self.step(np.asarray(policy(self.observation, key))) for key in keys]
        return jax.tree.map(lambda *x: np.stack(x, axis=1), *taken)


def scaled(env: gymnasium.Env) -> gymnasium.Env:
    if not isinstance(env.action_space, gymnasium.spaces.Box):
        return env
    one = np.ones(env.action_space.shape, np.float32)
    return gymnasium.wrappers.RescaleAction(env, -one, one)


def mean_return(name: str, policy: Policy, *, episodes: int, key: PRNGKeyArray) -> float:
    """The mean return of a policy in episodes of a gymnasium environment."""
    seed = int(jax.random.randint(key, (), 0, 2**31 - episodes))
    lanes, first = HostLanes(name, episodes, seed), np.full(episodes, np.nan)
    while np.isnan(first).any():
        key, _ = jax.random.split(key)
        lanes.step(np.asarray(policy(lanes.observation, key)))
        first = np.where(np.isnan(first), lanes.finished, first)
    return float(first.mean())


def _cart_pole_step(physics: Array, action: Array) -> tuple[Array, Array, Array]:
    """CartPole-v1 (Barto, Sutton and Anderson, 1983), as gymnasium integrates it."""
    _, speed, angle, turn = physics
    force = jnp.where(action == 1, 10.0, -10.0)
    sine, cosine = jnp.sin(angle), jnp.cos(angle)
    push = (force + 0.05 * turn**2 * sine) / 1.1
    turning = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
    acceleration = push - 0.05 * turning * cosine / 1.1
    change = jnp.stack([speed, acceleration, turn, turning])
    after = physics + 0.02 * change
    terminated = (jnp.abs(after[0]) > 2.4) | (jnp.abs(after[2]) > 12 * jnp.pi / 180)
    return after, jnp.ones(()), terminated


def _pendulum_step(physics: Array, action: Array) -> tuple[Array, Array, Array]:
    """Pendulum-v1, as gymnasium integrates it: a torque swings a pendulum up."""
    angle, speed = physics
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
        observe=lambda physics: physics,
        limit=500,
    ),
    "Pendulum-v1": Environment(
        reset=_pendulum_reset,
        step=_pendulum_step,
        observe=lambda physics: jnp.stack([jnp.cos(physics[0]), jnp.sin(physics[0]), physics[1]]),
        limit=200,
    ),
}
